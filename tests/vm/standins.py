"""Small programs in place of a hypervisor, and a look at the host that asks nobody."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from skerry.errors import CreateFailed
from skerry.vm import launch
from skerry.vm.folder import VmFolder
from skerry.vm.launch import Launch

IS_ROOT = os.geteuid() == 0
WAIT_S = 50


@contextlib.contextmanager
def vm_folder() -> Iterator[VmFolder]:
    """A machine's folder in a folder that is closed to all others; nothing may be left of the machine."""
    parent = Path(tempfile.mkdtemp(prefix="skerry-vm-"))
    folder = VmFolder(parent / "vm")
    folder.make()
    try:
        yield folder
        launch.kill(folder)
        assert seen_on_host(folder) == []
    finally:
        launch.kill(folder)
        shutil.rmtree(parent)


def may_set_floor() -> bool:
    """Whether what we say of a process's end is the least that it can say itself: CAP_SYS_RESOURCE, number 24."""
    found = re.search(r"^CapEff:\s*(\w+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> 24 & 1)


def script(text: str) -> Launch:
    return Launch(argv=["/bin/sh", "-c", text])


def run(folder: VmFolder, text: str) -> str:
    """What a program says that runs in place of a hypervisor, once it has ended."""
    try:
        launch.start(folder, script(text), None)
    except CreateFailed:  # it may have ended before it was looked at
        assert folder.read_end()
    until(lambda: folder.read_end() and not seen_on_host(folder) and not has_processes(folder))
    return folder.read_console()


def has_processes(folder: VmFolder) -> bool:
    """Also one that is about to end, whose arguments nobody can read any more."""
    vm = folder.read()
    return vm is not None and bool(launch._processes_of(folder, vm))


def until(condition: Callable[[], object]) -> None:
    """The end of a process of another's is told by no event: it is looked for."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.005)


def seen_on_host(folder: VmFolder) -> list[str]:
    """Processes that work in the folder or bear its name."""
    name = os.fsencode(folder.path)
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                words = Path("/proc", entry, "cmdline").read_bytes().split(b"\0")
                if name in words or os.readlink(f"/proc/{entry}/cwd") == str(folder.path):
                    found.append(b" ".join(words).decode())
    return found
