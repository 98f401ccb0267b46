"""`skerry image` for machines."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from engines.api import ask, ask_json
from engines.daemons import Daemon
from engines.images import load

from skerry import cli
from skerry.model.spec import new_id
from skerry.providers import podman
from skerry.providers.machine.boxes import MachineBox, MachineMeta
from skerry.vm.base import Kernel
from skerry.vm.images.store import ImageStore

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(
    own_registry: None, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Call:
    """The program in this process, with a cache folder of its own: exit code, stdout, stderr."""
    monkeypatch.setenv("SKERRY_PROVIDER", "qemu")
    monkeypatch.setenv("SKERRY_PROVIDERS__QEMU__CACHE_DIR", str(cache.parent))
    monkeypatch.setenv("SKERRY_PROVIDERS__QEMU__STATE_DIR", str(tmp_path / "boxes"))
    monkeypatch.setenv("SKERRY_PROVIDERS__DOCKER__HOST", f"unix://{tmp_path}/no.sock")
    monkeypatch.setenv("SKERRY_PROVIDERS__PODMAN__HOST", f"unix://{tmp_path}/no.sock")

    def run(*args: str) -> tuple[int, str, str]:
        code = cli.invoke(args)
        out, err = capfd.readouterr()
        return code, out, err

    return run


def test_an_image_is_built_listed_inspected_and_removed(call: Call) -> None:
    code, out, err = call("image", "build", "--vm", "--recipe", "minimal", "-t", "small")
    assert code == 0, err
    id = out.strip()
    assert id.startswith("sha256:")
    assert "writing" in err.splitlines()

    header, *rows = [line.split() for line in call("image", "ls", "--vm")[1].splitlines()]
    assert header == ["NAME", "ID", "SIZE", "CREATED", "USED", "BY"]
    assert [row[:3] for row in rows] == [["small", id.removeprefix("sha256:")[:12], "2.1M"]]
    (listed,) = json.loads(call("image", "ls", "--provider", "qemu", "--json")[1])
    assert (listed["id"], listed["names"], listed["used_by"]) == (id, ["small"], 0)
    assert json.loads(call("image", "inspect", "--vm", "small")[1]) == [listed]

    assert call("image", "rm", "--vm", "small") == (0, "small\n", "")
    code, out, _ = call("image", "rm", "--vm", "small", "--json")
    assert code == 125
    assert json.loads(out)[0]["error"]["code"] == "image_not_found"


def test_images_for_machines_are_where_the_configured_provider_of_machines_looks(
    call: Call, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever provider boxes are made by where nothing is said, and though another one of machines comes before it."""
    monkeypatch.setenv("SKERRY_PROVIDER", "local")
    code, out, err = call("image", "build", "--vm", "--recipe", "minimal", "-t", "small")
    assert code == 0, err
    assert [image.id for image in ImageStore(cache).all()] == [out.strip()]
    assert json.loads(call("image", "ls", "--provider", "qemu", "--json")[1])[0]["id"] == out.strip()


def test_caches_of_several_providers_of_machines_are_asked_about(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKERRY_PROVIDER", "local")
    monkeypatch.setenv("SKERRY_PROVIDERS__FIRECRACKER__PROGRAM", "elsewhere")
    code, _, err = call("image", "ls", "--vm")
    assert code == 125
    assert "providers.firecracker and providers.qemu do not share a cache_dir" in err
    assert "--provider" in err
    assert call("image", "ls", "--vm", "--provider", "qemu")[0] == 0


def test_a_recipe_gives_its_name_where_none_is_said(call: Call) -> None:
    code, out, err = call("image", "build", "--vm", "--recipe", "minimal", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["names"] == ["minimal"]


def test_a_root_file_system_is_imported_by_either_verb(call: Call, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "root.tar", "w") as tar:
        info = tarfile.TarInfo("etc/file")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"x"))
    first = json.loads(call("image", "import", "--vm", str(tmp_path / "root.tar"), "one", "--json")[1])
    second = json.loads(call("image", "build", "--vm", "-t", "two", str(tmp_path / "root.tar"), "--json")[1])
    assert first["id"] == second["id"]
    assert second["names"] == ["one", "two"]
    code, _, err = call("image", "build", "--vm", str(tmp_path / "root.tar"))
    assert code == 125
    assert "-t" in err


def test_a_file_with_a_file_system_is_imported(call: Call, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    source = tmp_path / "rootfs.ext4"
    make = ["/sbin/mke2fs", "-q", "-t", "ext4", "-d", tmp_path / "root", source, "4M"]
    subprocess.run(make, check=True, timeout=30, stdout=subprocess.DEVNULL)
    made = json.loads(call("image", "import", "--provider", "qemu", str(source), "mine", "--json")[1])
    assert (made["names"], made["size"]) == (["mine"], 4 << 20)
    (tmp_path / "link").symlink_to(source)
    code, out, err = call("image", "import", "--provider", "qemu", str(tmp_path / "link"), "other")
    assert (code, out) == (125, "")
    assert str(source) in err


def test_a_dockerfile_without_a_builder_says_what_else_can_be_done(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(podman, "_BUILDERS", ())
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    code, out, err = call("image", "build", "--vm", "-t", "x", str(tmp_path))
    assert (code, out) == (125, "")
    assert "Docker or Podman" in err
    assert "--recipe" in err


def test_a_registry_is_no_place_for_machines_images(call: Call) -> None:
    code, _, err = call("image", "pull", "--vm", "debian")
    assert code == 125
    assert "docker save debian" in err


def test_a_recipe_is_refused_by_a_provider_of_containers(call: Call) -> None:
    code, _, err = call("image", "build", "--provider", "docker", "--recipe", "minimal", "-t", "x")
    assert code == 125
    assert "recipes are for machines" in err


def test_kernels_are_listed(call: Call, vm_kernel: Kernel) -> None:
    header, first, *_ = [line.split() for line in call("image", "kernel", "ls")[1].splitlines()]
    assert header == ["KEY", "VERSION", "FROM", "CREATED"]
    assert first[:2] == [vm_kernel.key[:12], vm_kernel.version]
    assert json.loads(call("image", "kernel", "ls", "--json")[1])[0]["key"] == vm_kernel.key
    code, _, err = call("image", "kernel", "rm", "0123456789")
    assert code == 125
    assert "kernel ls" in err


def test_an_engine_runs_a_dockerfile_and_a_machine_gets_what_comes_of_it(
    call: Call, docker_daemon: Daemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    load(docker_daemon.address, "busybox")
    monkeypatch.setenv("SKERRY_PROVIDERS__DOCKER__HOST", docker_daemon.address)
    (tmp_path / "context").mkdir()
    (tmp_path / "context/file").write_text("content")
    (tmp_path / "context/Dockerfile").write_text(
        "FROM skerry-test/busybox\nCOPY file /copied\nENV COLOUR=blue\nUSER app\nWORKDIR /srv\n"
    )
    code, out, err = call("image", "build", "--vm", "-t", "web", str(tmp_path / "context"))
    try:
        assert code == 0, err
        info = ImageStore(cache).find("web")
        assert out.strip() == info.id
        assert (info.env["COLOUR"], info.user, info.cwd) == ("blue", "app", "/srv")
        rootfs = cache / "images" / info.id.removeprefix("sha256:") / "rootfs.ext4"
        told = subprocess.run(["/sbin/debugfs", "-R", "cat /copied", rootfs], capture_output=True, timeout=30)
        assert told.stdout == b"content"
    finally:
        for image in ask_json(docker_daemon.address, "GET", "/images/json"):
            for name in image["RepoTags"] or ():
                if name.startswith("skerry-machine:"):
                    ask(docker_daemon.address, "DELETE", f"/images/{name}")


def test_what_a_box_is_made_of_stays(call: Call, tmp_path: Path, cache: Path) -> None:
    assert call("image", "build", "--vm", "--recipe", "minimal", "-t", "one")[0] == 0
    box = MachineBox(tmp_path / "boxes", new_id())
    box.make()
    box.write_meta(MachineMeta(created_at=0, image=ImageStore(cache).find("one").id, asked="one"))
    assert json.loads(call("image", "ls", "--vm", "--json")[1])[0]["used_by"] == 1
    for extra in ((), ("--force",)):
        code, _, err = call("image", "rm", "--vm", "one", *extra)
        assert code == 125
        assert box.id in err
    assert call("image", "build", "--vm", "--recipe", "minimal", "-t", "two")[0] == 0
    assert call("image", "rm", "--vm", "one")[0] == 0
    assert ImageStore(cache).find("two").names == ("two",)
