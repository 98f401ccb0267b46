"""Images of every kind become boxes, and what they ask for is heard."""

from __future__ import annotations

import io
import shutil
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from engines.images import busybox
from engines.incusd import image as unified_image
from engines.oci_layouts import Layout, layer

from skerry.errors import Conflict, ImageNotFound, InvalidSpec, Unsupported
from skerry.model.spec import Spec
from skerry.providers.base import ImageBuild, Progress
from skerry.providers.incus import Incus
from skerry.sandbox.sandbox import AsyncSandbox

NAME = "imported"


def ignore(_: Progress) -> None:
    return


@pytest.fixture(autouse=True)
async def _leave_no_image(incus: Incus) -> AsyncIterator[None]:
    yield
    for image in await incus.images():
        if image.names != ("busybox",):
            await incus.remove_image(image.id)


async def said(incus: Incus, command: str, image: str = NAME) -> str:
    sandbox = await AsyncSandbox.create(Spec.of(provider="incus", image=image, data=False), incus)
    try:
        return (await sandbox.exec(command)).text
    finally:
        await sandbox.destroy()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tar of a root file system."""
    path = tmp_path / "root.tar"
    with busybox() as content:
        path.write_bytes(content.read())
    return path


async def test_a_root_file_system_is_imported_from_a_tar_and_from_a_folder(
    incus: Incus, root: Path, tmp_path: Path
) -> None:
    seen: list[Progress] = []
    first = await incus.import_image(root, NAME, seen.append)
    assert (first.names, first.used_by) == ((NAME,), 0)
    assert seen[-1].done
    assert await said(incus, "echo hello") == "hello\n"
    folder = tmp_path / "root"
    shutil.unpack_archive(root, folder)
    (folder / "etc/mark").write_text("from a folder\n")
    second = await incus.import_image(folder, NAME, ignore)
    assert second.id != first.id
    assert await said(incus, "cat /etc/mark") == "from a folder\n"
    assert [image.names for image in await incus.images() if image.id == first.id] == [()]


async def test_the_layers_of_an_oci_layout_are_one_root(incus: Incus, root: Path, tmp_path: Path) -> None:
    lower = layer({"a": b"1", "gone": b"1", "folder/a": b"1", "kept/a": b"1", "emptied/a": b"1", "was-folder/a": b"1"})
    upper = layer({"a": b"2", ".wh.gone": b"", "folder/b": b"2", "emptied/.wh..wh..opq": b"", "emptied/b": b"2"})
    top = layer({"was-folder": b"3", "kept/.wh.a": b"", "kept/b": b"3"})
    source = Layout(root.read_bytes(), lower, upper, top).write(tmp_path / "layout")
    await incus.import_image(source, NAME, ignore)
    found = await said(incus, "cd /; cat a was-folder; echo; find gone folder kept emptied 2>/dev/null | sort; pwd")
    assert found.split() == ["23", "emptied", "emptied/b", "folder", "folder/a", "folder/b", "kept", "kept/b", "/"]
    assert await said(incus, "echo $FROM_LAYOUT $PWD") == "yes /srv\n"


async def test_a_hard_link_to_what_is_hidden_keeps_its_content(incus: Incus, root: Path, tmp_path: Path) -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        entry = tarfile.TarInfo("original")
        entry.size = 4
        tar.addfile(entry, io.BytesIO(b"old\n"))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.LNKTYPE, "original"
        tar.addfile(link)
    source = Layout(root.read_bytes(), made.getvalue(), layer({"original": b"new\n"})).write_tar(tmp_path / "layout")
    await incus.import_image(source, NAME, ignore)
    assert await said(incus, "cat /link /original") == "old\nnew\n"


async def test_an_image_of_incuss_own_goes_as_it_is(incus: Incus, tmp_path: Path) -> None:
    path = tmp_path / "image.tar"
    path.write_bytes(unified_image(NAME))
    first = await incus.import_image(path, NAME, ignore)
    again = await incus.import_image(path, f"{NAME}/again", ignore)
    assert again.id == first.id
    assert set(again.names) == {NAME, f"{NAME}/again"}
    assert await said(incus, "echo hello", f"{NAME}/again") == "hello\n"
    await incus.remove_image(NAME)
    assert await said(incus, "echo hello", first.id[:12]) == "hello\n"


async def test_an_image_in_use_stays(incus: Incus, root: Path, tmp_path: Path) -> None:
    await incus.import_image(root, NAME, ignore)
    sandbox = await AsyncSandbox.create(Spec.of(provider="incus", image=NAME, data=False), incus)
    try:
        assert [image.used_by for image in await incus.images() if NAME in image.names] == [1]
        with pytest.raises(Conflict, match=sandbox.id):
            await incus.remove_image(NAME)
        newer = Layout(root.read_bytes(), layer({"newer": b""})).write(tmp_path / "layout")
        await incus.import_image(newer, NAME, ignore)
        assert (await incus.discover())[sandbox.id].outdated
    finally:
        await sandbox.destroy()


async def test_what_is_not_there_or_cannot_be_says_what_to_do(incus: Incus, tmp_path: Path) -> None:
    with pytest.raises(ImageNotFound, match="skerry image import"):
        await AsyncSandbox.create(Spec.of(provider="incus", image="nothing"), incus)
    with pytest.raises(ImageNotFound):
        await incus.remove_image("nothing")
    with pytest.raises(InvalidSpec, match="those of snapshots"):
        await incus.import_image(tmp_path, "skerry-snapshot/mine", ignore)
    with pytest.raises(Unsupported, match="incus image copy"):
        await incus.pull_image("debian/12", ignore)
    with pytest.raises(Unsupported, match="an engine builds"):
        await incus.build_image(ImageBuild(dockerfile="FROM x", name="y"), ignore)
