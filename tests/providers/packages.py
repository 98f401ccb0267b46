"""A package of Debian's kind in a repository of its own, and a root that installs it, all without a network."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from skerry.sandbox.sandbox import AsyncSandbox

_PLACE = "/tmp/repository"
_CONTROL = """Package: skerry-hello
Version: 1.0
Architecture: all
Maintainer: Tests <tests@example.org>
Description: one program, one user
"""
_AFTER = """#!/bin/sh
set -e
useradd --system --no-create-home hello
chown hello: /usr/share/skerry-hello
cp /usr/bin/id /usr/share/skerry-hello/id
chmod 4755 /usr/share/skerry-hello/id
"""
_OPTIONS = f"-qq -o Dir::Etc::sourcelist={_PLACE}/list -o Dir::Etc::sourceparts=-"
_CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 31)
"""CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID and SETFCAP, by the kernel's numbers."""


def make(folder: Path) -> Path:
    """Make a repository with the package `skerry-hello`, whose script adds a user and changes owners."""
    program = shutil.which("dpkg-deb")
    if program is None:
        pytest.skip("no dpkg-deb here; it makes the package")
    tree, repository = folder / "tree", folder / "repository"
    for path, text, mode in (
        ("DEBIAN/control", _CONTROL, 0o644),
        ("DEBIAN/postinst", _AFTER, 0o755),
        ("usr/bin/skerry-hello", "#!/bin/sh\necho hello from a package\n", 0o755),
    ):
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text)
        (tree / path).chmod(mode)
    (tree / "usr/share/skerry-hello").mkdir(parents=True)
    for path in (tree, *(path for path in tree.rglob("*") if path.is_dir())):
        path.chmod(0o755)
    repository.mkdir()
    package = repository / "skerry-hello.deb"
    command = [program, "--root-owner-group", "-Znone", "--build", str(tree), str(package)]
    subprocess.run(command, check=True, timeout=30, capture_output=True)
    data = package.read_bytes()
    entry = f"Filename: ./{package.name}\nSize: {len(data)}\nSHA256: {hashlib.sha256(data).hexdigest()}\n"
    (repository / "Packages").write_text(_CONTROL + entry)
    (repository / "list").write_text(f"deb [trusted=yes] file:{_PLACE} ./\n")
    return repository


async def check_root_can_install(sandbox: AsyncSandbox, repository: Path, *, has_setuid: bool = True) -> None:
    """Install it, become its user, and become root again by a program that is for that: as on any Debian."""
    for file in repository.iterdir():
        await sandbox.files.write(f"{_PLACE}/{file.name}", file.read_bytes())
    installed = await sandbox.exec(f"apt-get {_OPTIONS} update && apt-get {_OPTIONS} install -y skerry-hello 2>&1")
    assert installed.ok, installed.text + installed.stderr.decode()
    seen = await sandbox.exec(
        "skerry-hello; stat -c %U /usr/share/skerry-hello; useradd worker; touch /srv/note; chown worker /srv/note; "
        "su worker -s /bin/sh -c 'id -un; test -O /srv/note && /usr/share/skerry-hello/id -u'"
    )
    *rest, uid = seen.text.splitlines()
    assert rest == ["hello from a package", "hello", "worker"], seen.text + seen.stderr.decode()
    assert (uid == "0") is has_setuid


async def check_capabilities(sandbox: AsyncSandbox, *more: int) -> None:
    """Root has those that this takes, and `more`, and no other can be had."""
    status = (await sandbox.exec("grep -E '^Cap(Eff|Bnd)|NoNewPrivs' /proc/self/status")).text
    found = {line.split(":")[0]: line.split(":")[1].strip() for line in status.splitlines()}
    wanted = f"{sum(1 << bit for bit in (*_CAPABILITIES, *more)):016x}"
    assert found == {"CapEff": wanted, "CapBnd": wanted, "NoNewPrivs": "0"}


async def check_scratch(sandbox: AsyncSandbox) -> None:
    """The user of a box, who is not root, can write where programs expect to."""
    write = "for folder in /tmp /run /var/tmp; do echo x > $folder/mine && cat $folder/mine; done"
    seen = await sandbox.exec(f"{write}; id -u")
    *written, uid = seen.text.split()
    assert written == ["x", "x", "x"], seen.stderr.decode()
    assert uid != "0"
