"""`machine.py [WORD...]`: start of the first process of a virtual machine. The words are taken as if they stood on the
kernel's command line. The initial ram disks of images run this path."""

import sys


def main() -> None:
    package = type(sys)("skerry_agent")
    package.__path__ = [__file__.rpartition("/")[0]]
    sys.modules["skerry_agent"] = package
    from skerry_agent.vm import first_process  # type: ignore[import-not-found]

    with open("/proc/cmdline", encoding="utf-8", errors="replace") as file:
        words = file.read().split()
    first_process.FirstProcess([*sys.argv[1:], *words]).run()


main()
