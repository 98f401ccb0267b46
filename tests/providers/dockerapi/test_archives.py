from __future__ import annotations

import asyncio
import bz2
import contextlib
import gzip
import importlib
import io
import json
import lzma
import os
import random
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from engines.oci_layouts import Layout, digest, layer

from skerry.errors import InvalidSpec
from skerry.oci import stores
from skerry.providers.dockerapi.images import upload_of

Change = Callable[[Layout], Any]
LAYERS = (layer({"bin/one": b"1" * 3000}), layer({"bin/two": b"2"}))


async def sent(source: Path) -> tuple[bytes, list[str]]:
    """What an engine would get, and what is left out."""
    async with upload_of(source, "my/image:1", "amd64") as parcel:
        return b"".join(parcel.pieces), parcel.left_out


async def root(source: Path) -> tuple[tarfile.TarFile, list[str]]:
    """The one layer of an image that is made of a root file system, and what is left out."""
    content, left_out = await sent(source)
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        assert tar.getnames() == ["layer.tar", "config.json", "manifest.json"]
        made = tar.extractfile("layer.tar").read()
        config = json.load(tar.extractfile("config.json"))
    assert config["rootfs"]["diff_ids"] == [digest(made)]
    return tarfile.open(fileobj=io.BytesIO(made)), left_out


async def loaded(source: Path) -> dict[str, bytes]:
    content, _ = await sent(source)
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        assert tar.getnames()[-1] == "manifest.json"
        return {each.name: tar.extractfile(each).read() for each in tar}


def assert_is_image(files: dict[str, bytes], layers: list[bytes]) -> None:
    (image,) = json.loads(files["manifest.json"])
    assert image["RepoTags"] == ["my/image:1"]
    assert [files[name] for name in image["Layers"]] == layers
    assert json.loads(files[image["Config"]])["config"]["WorkingDir"] == "/srv"


@pytest.mark.parametrize("zipped", [True, False])
async def test_a_layout_in_a_folder_becomes_an_archive(tmp_path: Path, zipped: bool) -> None:
    files = await loaded(Layout(*LAYERS, zipped=zipped).write(tmp_path / "layout"))
    assert_is_image(files, [gzip.compress(each, mtime=0) if zipped else each for each in LAYERS])


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz", "w:bz2"])
async def test_a_layout_in_a_tar_becomes_an_archive_however_it_is_compressed(tmp_path: Path, mode: str) -> None:
    files = await loaded(Layout(*LAYERS, zipped=False).write_tar(tmp_path / "layout", mode))
    assert_is_image(files, list(LAYERS))


async def test_a_layer_that_is_there_twice_is_sent_once(tmp_path: Path) -> None:
    files = await loaded(Layout(LAYERS[1], LAYERS[0], LAYERS[1], zipped=False).write(tmp_path / "layout"))
    assert_is_image(files, [LAYERS[1], LAYERS[0], LAYERS[1]])
    assert len(files) == 4


async def test_of_several_architectures_the_engines_own_is_taken(tmp_path: Path) -> None:
    layout = Layout(LAYERS[0], zipped=False)
    layout.refer(platform={"os": "linux", "architecture": "amd64"})
    other = Layout(LAYERS[1], zipped=False)
    other.refer(platform={"os": "linux", "architecture": "s390x"})
    statement = layout.index["manifests"][0] | {"annotations": {"vnd.docker.reference.type": "attestation-manifest"}}
    inner = {"manifests": [*other.index["manifests"], statement, *layout.index["manifests"]]}
    layout.blobs |= other.blobs
    kind = "application/vnd.oci.image.index.v1+json"
    layout.index["manifests"] = [layout.add(json.dumps(inner).encode(), kind)]
    assert_is_image(await loaded(layout.write(tmp_path / "layout")), [LAYERS[0]])


def without_layer(layout: Layout) -> None:
    del layout.blobs[layout.manifest["layers"][0]["digest"]]


def other_content(layout: Layout) -> None:
    blob = layout.manifest["layers"][0]
    layout.blobs[blob["digest"]] = b"x" * blob["size"]


def other_config(layout: Layout) -> None:
    blob = layout.manifest["config"]
    layout.blobs[blob["digest"]] = b" " * blob["size"]


def other_manifest(layout: Layout) -> None:
    blob = layout.index["manifests"][0]
    layout.blobs[blob["digest"]] = layout.blobs[blob["digest"]].replace(b"2", b"3", 1)


def claimed(**fields: Any) -> Change:
    def change(layout: Layout) -> None:
        layout.manifest["layers"][0] |= fields
        layout.refer()

    return change


def endless(layout: Layout) -> None:
    for _ in range(8):
        inner = json.dumps(layout.index).encode()
        layout.index["manifests"] = [layout.add(inner, "application/vnd.oci.image.index.v1+json")]


def two_images(layout: Layout) -> None:
    layout.index["manifests"] *= 2


def nothing_fits(layout: Layout) -> None:
    layout.refer(platform={"os": "plan9", "architecture": "amd64"})


def huge_config(layout: Layout) -> None:
    layout.manifest["config"] = layout.add(b" " * (stores.MAX_TEXT + 1), "application/vnd.oci.image.config.v1+json")
    layout.refer()


@pytest.mark.parametrize("in_tar", [False, True])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (without_layer, "lacks the blob"),
        (other_content, "not what its digest says"),
        (other_config, "not what its digest says"),
        (other_manifest, "not what its digest says"),
        (claimed(size=5), "5 are promised"),
        (claimed(size=-1), "-1 are promised"),
        (claimed(size=1 << 62), "are promised"),
        (claimed(digest="sha256:../../../../etc/passwd"), "not a digest"),
        (claimed(digest="../../etc/passwd"), "not a digest"),
        (claimed(digest="sha256:" + "A" * 64), "not a digest"),
        (claimed(digest="md5:" + "0" * 32), "not a digest"),
        (claimed(digest=7), "not what an image has"),
        (endless, "without end"),
        (two_images, "has 2 images"),
        (nothing_fits, "0 images for linux/amd64.*plan9"),
        (huge_config, "configuration is too large"),
    ],
)
async def test_a_layout_that_lies_is_refused_before_it_is_an_image(
    tmp_path: Path, change: Change, told: str, in_tar: bool
) -> None:
    layout = Layout(*LAYERS)
    change(layout)
    source = layout.write_tar(tmp_path / "layout") if in_tar else layout.write(tmp_path / "layout")
    with pytest.raises(InvalidSpec, match=told):
        await sent(source)


async def test_a_blob_that_is_a_link_to_somewhere_is_refused(tmp_path: Path) -> None:
    layout = Layout(*LAYERS)
    folder = layout.write(tmp_path / "layout")
    blob = folder / "blobs" / layout.manifest["layers"][0]["digest"].replace(":", "/")
    (tmp_path / "elsewhere").write_bytes(blob.read_bytes())
    blob.unlink()
    blob.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidSpec, match="lacks the blob"):
        await sent(folder)


def archive(path: Path, manifest: Any, files: dict[str, bytes], links: dict[str, str] | None = None) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in {**files, "manifest.json": manifest_text(manifest)}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
        for name, target in (links or {}).items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
    return path


def manifest_text(manifest: Any) -> bytes:
    if isinstance(manifest, str):
        return manifest.encode()
    return manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()


CONFIG = json.dumps({"config": {"WorkingDir": "/srv"}}).encode()


async def test_a_saved_image_keeps_its_layers_and_gets_the_name_that_is_asked(tmp_path: Path) -> None:
    manifest = [{"Config": "c.json", "RepoTags": ["debian:12"], "Layers": ["a/layer.tar", "b/layer.tar"]}]
    files = {"a/layer.tar": LAYERS[0], "c.json": CONFIG, "repositories": b"{}"}
    source = archive(tmp_path / "saved.tar", manifest, files, {"b/layer.tar": "../a/layer.tar"})
    found = await loaded(source)
    assert_is_image(found, [LAYERS[0], LAYERS[0]])
    assert b"debian" not in found["manifest.json"]
    packed = tmp_path / "saved.tar.gz"
    packed.write_bytes(gzip.compress(source.read_bytes()))
    assert await loaded(packed) == found


@pytest.mark.parametrize(
    ("manifest", "told"),
    [
        ([], "has 0 images"),
        ([{"Config": "c.json", "RepoTags": [f"n{i}:1"], "Layers": []} for i in range(2)], r"2 images \(n0:1, n1:1\)"),
        ([{"Config": "c.json", "Layers": ["gone.tar"]}], "lacks gone.tar"),
        ([{"Config": "../c.json", "Layers": []}], "not in it"),
        ([{"Config": "c.json", "Layers": ["/etc/passwd"]}], "not in it"),
        ([{"Config": "c.json", "Layers": ["a.tar"] * 5000}], "5000 layers"),
        ({"Config": 5}, "not what an image has"),
        ("[" * 100_000, "not what an image has"),
        (b"[\xff", "not what an image has"),
    ],
)
async def test_a_saved_image_that_lies_is_refused(tmp_path: Path, manifest: Any, told: str) -> None:
    source = archive(tmp_path / "saved.tar", manifest, {"c.json": CONFIG, "a.tar": b""})
    with pytest.raises(InvalidSpec, match=told):
        await sent(source)


@pytest.mark.parametrize("compress", [bytes, gzip.compress, lzma.compress, bz2.compress])
async def test_a_root_in_a_tar_arrives_with_owners_and_without_devices(
    tmp_path: Path, compress: Callable[[bytes], bytes]
) -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        file = tarfile.TarInfo("./bin/x" + "y" * 150)
        file.size, file.uid, file.gid, file.mode = 3, 1000, 1001, 0o4755
        tar.addfile(file, io.BytesIO(b"abc"))
        for kind in (tarfile.CHRTYPE, tarfile.BLKTYPE):
            device = tarfile.TarInfo(f"dev/{kind.decode()}")
            device.type = kind
            tar.addfile(device)
        link = tarfile.TarInfo("bin/hard")
        link.type, link.linkname = tarfile.LNKTYPE, file.name
        tar.addfile(link)
    source = tmp_path / "root"
    source.write_bytes(compress(made.getvalue()))
    tar, left_out = await root(source)
    assert left_out == ["dev/3", "dev/4"]
    with tar:
        one, other = tar.getmembers()
        assert (one.uid, one.gid, one.mode) == (1000, 1001, 0o4755)
        assert tar.extractfile(other).read() == b"abc"


async def test_a_root_in_a_folder_arrives_with_links_and_without_sockets(tmp_path: Path) -> None:
    folder = tmp_path / "root"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/tool").write_bytes(b"x" * 5000)
    (folder / "bin/tool").chmod(0o755)
    os.link(folder / "bin/tool", folder / "bin/same")
    (folder / "lib").symlink_to("bin")
    os.mknod(folder / "socket", stat.S_IFSOCK | 0o600)
    tar, left_out = await root(folder)
    assert left_out == ["socket"]
    with tar:
        assert tar.getnames() == ["bin", "lib", "bin/same", "bin/tool"]
        assert tar.getmember("bin/tool").islnk()
        assert tar.getmember("lib").linkname == "bin"
        assert (tar.getmember("bin/same").uid, tar.getmember("bin/same").mode) == (os.getuid(), 0o755)


def tar_with(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE, **headers: str) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size, entry.type, entry.pax_headers = size, kind, headers
    return entry.tobuf(tarfile.PAX_FORMAT) + bytes(1024)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is no tar"),
        (b"nonsense" * 500, "is no tar"),
        (gzip.compress(b"nonsense" * 500, mtime=0), "is no tar"),
        (gzip.compress(tar_with("a"), mtime=0)[:20], "root"),
        (gzip.compress(tar_with("a") * 50, mtime=0)[:60] + b"\xff" * 40, "damaged|root"),
        (tar_with("../../etc/passwd"), "outside of it"),
        (tar_with("a", size=1 << 40), "more in it than any image"),
        (tar_with("a", size=1 << 20), "unexpected end"),
        (gzip.compress(tar_with("a", size=1 << 28, kind=tarfile.XHDTYPE) + bytes(1 << 24)), "too long"),
        (bytes(10240), "empty"),
        (tar_with("a", **{"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}), "damaged"),
    ],
)
async def test_what_is_no_root_or_means_harm_is_refused(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "root").write_bytes(content)
    with pytest.raises(InvalidSpec, match=told):
        await sent(tmp_path / "root")


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
async def test_a_tar_with_any_bytes_changed_is_imported_or_refused(tmp_path: Path, mode: str) -> None:
    chance = random.Random(mode)
    original = Layout(*LAYERS).write_tar(tmp_path / "layout", mode).read_bytes()
    changed = tmp_path / "changed"
    for _ in range(150):
        content = bytearray(original)
        for _ in range(chance.choice((1, 3, 30))):
            at = chance.randrange(len(content))
            content[at : at + chance.randrange(8)] = chance.randbytes(chance.randrange(8))
        changed.write_bytes(content)
        with contextlib.suppress(InvalidSpec):
            await sent(changed)


async def test_looking_through_a_tar_ends_when_nobody_waits_for_it_any_more(tmp_path: Path) -> None:
    source = tmp_path / "root.tar.gz"
    with gzip.open(source, "wb", compresslevel=1) as file:
        file.write(tar_with("zeros", size=256 << 20)[:512])
        for _ in range(256):
            file.write(bytes(1 << 20))
    looking = asyncio.create_task(sent(source))
    await asyncio.sleep(0)
    looking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await looking
    stop = Event()
    stop.set()
    with pytest.raises(InvalidSpec, match="interrupted"), stores.reading(source), stores.opened(source, stop):
        pass


async def test_what_is_not_there_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match="No such file"):
        await sent(tmp_path / "nothing")
    with pytest.raises(InvalidSpec, match="is empty"):
        await sent(tmp_path)


async def test_zstd_is_read_where_this_python_can_and_else_said_how(tmp_path: Path) -> None:
    zstd = next((module for name in stores.ZSTD_MODULES if (module := imported(name))), None)
    source = tmp_path / "root.tar.zst"
    plain = layer({"a": b"b"})
    if zstd is None:
        source.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(100))
        with pytest.raises(InvalidSpec, match=r"pip install backports\.zstd"):
            await sent(source)
        return
    source.write_bytes(zstd.compress(plain))
    with (await root(source))[0] as tar:
        assert tar.getnames() == ["a"]
    layout = Layout(plain, zipped=False)
    layout.manifest["layers"] = [layout.add(zstd.compress(plain), "application/vnd.oci.image.layer.v1.tar+zstd")]
    layout.refer()
    assert_is_image(await loaded(layout.write(tmp_path / "layout")), [plain])


def imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
