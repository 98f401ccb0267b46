"""`machine.py [WORD...]`: where the first process of a virtual machine begins.

The words are taken as if they stood on the kernel's command line.
"""

import sys


def main() -> None:
    package = type(sys)("skerry_agent")
    package.__path__ = [__file__.rpartition("/")[0]]
    sys.modules["skerry_agent"] = package
    from skerry_agent import first_process  # type: ignore[import-not-found]

    with open("/proc/cmdline", encoding="utf-8", errors="replace") as file:
        words = file.read().split()
    first_process.Machine([*sys.argv[1:], *words]).run()


main()
