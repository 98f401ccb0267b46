"""Images for machines from all that images are imported from."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from engines.oci_layouts import Layout, layer

from skerry.errors import InvalidSpec
from skerry.model.results import Progress
from skerry.vm.images import debian, tree
from skerry.vm.images.recipes import Recipe
from skerry.vm.images.store import ImageStore


def silent(_: Progress) -> None:
    return


def debugfs(image: Path, request: str) -> str:
    done = subprocess.run(["/sbin/debugfs", "-R", request, image], capture_output=True, text=True, timeout=30)
    return done.stdout + done.stderr


async def rootfs(store: ImageStore, source: Path) -> Path:
    await store.import_(source, "a", silent)
    return (await store.resolve("a")).rootfs


async def test_a_folder(store: ImageStore, tmp_path: Path) -> None:
    folder = tmp_path / "root"
    (folder / "etc").mkdir(parents=True)
    (folder / "etc/file").write_text("content")
    os.link(folder / "etc/file", folder / "etc/same")
    (folder / "etc/link").symlink_to("/etc/file")
    (folder / "etc/file").chmod(0o600)
    image = await rootfs(store, folder)
    assert debugfs(image, "cat /etc/file").startswith("content")
    told = debugfs(image, "stat /etc/same")
    assert "Links: 2" in told
    assert "Mode:  0600" in told
    assert f"User: {os.getuid():5}" in told
    assert '"/etc/file"' in debugfs(image, "stat /etc/link")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives capabilities")
async def test_what_a_program_may_do_goes_along(store: ImageStore, tmp_path: Path) -> None:
    folder = tmp_path / "root"
    folder.mkdir()
    (folder / "program").write_bytes(b"x")
    capability = bytes.fromhex("0100000200200000000000000000000000000000")
    os.setxattr(folder / "program", "security.capability", capability)
    assert "security.capability (20)" in debugfs(await rootfs(store, folder), "ea_list /program")


async def test_a_tar_keeps_owners_for_whoever_imports_it(store: ImageStore, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "root.tar.gz", "w:gz") as tar:
        info = tarfile.TarInfo("./srv/file")
        info.size, info.uid, info.gid, info.mode = 3, 1234, 5678, 0o2755
        tar.addfile(info, io.BytesIO(b"abc"))
        device = tarfile.TarInfo("./dev/null")
        device.type = tarfile.CHRTYPE
        tar.addfile(device)
    said: list[str] = []
    await store.import_(tmp_path / "root.tar.gz", "a", lambda progress: said.append(progress.message))
    told = debugfs((await store.resolve("a")).rootfs, "stat /srv/file")
    assert "Mode:  02755" in told
    assert "User:  1234   Group:  5678" in told
    assert any("left out 1 devices" in each for each in said)


async def test_an_oci_layout_with_layers_that_remove(store: ImageStore, tmp_path: Path) -> None:
    lower = layer({"etc/kept": b"1", "etc/gone": b"2", "var/old/file": b"3", "etc/both": b"low"})
    upper = layer({"etc/.wh.gone": b"", "var/old/.wh..wh..opq": b"", "var/old/new": b"4", "etc/both": b"high"})
    layout = Layout(lower, upper)
    image = await rootfs(store, layout.write(tmp_path / "layout"))
    assert debugfs(image, "cat /etc/both").startswith("high")
    assert debugfs(image, "cat /etc/kept").startswith("1")
    listed = debugfs(image, "ls -p /etc") + debugfs(image, "ls -p /var/old")
    assert "/gone/" not in listed
    assert "/file/" not in listed
    assert "/new/" in listed
    assert ".wh." not in listed
    found = await store.resolve("a")
    assert (found.env, found.cwd, found.user) == ({"FROM_LAYOUT": "yes"}, "/srv", "")


async def test_an_archive_of_docker(store: ImageStore, tmp_path: Path) -> None:
    config = {"architecture": "amd64", "os": "linux", "config": {"User": "1000:1000", "Env": ["A=b=c"]}}
    manifest = [{"Config": "config.json", "RepoTags": ["x:latest"], "Layers": ["layer.tar"]}]
    files = {
        "config.json": json.dumps(config).encode(),
        "manifest.json": json.dumps(manifest).encode(),
        "layer.tar": layer({"bin/program": b"p"}),
    }
    (tmp_path / "saved.tar").write_bytes(layer(files))
    image = await rootfs(store, tmp_path / "saved.tar")
    assert "Mode:  0755" in debugfs(image, "stat /bin/program")
    found = await store.resolve("a")
    assert (found.user, found.env) == ("1000:1000", {"A": "b=c"})


async def test_the_same_files_with_other_settings_are_another_image(store: ImageStore, tmp_path: Path) -> None:
    content = layer({"file": b"x"})
    plain = await store.import_(Layout(content).write(tmp_path / "one"), "one", silent)
    other = Layout(content)
    other.manifest["config"] = other.add(
        json.dumps(other.config | {"config": {"User": "7"}}).encode(), "application/vnd.oci.image.config.v1+json"
    )
    other.refer()
    changed = await store.import_(other.write(tmp_path / "two"), "two", silent)
    assert changed.id != plain.id
    assert (await store.resolve("two")).user == "7"


@pytest.mark.parametrize("name", ["../outside", "a/../../outside"])
async def test_a_tar_that_leads_out_is_refused(store: ImageStore, tmp_path: Path, name: str) -> None:
    (tmp_path / "bad.tar").write_bytes(layer({name: b"x"}))
    with pytest.raises(InvalidSpec, match="outside"):
        await store.import_(tmp_path / "bad.tar", "a", silent)
    assert store.all() == []


async def test_what_is_no_image_is_told(store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("no tar")
    cut = layer({"file": bytes(100_000)})[:50_000]
    (tmp_path / "cut.tar").write_bytes(cut)
    for source in ("empty", "text", "cut.tar", "missing"):
        with pytest.raises(InvalidSpec):
            await store.import_(tmp_path / source, "a", silent)
    assert store.all() == []


def file_system(path: Path, text: str = "one") -> Path:
    """A file system as others make one: with a journal, and none of our folders."""
    root = path.with_suffix(".root")
    root.mkdir(exist_ok=True)
    (root / "motd").write_text(text)
    path.unlink(missing_ok=True)
    subprocess.run(["/sbin/mke2fs", "-q", "-t", "ext4", "-d", root, path, "8M"], check=True, timeout=30)
    return path


async def test_a_file_with_a_file_system_is_copied_as_it_is(store: ImageStore, tmp_path: Path) -> None:
    source = file_system(tmp_path / "rootfs.ext4")
    before = source.read_bytes(), source.stat()
    copy = await rootfs(store, source)
    assert copy.read_bytes() == before[0]
    assert not copy.samefile(source)
    assert (source.read_bytes(), source.stat().st_mtime_ns) == (before[0], before[1].st_mtime_ns)
    assert store.find("a").size == len(before[0])


async def test_a_file_system_is_an_image_by_its_path(store: ImageStore, tmp_path: Path) -> None:
    """It is read when it is first asked for, and when it has changed; what was made of it before stays what it was."""
    path = file_system(tmp_path / "rootfs.ext4")
    first = await store.resolve(str(path))
    assert first.names == (str(path),)
    assert (await store.resolve(str(path))).rootfs == first.rootfs
    file_system(path, "two")
    second = await store.resolve(str(path))
    assert second.id != first.id
    assert store.find(str(path)).id == second.id
    assert "one" in debugfs((await store.resolve(first.id)).rootfs, "cat motd")
    await store.remove(str(path))
    assert (await store.resolve(str(path))).id == second.id
    path.unlink()
    assert (await store.resolve(second.id)).rootfs == second.rootfs
    with pytest.raises(InvalidSpec, match="No such file"):
        await store.resolve(str(path))


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda path: path.write_bytes(bytes(1 << 16)), "no ext4"),
        (lambda path: os.truncate(path, 1 << 20), "larger than the file"),
        (lambda path: path.symlink_to(path.rename(path.with_name("real"))), "link"),
        (lambda path: (path.unlink(), path.mkdir()), "no file"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "no file"),
    ],
    ids=["text", "cut", "link", "folder", "pipe"],
)
async def test_a_path_that_leads_to_no_file_system_is_told(
    store: ImageStore, tmp_path: Path, spoil: Callable[[Path], object], told: str
) -> None:
    path = file_system(tmp_path / "rootfs.ext4")
    spoil(path)
    with pytest.raises(InvalidSpec, match=told):
        await store.resolve(str(path))
    assert store.all() == []


async def test_a_file_system_with_work_left_in_its_journal_is_told(store: ImageStore, tmp_path: Path) -> None:
    """It could not be mounted without a write."""
    path = file_system(tmp_path / "rootfs.ext4")
    with open(path, "r+b") as file:
        file.seek(1024 + 96)
        features = int.from_bytes(file.read(4), "little")
        file.seek(1024 + 96)
        file.write((features | 4).to_bytes(4, "little"))
    for ask in (lambda: store.resolve(str(path)), lambda: store.import_(path, "a", silent)):
        with pytest.raises(InvalidSpec, match="e2fsck"):
            await ask()
    assert store.all() == []


def test_what_only_the_build_of_a_recipe_needed_stays_out() -> None:
    found = [
        tree.file_entry(name, b"x") for name in ("./var/cache/apt/x", "./etc/machine-id", "./bin/kept", "./bin/gone/y")
    ]
    recipe = Recipe(about="", suite="none", removed=("bin/gone",))
    left = {entry.info.name: entry.info.size for entry in debian.trimmed(recipe, found)}
    assert left["./bin/kept"] == 1
    assert (left["etc/machine-id"], left["var/cache"]) == (0, 0)
    assert not {"./var/cache/apt/x", "./etc/machine-id", "./bin/gone/y"} & left.keys()
