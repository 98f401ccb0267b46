"""Images on the real engines: what they have afterwards is asked from them apart from the code under test."""

from __future__ import annotations

import asyncio
import io
import json
import os
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from engines.api import Refused, ask, ask_json
from engines.daemons import Daemon
from engines.images import load
from engines.oci_layouts import Layout, layer
from registry import serving

from skerry.errors import Conflict, ImageNotFound, InvalidSpec, ProviderError, ProviderUnavailable
from skerry.providers.base import ImageBuild, Progress
from skerry.providers.dockerapi.api import Engine, EngineConfig, Quirks
from skerry.providers.dockerapi.images import EngineImages
from skerry.providers.podman import Podman

NAME = "skerry-test/made"
SECOND = "skerry-test/made-too"
BUSYBOX = "skerry-test/busybox"


def ignore(_: Progress) -> None:
    return


def engine_at(address: str, provider: str, timeout_s: float) -> Engine:
    return Engine(address, EngineConfig(timeout_s=timeout_s), provider=provider, fix="start it")


@pytest.fixture(params=["docker", "podman"])
def daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    found: Daemon = request.getfixturevalue(f"{request.param}_daemon")
    load(found.address, "busybox")
    yield found
    for image in ask_json(found.address, "GET", "/images/json"):
        for name in image["RepoTags"] or ():
            if NAME in name:
                ask(found.address, "DELETE", f"/images/{name}")


@pytest.fixture
def images(daemon: Daemon) -> EngineImages:
    quirks = Podman.quirks if daemon.name == "podman" else Quirks()
    return EngineImages(engine_at(daemon.address, daemon.name, 30), quirks)


def engine_images(daemon: Daemon) -> set[str]:
    return {each["Id"] for each in ask_json(daemon.address, "GET", "/images/json", {"all": "1"})}


def containers(daemon: Daemon) -> list[Any]:
    found: list[Any] = ask_json(daemon.address, "GET", "/containers/json", {"all": "1"})
    return found


@contextmanager
def container(daemon: Daemon, image: str, **settings: Any) -> Iterator[str]:
    """One that is made and never started."""
    body = {"Image": image, "Cmd": ["x"], **settings}
    id = ask_json(daemon.address, "POST", "/containers/create", json_body=body)["Id"]
    try:
        yield id
    finally:
        ask(daemon.address, "DELETE", f"/containers/{id}", {"force": "1"})


def files(daemon: Daemon, image: str, path: str) -> dict[str, tuple[tarfile.TarInfo, bytes]]:
    """What an image has at a path."""
    with container(daemon, image) as id:
        content = ask(daemon.address, "GET", f"/containers/{id}/archive", {"path": path})
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        return {each.name: (each, tar.extractfile(each).read() if each.isreg() else b"") for each in tar}


def layers(daemon: Daemon, image: str) -> list[dict[str, tarfile.TarInfo]]:
    """The entries of each layer, as the engine keeps them."""
    saved = ask(daemon.address, "GET", f"/images/{quote(image, safe='')}/get")
    found = []
    with tarfile.open(fileobj=io.BytesIO(saved)) as outer:
        for name in json.load(outer.extractfile("manifest.json"))[0]["Layers"]:
            with tarfile.open(fileobj=outer.extractfile(name)) as inner:
                found.append({each.name: each for each in inner})
    return found


async def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, "it did not become so"
        await asyncio.sleep(0.05)


# importing


@pytest.mark.parametrize("mode", ["folder", "w", "w:gz"])
async def test_an_oci_layout_becomes_an_image(daemon: Daemon, images: EngineImages, tmp_path: Path, mode: str) -> None:
    layout = Layout(layer({"bin/one": b"first", "both": b"1"}), layer({"both": b"2"}))
    path = tmp_path / "layout"
    told: list[Progress] = []
    source = layout.write(path) if mode == "folder" else layout.write_tar(path, mode)
    image = await images.import_image(source, NAME, told.append)
    assert image.names == (f"{NAME}:latest",)
    assert image.size > 0
    assert files(daemon, NAME, "/bin/one")["one"][1] == b"first"
    assert files(daemon, NAME, "/both")["both"][1] == b"2"
    config = ask_json(daemon.address, "GET", f"/images/{NAME}/json")["Config"]
    assert "FROM_LAYOUT=yes" in config["Env"]
    assert told[-1].done == told[-1].total > 0


async def test_a_saved_image_comes_back_under_another_name_and_takes_no_other(
    daemon: Daemon, images: EngineImages, tmp_path: Path
) -> None:
    saved = tmp_path / "saved.tar"
    original = await images.import_image(Layout(layer({"f": b"1"})).write(tmp_path / "layout"), NAME, ignore)
    saved.write_bytes(ask(daemon.address, "GET", f"/images/{quote(NAME, safe='')}/get"))
    await images.remove_image(NAME)
    image = await images.import_image(saved, SECOND, ignore)
    assert image.id == original.id
    assert image.names == (f"{SECOND}:latest",)


async def test_a_root_file_system_becomes_an_image_with_its_owners(
    daemon: Daemon, images: EngineImages, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    (root / "srv").mkdir(parents=True)
    (root / "srv/file").write_bytes(b"x" * (3 << 20))
    (root / "srv/file").chmod(0o640)
    os.chown(root / "srv/file", 1234, 4321)
    os.mknod(root / "null", 0o020666, os.makedev(1, 3))
    told: list[Progress] = []
    await images.import_image(root, f"{NAME}:root", told.append)
    (entries,) = layers(daemon, f"{NAME}:root")
    file = entries["srv/file"]
    assert (file.uid, file.gid, file.mode & 0o777, file.size) == (1234, 4321, 0o640, 3 << 20)
    assert "null" not in entries
    assert told[-1].message == "left out 1 devices, sockets or mounts, such as null"
    assert told[-2].done == told[-2].total == 3 << 20


async def test_a_forged_layout_leaves_the_engine_as_it_was(
    daemon: Daemon, images: EngineImages, tmp_path: Path
) -> None:
    before = engine_images(daemon)
    layout = Layout(layer({"big": bytes(3 << 20)}), zipped=False)
    blob = layout.manifest["layers"][0]["digest"]
    layout.blobs[blob] = b"x" * len(layout.blobs[blob])
    with pytest.raises(InvalidSpec, match="forged"):
        await images.import_image(layout.write(tmp_path / "layout"), NAME, ignore)
    assert engine_images(daemon) == before


@pytest.mark.parametrize("kind", ["layout", "root"])
async def test_an_import_that_is_interrupted_leaves_nothing(
    daemon: Daemon, images: EngineImages, tmp_path: Path, kind: str
) -> None:
    before = engine_images(daemon)
    source = tmp_path / kind
    if kind == "layout":
        Layout(layer({"big": bytes(64 << 20)}), zipped=False).write(source)
    else:
        source.mkdir()
        (source / "big").write_bytes(bytes(64 << 20))
    under_way = asyncio.Event()

    def on_progress(progress: Progress) -> None:
        if (progress.done or 0) > 4 << 20:
            under_way.set()

    work = asyncio.create_task(images.import_image(source, NAME, on_progress))
    await under_way.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert engine_images(daemon) == before
    with pytest.raises(Refused):
        ask(daemon.address, "GET", f"/images/{NAME}/json")


# building

DOCKERFILE = f"""\
FROM {BUSYBOX} AS first
ARG WHO=nobody
COPY . /ctx
RUN echo "hello $WHO" > /hello; echo said aloud
FROM first AS second
RUN echo more > /more
"""


async def test_a_build_takes_its_context_arguments_and_stage(
    daemon: Daemon, images: EngineImages, tmp_path: Path
) -> None:
    for name in ("kept.txt", "left.log"):
        (tmp_path / name).write_text(name)
    (tmp_path / ".dockerignore").write_text("*.log\n.dockerignore\n")
    told: list[Progress] = []
    build = ImageBuild(dockerfile=DOCKERFILE, name=NAME, context=tmp_path, args={"WHO": "you & me"}, target="first")
    image = await images.build_image(build, told.append)
    assert image.names == (f"{NAME}:latest",)
    assert files(daemon, NAME, "/hello")["hello"][1] == b"hello you & me\n"
    assert {name.rstrip("/") for name in files(daemon, NAME, "/ctx")} == {"ctx", "ctx/kept.txt"}
    with pytest.raises(Refused):
        files(daemon, NAME, "/more")
    steps = [(each.done, each.total) for each in told if each.message.lower().startswith("step ")]
    assert steps[0][0] == 1
    assert steps == sorted(steps)
    assert "said aloud" in [each.message for each in told]
    again = await images.build_image(build, ignore)
    assert again.id == image.id
    fresh = await images.build_image(
        ImageBuild(dockerfile=DOCKERFILE, name=SECOND, context=tmp_path, no_cache=True), ignore
    )
    assert fresh.id != image.id


async def test_a_build_that_fails_tells_the_step_and_its_last_words(daemon: Daemon, images: EngineImages) -> None:
    dockerfile = f"FROM {BUSYBOX}\nRUN true\nRUN echo one; echo two >&2; exit 3\nRUN echo never\n"
    with pytest.raises(ProviderError) as caught:
        await images.build_image(ImageBuild(dockerfile=dockerfile, name=NAME), ignore)
    assert "3/4" in caught.value.message
    assert "echo one; echo two >&2; exit 3" in caught.value.message
    assert {"  one", "  two"} <= set(caught.value.message.splitlines())
    with pytest.raises(Refused):
        ask(daemon.address, "GET", f"/images/{NAME}/json")
    assert containers(daemon) == []


@pytest.mark.parametrize("dockerfile", ["NONSENSE here", "FROM skerry-test/no-such-image", "FROM busybox\nCOPY x /\n"])
async def test_a_dockerfile_that_cannot_work_is_an_error_that_says_why(
    daemon: Daemon, images: EngineImages, dockerfile: str
) -> None:
    with pytest.raises(ProviderError, match=f"build of {NAME}:latest failed"):
        await images.build_image(ImageBuild(dockerfile=dockerfile, name=NAME), ignore)


async def test_a_build_that_is_interrupted_leaves_no_container(daemon: Daemon, images: EngineImages) -> None:
    under_way = asyncio.Event()
    build = ImageBuild(dockerfile=f"FROM {BUSYBOX}\nRUN echo under way; sleep 50\n", name=NAME)

    def on_progress(progress: Progress) -> None:
        if progress.message == "under way":
            under_way.set()

    work = asyncio.create_task(images.build_image(build, on_progress))
    await under_way.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    await eventually(lambda: containers(daemon) == [])
    with pytest.raises(Refused):
        ask(daemon.address, "GET", f"/images/{NAME}/json")


# pulling


async def test_a_pull_tells_its_bytes_and_records_the_digest(docker_daemon: Daemon) -> None:
    images = EngineImages(engine_at(docker_daemon.address, "docker", 30), Quirks())
    layout = Layout(layer({"f": b"".join(str(i).encode() for i in range(300_000))}))
    told: list[Progress] = []
    with serving(layout) as registry:
        image = await images.pull_image(f"{registry}/some/image", told.append)
        manifest = layout.index["manifests"][0]["digest"]
        assert image.names == (f"{registry}/some/image:latest",)
        assert image.digests == (f"{registry}/some/image@{manifest}",)
        by_digest = await images.pull_image(f"{registry}/some/image@{manifest}", ignore)
        assert by_digest.id == image.id
        with pytest.raises(ImageNotFound, match="no registry has"):
            await images.pull_image(f"{registry}/some/image:other", ignore)
    sizes = {each.total for each in told if each.total}
    assert sizes == {layout.manifest["layers"][0]["size"]}
    assert told[-1].done in (None, *sizes)
    await images.remove_image(image.id, force=True)


async def test_a_registry_that_nobody_reaches_is_not_an_image_that_is_not_there(images: EngineImages) -> None:
    with pytest.raises(ProviderUnavailable, match="skerry image import"):
        await images.pull_image("localhost:1/some/image:1", ignore)


# listing and removing


async def test_the_list_says_how_many_boxes_an_image_is_used_by(
    daemon: Daemon, images: EngineImages, tmp_path: Path
) -> None:
    made = await images.import_image(Layout(layer({"f": b"2"})).write(tmp_path / "layout"), NAME, ignore)
    assert made.used_by == 0
    with (
        container(daemon, NAME, Labels={"skerry": daemon.name, "skerry.sandbox": "an-id"}),
        container(daemon, NAME, Labels={"skerry": "another-provider"}),
    ):
        found = {image.id: image for image in await images.images()}
        assert found[made.id].used_by == 1
        with pytest.raises(Conflict, match="the sandbox an-id"):
            await images.remove_image(NAME)
        with pytest.raises(Conflict, match="the sandbox an-id"):
            await images.remove_image(NAME, force=True)
    await images.remove_image(NAME)
    with pytest.raises(ImageNotFound):
        await images.remove_image(NAME)


async def test_containers_of_others_keep_their_image_whatever_is_forced(
    daemon: Daemon, images: EngineImages, tmp_path: Path
) -> None:
    await images.import_image(Layout(layer({"f": b"3"})).write(tmp_path / "layout"), NAME, ignore)
    with container(daemon, NAME) as id:
        for force in (False, True):
            with pytest.raises(Conflict):
                await images.remove_image(NAME, force=force)
        assert [each["Id"] for each in containers(daemon)] == [id]


async def test_an_image_with_several_names_goes_by_its_id_only_when_forced(
    daemon: Daemon, images: EngineImages, tmp_path: Path
) -> None:
    source = Layout(layer({"f": b"4"})).write(tmp_path / "layout")
    image = await images.import_image(source, NAME, ignore)
    both = await images.import_image(source, SECOND, ignore)
    assert both.id == image.id
    assert set(both.names) == {f"{NAME}:latest", f"{SECOND}:latest"}
    with pytest.raises(Conflict):
        await images.remove_image(image.id)
    await images.remove_image(image.id, force=True)
    assert image.id not in engine_images(daemon)


@pytest.mark.parametrize(
    "name", ["", "../info", "UPPER", "a b", "x/../../info", "x?force=1", "a" * 500, "x@sha256:1", "-x"]
)
async def test_a_name_that_is_none_is_refused_before_anything_is_asked(name: str) -> None:
    nowhere = EngineImages(engine_at("unix:///nowhere", "docker", 1), Quirks())
    build = ImageBuild(dockerfile="FROM x", name=name)
    for work in (
        nowhere.pull_image(name, ignore),
        nowhere.import_image(Path("/"), name, ignore),
        nowhere.build_image(build, ignore),
        nowhere.remove_image(name),
    ):
        with pytest.raises(InvalidSpec, match="not a name for an image"):
            await work


async def test_an_engine_that_is_not_there_is_said_to_be_so(tmp_path: Path) -> None:
    nowhere = EngineImages(engine_at(f"unix://{tmp_path}/none.sock", "docker", 1), Quirks())
    for work in (
        nowhere.images(),
        nowhere.pull_image(NAME, ignore),
        nowhere.build_image(ImageBuild(dockerfile="FROM x", name=NAME), ignore),
    ):
        with pytest.raises(ProviderUnavailable, match="does not answer"):
            await work
