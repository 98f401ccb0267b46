from __future__ import annotations

import asyncio
import io
import json
import os
import socket
import tarfile
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
from engines.api import ask, ask_json
from engines.daemons import Daemon
from escape.abuse import AbuseCases
from escape.boxes import END_S, USERS, Boxes, Make, as_user
from escape.escapes import EscapeCases
from escape.strangers import StrangerCases

from skerry.errors import SkerryError
from skerry.model.spec import SpecOptions
from skerry.providers.docker import Docker
from skerry.providers.podman import Podman
from skerry.providers.shared import layout
from skerry.sandbox.sandbox import AsyncSandbox

SECRET = "hunter2-" + os.urandom(8).hex()


class OnDocker(Boxes):
    options: ClassVar[SpecOptions] = {"provider": "docker", "image": "skerry-test/debian", "data": False}

    @pytest.fixture
    def provider(self, docker: Docker) -> Docker:
        return docker

    @pytest.fixture
    def look(self, docker_daemon: Daemon) -> Look:
        return Look(docker_daemon)


class StrangersOfEngines(StrangerCases):
    daemon = "docker_daemon"

    @pytest.fixture
    def places(self, tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, ...]:
        return (tmp_path, request.getfixturevalue(self.daemon).folder)


class Look:
    """The daemon's and the kernel's own account of a box."""

    def __init__(self, daemon: Daemon) -> None:
        self._address = daemon.address

    def inspect(self, box: AsyncSandbox) -> dict[str, Any]:
        found: dict[str, Any] = ask_json(self._address, "GET", f"/containers/skerry-{box.id}/json")
        return found

    def logs(self, box: AsyncSandbox) -> bytes:
        return ask(self._address, "GET", f"/containers/skerry-{box.id}/logs", {"stdout": "1", "stderr": "1"})

    def cpu_s(self, box: AsyncSandbox) -> float:
        stats = ask_json(self._address, "GET", f"/containers/skerry-{box.id}/stats", {"stream": "0", "one-shot": "1"})
        return float(stats["cpu_stats"]["cpu_usage"]["total_usage"]) / 1e9

    def of_agent(self, box: AsyncSandbox, file: str) -> bytes:
        return Path(f"/proc/{self.inspect(box)['State']['Pid']}/{file}").read_bytes()


class PolicyCases(OnDocker):
    """What an image, a secret or a flood of output could undo."""

    @pytest.fixture
    def hostile(self, docker_daemon: Daemon, docker_images: dict[str, str]) -> Iterator[str]:
        lines = [
            f"FROM {docker_images['debian']}",
            'ENTRYPOINT ["/bin/false"]',
            'CMD ["--evil"]',
            "USER root",
            "ENV LD_PRELOAD=libBrokenLocale.so.1 LD_LIBRARY_PATH=/tmp PYTHONPATH=/tmp PYTHONHOME=/tmp HOME=/root",
            "VOLUME /data /home/user /tmp /srv",
            "HEALTHCHECK --interval=1s CMD touch /tmp/health",
            "STOPSIGNAL SIGUSR1",
            "EXPOSE 80",
            "LABEL skerry=other skerry.sandbox=other",
        ]
        yield from built(docker_daemon.address, "skerry-test/hostile", lines)

    async def test_projects_share_no_uid_whose_counters_one_could_use_up(self, make: Make) -> None:
        uids = {(await (await make({"project": name})).exec(["id", "-u"])).text for name in ("one", "two")}
        assert len(uids) == 2

    async def test_what_an_image_says_does_not_change_the_policy(self, make: Make, look: Look, hostile: str) -> None:
        box = await make({"image": hostile})
        done = await box.exec("id -u; echo $HOME; touch /evil /srv/mine; unset LD_PRELOAD; ls /srv")
        uid, *rest = done.stdout.split()
        assert int(uid) in layout.PROJECT_UIDS
        assert rest == [b"/home/user", b"mine"]
        told = look.inspect(box)
        assert told["State"].get("Health") is None
        assert told["Config"]["Labels"]["skerry.sandbox"] == box.id
        assert [each["Name"] for each in told["Mounts"] if not each.get("Name", "skerry-").startswith("skerry-")] == []
        assert not told["NetworkSettings"].get("Ports")
        if not self.is_virtual:
            assert b"BrokenLocale" not in look.of_agent(box, "maps")
            assert b"CapEff:\t0000000000000000" in look.of_agent(box, "status")
            assert b"NoNewPrivs:\t1" in look.of_agent(box, "status")
            assert b"Seccomp:\t2" in look.of_agent(box, "status")

    async def test_a_folder_of_an_image_that_is_a_descriptor_leads_nowhere(
        self, make: Make, docker_daemon: Daemon, docker_images: dict[str, str], tmp_path: Path
    ) -> None:
        secret = tmp_path / "secret"
        secret.write_text(SECRET)
        lines = [f"FROM {docker_images['debian']}", "WORKDIR /proc/self/fd/7"]
        for image in built(docker_daemon.address, "skerry-test/descriptor", lines):
            with suppress(SkerryError):
                done = await (await make({"image": image})).exec(f"cat {'../' * 12}{secret}")
                assert SECRET not in done.stdout.decode()

    async def test_a_secret_is_known_in_the_box_and_nowhere_else(
        self, make: Make, look: Look, docker_daemon: Daemon, tmp_path: Path
    ) -> None:
        box = await make({"env": {"TOKEN": SECRET}, "labels": {"a": "b"}})
        done = await box.exec(["sh", "-c", "echo $TOKEN; echo $TOKEN > ~/kept; echo $TOKEN > /tmp/kept"])
        assert done.stdout.decode() == f"{SECRET}\n"
        told = look.inspect(box)
        assert SECRET not in json.dumps(told)
        assert SECRET.encode() not in look.logs(box) + look.of_agent(box, "cmdline") + look.of_agent(box, "environ")
        assert holding(docker_daemon.folder / "data" / "containers", SECRET) == []
        await box.destroy()
        for folder in (
            tmp_path,
            docker_daemon.folder / "data" / "containers",
            docker_daemon.folder / "data" / "volumes",
        ):
            assert holding(folder, SECRET) == []

    @USERS
    async def test_a_flood_of_output_does_not_fill_the_hosts_disk(
        self, make: Make, look: Look, user: str | None
    ) -> None:
        box = await make(as_user(user))
        await box.exec("for n in 1 2; do head -c 30000000 /dev/zero > /proc/1/fd/$n; done", timeout_s=30)
        assert sum(sizes(Path(look.inspect(box)["LogPath"]).parent)) < 4 * 2**20

    async def test_a_program_of_root_in_the_box_is_nobody_on_the_host(self, make: Make) -> None:
        box = await make({"user": "root"})
        await box.exec("for f in ~ /tmp; do cp /bin/sh $f/sh; chmod 6755 $f/sh; done")
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines() if box.id in line]
        assert all({"nosuid", "nodev"} <= set(options.split(",")) for _, _, _, options, *_ in mounts)

    @USERS
    async def test_every_place_that_can_be_written_has_an_end(self, make: Make, user: str | None) -> None:
        code = """
import os
for line in open("/proc/mounts"):
    path = line.split()[1]
    try:
        os.close(os.open(path + "/written", os.O_CREAT | os.O_WRONLY))
    except OSError:
        continue
    room = os.statvfs(path)
    print(path, room.f_blocks * room.f_frsize)
"""
        done = await (await make({**as_user(user), "disk": "64M"})).run_code("python", code)
        room = {path: int(size) for path, size in (line.split() for line in done.stdout.decode().splitlines())}
        assert "/home/user" in room
        if self.is_virtual:
            room.pop("/dev", None)  # memory of its own kernel, which ends at the limit of memory
        assert {path: size for path, size in room.items() if not 0 < size < 2**30} == {}

    async def test_who_comes_in_as_root_is_as_bounded_as_the_box(self, make: Make) -> None:
        done = await (await make({})).exec("id -u; cat /proc/self/status; touch /etc/x", user="root")
        assert done.stdout.startswith(b"0\n")
        assert b"Read-only" in done.stderr
        if not self.is_virtual:
            for line in (b"CapEff:\t0000000000000000", b"CapBnd:\t0000000000000000", b"NoNewPrivs:\t1", b"Seccomp:\t2"):
                assert line in done.stdout

    async def test_a_link_in_place_of_the_agents_socket_reaches_no_socket_of_the_host(
        self, make: Make, docker: Docker, tmp_path: Path
    ) -> None:
        box = await make({})
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "s"))
            os.chmod(tmp_path / "s", 0o777)
            listener.listen()
            listener.setblocking(False)
            done = await box.exec(f"rm /.skerry/run/agent && ln -s {tmp_path}/s /.skerry/run/agent")
            assert done.exit_code == 0, done.stderr
            with suppress(SkerryError):
                async with asyncio.timeout(END_S):
                    await (await AsyncSandbox.open(box.id, docker)).exec(["true"])
            with pytest.raises(BlockingIOError):
                listener.accept()


class TestDocker(EscapeCases, AbuseCases, PolicyCases, StrangersOfEngines):
    column = "docker"

    async def test_boxes_on_the_bridge_do_not_reach_each_other(self, make: Make) -> None:
        first, second = await make({"network": "bridge"}), await make({"network": "bridge"})
        listen = "import socket; s = socket.create_server(('0.0.0.0', 8000)); print('up', flush=True); s.accept()"
        server = await first.start(["python3", "-c", listen])
        assert await anext(aiter(server)) == (1, b"up\n")
        ask_self = "import socket; s = socket.socket(type=2); s.connect(('192.0.2.1', 1)); print(s.getsockname()[0])"
        address = (await first.exec(["python3", "-c", ask_self])).stdout.decode().strip()
        connect = f"import socket; socket.create_connection(('{address}', 8000), 3)"
        assert (await first.exec(["python3", "-c", connect])).exit_code == 0
        assert (await second.exec(["python3", "-c", connect])).exit_code != 0
        await server.kill()


class TestGvisor(EscapeCases, AbuseCases, PolicyCases, StrangersOfEngines):
    column = "gVisor"
    is_virtual = True
    options: ClassVar[SpecOptions] = {**OnDocker.options, "runtime": "runsc"}

    @pytest.fixture
    def provider(self, docker: Docker, docker_daemon: Daemon, gvisor: str) -> Docker:
        self.look_at = Look(docker_daemon)
        return docker

    async def cpu_s(self, sandbox: AsyncSandbox) -> float:
        return await asyncio.to_thread(self.look_at.cpu_s, sandbox)


class TestPodman(EscapeCases, AbuseCases, StrangersOfEngines):
    column = "podman"
    daemon = "podman_daemon"
    options: ClassVar[SpecOptions] = {"provider": "podman", "image": "skerry-test/debian", "data": False}

    @pytest.fixture
    async def provider(
        self, podman_daemon: Daemon, podman_images: dict[str, str], tmp_path: Path, cache: Path
    ) -> AsyncIterator[Podman]:
        config = Podman.Config(host=podman_daemon.address, state_dir=str(tmp_path / "state"), cache_dir=str(cache))
        provider = Podman(config)
        yield provider
        await provider.aclose()


def built(address: str, name: str, lines: list[str]) -> Iterator[str]:
    """An image for as long as it is used."""
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as tar:
        text = "\n".join(lines).encode()
        entry = tarfile.TarInfo("Dockerfile")
        entry.size = len(text)
        tar.addfile(entry, io.BytesIO(text))
    said = ask(address, "POST", "/build", {"t": name, "networkmode": "none"}, body=context.getvalue())
    assert b"Successfully built" in said, said
    yield name
    ask(address, "DELETE", f"/images/{name}", {"force": "1"})


def holding(folder: Path, text: str) -> list[Path]:
    """The files below a folder that have this text in them."""
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def sizes(folder: Path) -> Iterator[int]:
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # it was renamed meanwhile, and is counted under its other name
            yield path.stat().st_size
