"""`python peer_client.py PEER IMAGE`, in the environment of that peer: does what a line on its standard input says
(create, echo, write, read, destroy), and answers with the seconds that it took."""

from __future__ import annotations

import asyncio
import io
import sys
import tarfile
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

SIZE = 10_000_000
DATA = b"0123456789abcde\n" * (SIZE // 16)
FOLDER, NAME = "/tmp", "bench-file"
PATH = f"{FOLDER}/{NAME}"
WAIT = ["sleep", "3600"]


class DockerPy:
    """Also what those do who build on it."""

    def __init__(self, image: str) -> None:
        import docker

        self._docker = docker.from_env()
        self._image = image
        self._box: Any = None

    def create(self) -> None:
        self._box = self._docker.containers.run(self._image, WAIT, detach=True, network_mode="none")

    def echo(self) -> None:
        assert self._box.exec_run(["echo", "hello"]) == (0, b"hello\n")

    def write(self) -> None:
        self._box.put_archive(FOLDER, _tar())

    def read(self) -> None:
        assert _untar(b"".join(self._box.get_archive(PATH)[0])) == DATA

    def destroy(self) -> None:
        self._box.remove(force=True)

    def leave(self) -> None:
        self._docker.close()


class Testcontainers(DockerPy):
    def __init__(self, image: str) -> None:
        from testcontainers.core.config import testcontainers_config

        testcontainers_config.ryuk_disabled = True  # its image is only in a registry
        self._image = image

    def create(self) -> None:
        from testcontainers.core.container import DockerContainer

        self._container = DockerContainer(self._image, network_mode="none").with_command(WAIT).start()
        self._box = self._container.get_wrapped_container()

    def echo(self) -> None:
        assert self._container.exec(["echo", "hello"]) == (0, b"hello\n")

    def destroy(self) -> None:
        self._container.stop()

    def leave(self) -> None:
        return


class LlmSandbox:
    def __init__(self, image: str) -> None:
        self._image = image

    def create(self) -> None:
        from llm_sandbox.docker import SandboxDockerSession

        self._session = SandboxDockerSession(
            image=self._image,
            skip_environment_setup=True,
            runtime_configs={"network_mode": "none", "command": WAIT},
        )
        self._session.open()

    def echo(self) -> None:
        result = self._session.execute_command("echo hello")
        assert result.stdout == "hello\n", result

    def write(self) -> None:
        with TemporaryDirectory() as folder:
            Path(folder, NAME).write_bytes(DATA)
            self._session.copy_to_runtime(f"{folder}/{NAME}", PATH)

    def read(self) -> None:
        with TemporaryDirectory() as folder:
            self._session.copy_from_runtime(PATH, f"{folder}/{NAME}")
            assert Path(folder, NAME).read_bytes() == DATA

    def destroy(self) -> None:
        self._session.close()

    def leave(self) -> None:
        return


class Async:
    """A peer with coroutines has one event loop for all."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def __getattr__(self, verb: str) -> Any:
        method = getattr(type(self), f"async_{verb}")
        return lambda: self._runner.run(method(self))

    async def async_leave(self) -> None:
        return


class Aiodocker(Async):
    def __init__(self, image: str) -> None:
        super().__init__()
        self._image = image
        self._docker: Any = None
        self._box: Any = None

    async def async_create(self) -> None:
        import aiodocker

        self._docker = self._docker or aiodocker.Docker()
        config = {"Image": self._image, "Cmd": WAIT, "HostConfig": {"NetworkMode": "none"}}
        self._box = await self._docker.containers.create(config)
        await self._box.start()

    async def async_echo(self) -> None:
        made = await self._box.exec(["echo", "hello"])
        output = b""
        async with made.start(detach=False) as stream:
            while message := await stream.read_out():
                output += message.data
        assert (output, (await made.inspect())["ExitCode"]) == (b"hello\n", 0)

    async def async_write(self) -> None:
        await self._box.put_archive(FOLDER, _tar())

    async def async_read(self) -> None:
        tar = await self._box.get_archive(PATH)
        member = tar.extractfile(NAME)
        assert member is not None
        assert member.read() == DATA

    async def async_destroy(self) -> None:
        await self._box.delete(force=True)

    async def async_leave(self) -> None:
        await self._docker.close()


class SweRex(Async):
    """Its server is in the image already, and published on a port, as it knows no other way."""

    def __init__(self, image: str) -> None:
        super().__init__()
        self._image = image

    async def async_create(self) -> None:
        from swerex.deployment.docker import DockerDeployment

        self._deployment = DockerDeployment(image=self._image, pull="never")
        await self._deployment.start()

    async def async_echo(self) -> None:
        from swerex.runtime.abstract import Command

        answer = await self._deployment.runtime.execute(Command(command=["echo", "hello"]))
        assert answer.stdout == "hello\n"

    async def async_write(self) -> None:
        from swerex.runtime.abstract import WriteFileRequest

        await self._deployment.runtime.write_file(WriteFileRequest(path=PATH, content=DATA.decode()))

    async def async_read(self) -> None:
        from swerex.runtime.abstract import ReadFileRequest

        answer = await self._deployment.runtime.read_file(ReadFileRequest(path=PATH))
        assert answer.content.encode() == DATA

    async def async_destroy(self) -> None:
        await self._deployment.stop()


PEERS: dict[str, Any] = {
    "docker-py": DockerPy,
    "aiodocker": Aiodocker,
    "testcontainers": Testcontainers,
    "SWE-ReX": SweRex,
    "llm-sandbox": LlmSandbox,
}


def _tar() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        entry = tarfile.TarInfo(NAME)
        entry.size = len(DATA)
        tar.addfile(entry, io.BytesIO(DATA))
    return made.getvalue()


def _untar(data: bytes) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        member = tar.extractfile(NAME)
        assert member is not None
        return member.read()


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr
    peer = PEERS[sys.argv[1]](sys.argv[2])
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        getattr(peer, line.strip())()
        print(time.perf_counter() - start, file=answers, flush=True)
    peer.leave()


if __name__ == "__main__":
    main()
