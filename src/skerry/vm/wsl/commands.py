"""What wsl.exe is told, and what it says."""

from __future__ import annotations

import re
from pathlib import Path

from skerry.errors import ProviderError

PROGRAM = "/mnt/c/Windows/System32/wsl.exe"
"""Where a distribution sees it, unless its settings say otherwise."""
_PYTHON = "/.skerry/python"
_INTERPRETER = (f"{_PYTHON}/lib/ld.so", "--library-path", f"{_PYTHON}/lib", f"{_PYTHON}/bin/python3", "-I", "-S", "-B")
_NAMESPACES = ("unshare", "-m", "-u", "-i", "-n", "-p", "-f", "--mount-proc")
"""In a distribution alone a box would share the network of all the others."""
JOIN = """
import posix, sys, _socket
ours, theirs = _socket.socketpair()
for source, target in ((0, ours.fileno()), (ours.fileno(), 1)):
    if not posix.fork():
        source, target = posix.dup(source), posix.dup(target)
        posix.dup2(source, 0)
        posix.dup2(target, 1)
        posix.execv("/bin/cat", ["cat"])
posix.dup2(theirs.fileno(), 0)
posix.execv(sys.argv[1], sys.argv[1:])
"""
"""Makes one descriptor of standard input and output, and runs what follows with it as its input."""
_MACHINE = (*_INTERPRETER, "/.skerry/agent/machine.py", "skerry.channel=fd:0", "skerry.drives=none")
_INIT = (*_NAMESPACES, *_INTERPRETER, "-c", JOIN, *_MACHINE)
_OVER_THE_CHANNEL = ("/bin/sh", "-c", 'WSL_INTEROP=/run/WSL/1_interop exec "$@" <&3 >&3', "sh")
"""Windows passes on standard input and output, and no other descriptor. The socket is the one that programs without a
terminal reach it by."""

PACK = """
mount -o ro,loop -- "$1" "$3"
mount -o ro,loop -- "$2" "$3/.skerry"
exec tar --numeric-owner --exclude=./etc/wsl.conf --transform='flags=r;s|^wsl.conf$|./etc/wsl.conf|' \\
    -c -C "$3" . -C "$4" wsl.conf
"""
"""Packs an image and the runtime as one root; the mounts end with the shell, which has a mount namespace."""

CONF = """\
[automount]
enabled=false
mountFsTab=false
[interop]
enabled=false
appendWindowsPath=false
[boot]
systemd=false
"""
"""Of a box's distribution: none of Windows's drives, and no way to start a program there."""


def pack(root: Path, runtime: Path, mount: Path, conf: Path) -> list[str]:
    words = [str(path) for path in (root, runtime, mount, conf)]
    return ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-euc", PACK, "sh", *words]


def import_from_stdin(program: str, name: str, disks: str) -> list[str]:
    """`disks` is a folder as Windows names it: the distribution's disk is made in one of its name there."""
    return [program, "--import", name, f"{disks.rstrip(chr(92))}\\{name}", "-", "--version", "2"]


def run(program: str, name: str) -> list[str]:
    return [*_OVER_THE_CHANNEL, program, "--distribution", name, "--user", "root", "--cd", "/", "--exec", *_INIT]


def terminate(program: str, name: str) -> list[str]:
    return [program, "--terminate", name]


def unregister(program: str, name: str) -> list[str]:
    """Removes its disk too."""
    return [program, "--unregister", name]


def list_all(program: str) -> list[str]:
    return [program, "--list", "--verbose"]


def text_of(output: bytes) -> str:
    """wsl.exe writes UTF-16, unless it is asked for UTF-8."""
    return output.decode("utf-16-le" if b"\0" in output else "utf-8", errors="replace").lstrip("\ufeff")


def registered(output: bytes) -> set[str]:
    """The names in what `--list --verbose` says: `* NAME  STATE  VERSION`, in the language of the host."""
    lines = (line.lstrip("* ").split() for line in text_of(output).splitlines()[1:])
    return {words[0] for words in lines if len(words) >= 3}


def version_of(output: bytes) -> str:
    """The first number in what `--version` says, whose words are in the language of the host."""
    found = re.search(r"\d+\.\d+[.\d]*", text_of(output))
    if found is None:
        raise ProviderError("wsl.exe does not tell its version; update it: wsl --update")
    return found[0]


def is_wsl2(kernel_release: str) -> bool:
    return "microsoft" in kernel_release.lower() and "wsl2" in kernel_release.lower()
