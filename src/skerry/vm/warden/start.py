"""`python -I -S start.py FOLDER`: the warden of the machine in that folder. It reads its task, JSON, from stdin.

It is the parent of the hypervisor's process, which dies with it. It begins as whoever launched it and becomes the
machine's own user before the hypervisor starts; all that it needs is imported by then, for that user may read nothing.
"""

import sys


def main() -> None:
    top = __file__.rpartition("/vm/warden/")[0]
    for name in ("skerry", "skerry.agent", "skerry.agent.guest", "skerry.vm", "skerry.vm.warden"):
        package = type(sys)(name)  # without what the real one imports
        package.__path__ = [top + name.removeprefix("skerry").replace(".", "/")]
        sys.modules[name] = package
    from skerry.vm.warden import warden

    warden.run(sys.argv[1])


main()
