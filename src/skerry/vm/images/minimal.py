"""The smallest image: busybox under all its names, and the files that programs look for."""

from __future__ import annotations

import subprocess
from pathlib import Path

from skerry.sources.roots import Entry
from skerry.vm.images import entries

_FOLDERS = ("bin", "etc", "sbin", "usr", "usr/bin", "usr/local", "usr/local/bin", "usr/sbin", "var")
_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/home/user:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/:/bin/false\n",
    "etc/group": "root:x:0:\ntty:x:5:\nuser:x:1000:\nnogroup:x:65534:\n",
    "etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "etc/hostname": "",
    "etc/machine-id": "",
    "etc/resolv.conf": "",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "etc/os-release": 'ID=skerry\nNAME="skerry minimal"\nPRETTY_NAME="skerry minimal"\n',
    "etc/profile": "export PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin\n",
}
_LIST_S = 10


def root(busybox: Path) -> list[Entry]:
    """What it consists of."""
    listed = subprocess.run([busybox, "--list"], capture_output=True, check=True, timeout=_LIST_S, text=True)
    return [
        *(entries.folder(name) for name in _FOLDERS),
        entries.folder("root", 0o700),
        entries.folder("var/tmp", 0o1777),
        entries.file("bin/busybox", busybox.read_bytes(), 0o755),
        *(entries.file(name, text.encode()) for name, text in _FILES.items()),
        *(entries.link(f"bin/{name}", "busybox") for name in sorted(listed.stdout.split()) if name != "busybox"),
        entries.link("usr/bin/env", "../../bin/busybox"),
    ]
