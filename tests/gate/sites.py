"""What the sites of the little internet hold: pages, and one small package for each kind of client."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import io
import json
import subprocess
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from providers import packages

WHEELS = ("requests", "urllib3", "idna", "certifi", "charset-normalizer", "httpx", "httpcore", "h11", "anyio")
WHEELS += ("sniffio", "typing-extensions")
"""Packages of these tests' own environment that a box installs through the gate, as it would from PyPI."""


def build(folder: Path, names: Iterable[str], tls_port: int) -> None:
    """Fill a folder for each site. Raises CalledProcessError where git or dpkg-deb fail."""
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "hello").write_text(f"hello from {name}\n")
    _build_pypi(folder / "pypi.test")
    _build_npm(folder / "registry.npm.test", f"https://registry.npm.test:{tls_port}")
    _build_git(folder / "git.test")
    _build_debian(folder / "deb.test", folder)


def _build_pypi(site: Path) -> None:
    (site / "files").mkdir()
    wheels = {"skerry-hello": ("skerry_hello-1.0-py3-none-any.whl", _own_wheel())}
    for name in WHEELS:
        try:
            wheels[name] = _packed_again(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # what nothing needs any more, such as sniffio
    for name, (file, data) in wheels.items():
        (site / "files" / file).write_bytes(data)
        page = site / "simple" / name / "index.html"
        page.parent.mkdir(parents=True)
        page.write_text(f"<!DOCTYPE html><html><body><a href='../../files/{file}'>{file}</a></body></html>")


def _own_wheel() -> bytes:
    return _wheel(
        "skerry_hello-1.0",
        {
            "skerry_hello.py": b"print('hello from a wheel')\n",
            "skerry_hello-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: skerry-hello\nVersion: 1.0\n",
        },
    )


def _packed_again(name: str) -> tuple[str, bytes]:
    """The wheel that an installed package came from, without what is compiled."""
    package = importlib.metadata.distribution(name)
    stem = f"{package.metadata['Name'].replace('-', '_')}-{package.version}"
    files: dict[str, bytes] = {}
    for file in package.files or ():
        is_ours = ".." in file.parts or file.suffix in (".so", ".pyc")
        if not is_ours and file.name not in ("RECORD", "WHEEL", "INSTALLER", "REQUESTED", "direct_url.json"):
            path = file.parts
            if path[0].endswith(".dist-info"):
                path = (f"{stem}.dist-info", *path[1:])
            files["/".join(path)] = Path(str(package.locate_file(file))).read_bytes()
    return f"{stem}-py3-none-any.whl", _wheel(stem, files)


def _wheel(stem: str, files: dict[str, bytes]) -> bytes:
    info = f"{stem}.dist-info"
    files = {**files, f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as wheel:
        for name, data in {**files, f"{info}/RECORD": record.encode()}.items():
            wheel.writestr(name, data)
    return made.getvalue()


def _build_npm(site: Path, address: str) -> None:
    about = {"name": "skerry-hello", "version": "1.0.0", "main": "index.js"}
    tarball = io.BytesIO()
    with tarfile.open(fileobj=tarball, mode="w:gz") as tar:
        for name, text in (
            ("package.json", json.dumps(about)),
            ("index.js", "console.log('hello from a package of npm')\n"),
        ):
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size, entry.mode = len(text), 0o644
            tar.addfile(entry, io.BytesIO(text.encode()))
    data = tarball.getvalue()
    (site / "files").mkdir()
    (site / "files/skerry-hello.tgz").write_bytes(data)
    integrity = f"sha512-{base64.b64encode(hashlib.sha512(data).digest()).decode()}"
    version = {**about, "dist": {"tarball": f"{address}/files/skerry-hello.tgz", "integrity": integrity}}
    told = {"name": "skerry-hello", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
    (site / "skerry-hello").write_text(json.dumps(told))


def _build_git(site: Path) -> None:
    """A bare repository, also for those who only fetch files."""
    work, bare = site / "work", site / "hello.git"
    who = ("-c", "user.name=tests", "-c", "user.email=tests@example.org", "-c", "init.defaultBranch=main")
    work.mkdir()
    (work / "note").write_text("hello from git\n")
    for command in (
        ["init", "--quiet", str(work)],
        ["-C", str(work), "add", "note"],
        ["-C", str(work), "commit", "--quiet", "--message", "A note"],
        ["clone", "--quiet", "--bare", str(work), str(bare)],
        ["-C", str(bare), "update-server-info"],
    ):
        subprocess.run(["git", *who, *command], check=True, capture_output=True, timeout=30)


def _build_debian(site: Path, folder: Path) -> None:
    place = folder / "debian"
    place.mkdir()
    packages.make(place).rename(site / "debian")
