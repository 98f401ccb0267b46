"""File systems that we write ourselves, held against e2fsprogs and the kernel's own reading."""

from __future__ import annotations

import io
import os
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from skerry.errors import InvalidSpec
from skerry.oci.roots import Entry
from skerry.vm.images import ext4, tree

pytestmark = pytest.mark.skipif(
    shutil.which("debugfs", path="/usr/sbin:/sbin:/usr/bin") is None, reason="no e2fsprogs here"
)


def written(tmp_path: Path, found: Sequence[Entry], folders: Sequence[str] = ()) -> Path:
    image = tmp_path / "image"
    ext4.write(tree.of(found, folders), image)
    check(image)
    return image


def check(image: Path) -> None:
    done = subprocess.run(["/sbin/e2fsck", "-fn", image], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stdout


def debugfs(image: Path, request: str) -> str:
    return subprocess.run(
        ["/sbin/debugfs", "-R", request, image], capture_output=True, text=True, check=True, timeout=50
    ).stdout


def entry(name: str, kind: bytes = tarfile.REGTYPE, content: bytes = b"", **fields: object) -> Entry:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return Entry(info, (lambda: io.BytesIO(content)) if kind == tarfile.REGTYPE else None)


def test_files_come_out_as_they_went_in(tmp_path: Path) -> None:
    large = os.urandom(3 << 20) + bytes(1 << 20) + b"end"
    image = written(
        tmp_path,
        [
            tree.folder_entry("etc", 0o750),
            entry("etc/large", content=large, mode=0o4711, uid=70000, gid=80000, mtime=1234567890),
            entry("etc/empty"),
            entry("etc/again", tarfile.LNKTYPE, linkname="etc/large"),
            tree.link_entry("etc/short", "large"),
            tree.link_entry("etc/long", "x/" * 100 + "y"),
            entry("pipe", tarfile.FIFOTYPE, mode=0o600),
        ],
    )
    out = tmp_path / "out"
    debugfs(image, f"dump /etc/large {out}")
    assert out.read_bytes() == large
    told = debugfs(image, "stat /etc/large")
    assert "Mode:  04711" in told
    assert "User: 70000   Group: 80000" in told
    assert "Links: 2" in told
    assert "0x499602d2" in told
    assert debugfs(image, "stat /etc/again").splitlines()[0] == told.splitlines()[0]
    assert 'Fast link dest: "large"' in debugfs(image, "stat /etc/short")
    assert debugfs(image, "cat /etc/long") == "x/" * 100 + "y"
    assert "Type: FIFO" in debugfs(image, "stat /pipe")


def test_attributes_are_kept_in_the_inode_or_beside_it(tmp_path: Path) -> None:
    capability = bytes.fromhex("0100000200200000000000000000000000000000")
    small = {"SCHILY.xattr.security.capability": capability.decode("utf-8", "surrogateescape")}
    large = small | {"SCHILY.xattr.user.note": "n" * 2000, "SCHILY.xattr.trusted.overlay.redirect": "/etc"}
    image = written(tmp_path, [entry("small", pax_headers=small), entry("large", pax_headers=large)])
    assert "security.capability (20)" in debugfs(image, "ea_list /small")
    told = debugfs(image, "ea_list /large")
    assert "user.note (2000)" in told
    assert "overlay" not in told, "what only a kernel may say of a file is not taken from an image"
    out = tmp_path / "out"
    debugfs(image, f"ea_get -f {out} /large security.capability")
    assert out.read_bytes() == capability


def test_a_folder_may_have_thousands_of_names_and_a_tree_many_groups(tmp_path: Path) -> None:
    names = [f"many/{number:05}-{'n' * 100}" for number in range(5000)]
    found = [entry(name) for name in names]
    found.append(Entry(entry("huge").info, partial(Path("/dev/zero").open, "rb")))
    found[-1].info.size = 700 << 20
    image = written(tmp_path, found)
    assert image.stat().st_blocks * 512 < 20 << 20, "zeros take no room"
    assert debugfs(image, "ls -p /many").count("/0") >= 5000
    assert f"Size: {700 << 20}" in debugfs(image, "stat /huge")


def test_the_same_tree_makes_the_same_bytes(tmp_path: Path) -> None:
    found = [tree.file_entry("b", b"b" * 5000), tree.file_entry("a", b"a"), tree.folder_entry("c")]
    images = []
    for name in ("one", "two"):
        images.append(tmp_path / name)
        ext4.write(tree.of(found), images[-1])
    assert images[0].read_bytes() == images[1].read_bytes()


def test_what_a_machine_mounts_over_is_there_also_where_the_image_has_links(tmp_path: Path) -> None:
    image = written(tmp_path, [tree.link_entry("home", "var/home"), tree.file_entry("tmp/x", b"")], tree.FOLDERS)
    assert "Type: directory" in debugfs(image, "stat /var/home/user")
    assert "Mode:  01777" in debugfs(image, "stat /tmp")
    assert "Type: directory" in debugfs(image, "stat /.skerry")


@pytest.mark.parametrize(
    "found",
    [
        [tree.link_entry("a", "a"), entry("a/b")],
        [tree.file_entry("a", b""), entry("a/b")],
        [entry("a", tarfile.LNKTYPE, linkname="nothing")],
        [entry("a" * 300)],
        [tree.link_entry("a", "")],
    ],
    ids=["a loop of links", "a file as a folder", "a link to nothing", "a long name", "an empty link"],
)
def test_a_tree_that_cannot_be_is_refused(tmp_path: Path, found: Sequence[Entry]) -> None:
    with pytest.raises(InvalidSpec):
        written(tmp_path, found)


def test_links_that_lead_out_stay_inside(tmp_path: Path) -> None:
    target = tmp_path / "host"
    target.mkdir()
    image = written(tmp_path, [tree.link_entry("way", f"../../..{target}"), tree.file_entry("way/planted", b"x")])
    assert list(target.iterdir()) == []
    assert debugfs(image, f"cat {target}/planted") == "x"


def test_a_file_that_became_shorter_is_told(tmp_path: Path) -> None:
    short = Entry(entry("a", content=b"12345").info, lambda: io.BytesIO(b"123"))
    with pytest.raises(InvalidSpec, match="shorter"):
        ext4.write(tree.of([short]), tmp_path / "image")


@pytest.mark.skipif(os.geteuid() != 0 or not os.path.exists("/dev/loop-control"), reason="only root mounts")
def test_the_kernel_reads_it(tmp_path: Path) -> None:
    image = written(tmp_path, [tree.file_entry(f"f/{number}", b"%d" % number, 0o640) for number in range(2000)])
    point = tmp_path / "point"
    point.mkdir()
    subprocess.run(["mount", "-o", "loop,ro", image, point], check=True, timeout=30)
    try:
        assert {path.name: path.read_text() for path in (point / "f").iterdir()} == {
            str(n): str(n) for n in range(2000)
        }
        assert stat.S_IMODE((point / "f/7").stat().st_mode) == 0o640
    finally:
        subprocess.run(["umount", point], check=True, timeout=30)
