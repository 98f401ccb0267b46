"""`python -I -S start.py FOLDER`: start of the warden of the machine in that folder. Its task is JSON on stdin. It is
the parent of the hypervisor's process, which dies with it. It begins as whoever launched it and becomes the machine's
own user before the hypervisor starts; all that it needs is imported by then, for that user may read nothing."""

import sys


def main() -> None:
    top = __file__.rpartition("/vm/warden/")[0]
    for path in ("", ".agent", ".agent.guest", ".agent.guest.vm", ".vm", ".vm.warden"):
        name = "skerry" + path
        package = type(sys)(name)  # without what the real one imports
        package.__path__ = [top + path.replace(".", "/")]
        sys.modules[name] = package
    from skerry.vm.warden import warden

    warden.run(sys.argv[1])


main()
