"""Inspect AI: `sandbox="skerry"`, found by its entry point. A sample has a sandbox of its own, or a fleet of them.

What the machinery did, such as a box that is lost, is raised as it is: Inspect takes none of these errors for an answer
to the model, and the sample fails with an error instead of a score.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, Unpack, cast, overload
from uuid import uuid4
from weakref import WeakKeyDictionary

import msgspec
from inspect_ai.util import ExecRemoteAwaitableOptions as AwaitableOptions
from inspect_ai.util import (
    ExecRemoteProcess,
    ExecResult,
    OutputLimitExceededError,
    SandboxConnection,
    SandboxEnvironment,
    SandboxEnvironmentConfigType,
    SandboxEnvironmentLimits,
    SandboxUserUnsupportedError,
    sandboxenv,
)
from inspect_ai.util import ExecRemoteStreamingOptions as StreamingOptions
from inspect_ai.util._sandbox.environment import HostMapping, PortMapping
from pydantic import BaseModel, ConfigDict, model_validator

from skerry.adapters.compose import Build, read
from skerry.adapters.images import make_image
from skerry.adapters.inspect_process import Process
from skerry.adapters.opened import open_manager
from skerry.aio import run_to_end
from skerry.config import load
from skerry.errors import (
    ArgumentsTooLong,
    BoxFull,
    CreateFailed,
    InvalidSpec,
    PathIsFolder,
    PathNotFile,
    PathNotFolder,
    PathNotFound,
    ProviderError,
    TooLarge,
    Unsupported,
    UserNotFound,
)
from skerry.fleet.fleet import AsyncFleet, load_fleet
from skerry.fleet.model import FleetSpec
from skerry.fleet.tree import Problems, Scalar, TableNode, parse
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.records import Filter
from skerry.model.results import ExecResult as Done
from skerry.model.results import NotStarted
from skerry.model.spec import SpecOptions
from skerry.sandbox.processes import ExecOptions
from skerry.sandbox.sandbox import AsyncSandbox

LABEL = "inspect"
"""Label of every sandbox that a sample has; its value is the name of the task."""
_OURS = {"made-by": "inspect_ai"}
_FILES = ["compose.yaml", "compose.yml", "docker-compose.yaml", "docker-compose.yml"]
_CANNOT_RUN = 126
_LONGEST_LABEL = 256


class SkerryConfig(BaseModel, frozen=True):
    """Fields of a spec, such as `SkerryConfig(provider="docker", image="python:3.12", memory="2G")`."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="after")
    def _check(self) -> SkerryConfig:
        """Raise ValueError for what is no field, or has a value that none can have."""
        try:
            load().spec(self.options())
        except (InvalidSpec, TypeError) as error:
            raise ValueError(str(error)) from None
        return self

    def options(self) -> SpecOptions:
        return cast("SpecOptions", dict(self.model_extra or {}))

    def __hash__(self) -> int:
        return hash(self.model_dump_json())


class _Open(NamedTuple):
    manager: AsyncSandboxManager
    tasks: int


class _Managers:
    """One manager for each event loop, open from the first task's beginning to the last one's end."""

    def __init__(self) -> None:
        self._by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, _Open] = WeakKeyDictionary()
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()

    def get(self) -> AsyncSandboxManager:
        return self._by_loop[asyncio.get_running_loop()].manager

    async def take(self) -> None:
        loop = asyncio.get_running_loop()
        async with self._locks.setdefault(loop, asyncio.Lock()):
            manager, tasks = self._by_loop.get(loop) or _Open(await open_manager().__aenter__(), 0)
            self._by_loop[loop] = _Open(manager, tasks + 1)

    async def give_back(self) -> None:
        loop = asyncio.get_running_loop()
        async with self._locks.setdefault(loop, asyncio.Lock()):
            manager, tasks = self._by_loop.pop(loop)
            if tasks > 1:
                self._by_loop[loop] = _Open(manager, tasks - 1)
            else:
                await manager.aclose()


_managers = _Managers()


@sandboxenv(name="skerry")
class SkerrySandboxEnvironment(SandboxEnvironment):
    """One sandbox of a sample."""

    def __init__(self, sandbox: AsyncSandbox, manager: AsyncSandboxManager, fleet: AsyncFleet | None = None) -> None:
        super().__init__()
        self.sandbox = sandbox
        self.manager = manager
        self.fleet = fleet

    # tasks and samples

    @classmethod
    def config_files(cls) -> list[str]:
        return _FILES

    @classmethod
    def is_docker_compatible(cls) -> bool:
        """No: compose files are read, but not Inspect's own objects of them, nor is a Dockerfile alone."""
        return False

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        return SkerryConfig(**config)

    @classmethod
    def default_concurrency(cls) -> int | None:
        return 2 * (os.cpu_count() or 1)

    def default_polling_interval(self) -> float:
        return 0.2

    @classmethod
    async def task_init(cls, task_name: str, config: SandboxEnvironmentConfigType | None) -> None:
        """Open the registry, and see that the provider works here before any sample begins."""
        wanted = _Wanted.of(config, task_name)
        await _managers.take()
        try:
            await wanted.check(_managers.get())
            await wanted.build(_managers.get())
        except BaseException:
            await run_to_end(_managers.give_back())
            raise

    @classmethod
    async def sample_init(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        wanted = _Wanted.of(config, task_name)
        manager = _managers.get()
        if wanted.fleet is not None:
            return await cls._bring_up(manager, wanted.fleet, wanted.default)
        return {"default": cls(await manager.create(**wanted.options), manager)}

    @classmethod
    async def _bring_up(
        cls, manager: AsyncSandboxManager, spec: FleetSpec, default: str
    ) -> dict[str, SandboxEnvironment]:
        """All of a fleet, or nothing; the default first."""
        fleet = AsyncFleet(manager, spec)
        try:
            report = await fleet.up()
            if not report.ok:
                failures = [f"{name}: {why}" for each in report.phases.values() for name, why in each.errors.items()]
                raise CreateFailed(f"the services did not come up. {'; '.join(failures)}")
            found: dict[str, SandboxEnvironment] = {}
            for phase in sorted(spec.phases, key=lambda phase: phase.name != default):
                for index, member in enumerate(phase.members(), 1):
                    name = phase.name if phase.count == 1 else f"{phase.name}-{index}"
                    found[name] = cls(await fleet.member(member), manager, fleet)
            return found
        except BaseException:
            await run_to_end(fleet.down(volumes=True, grace_s=0))
            raise

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """End all of the sample's sandboxes, to the end also where the sample was interrupted."""
        first = next(iter(environments.values())).as_type(SkerrySandboxEnvironment)
        await run_to_end(first._end())

    async def _end(self) -> None:
        if self.fleet is not None:
            await self.fleet.down(volumes=True, grace_s=0)
        else:
            await self.manager.destroy(self.sandbox.id, volumes=True, grace_s=0)

    @classmethod
    async def task_cleanup(cls, task_name: str, config: SandboxEnvironmentConfigType | None, cleanup: bool) -> None:
        """Let go of the registry. Samples ended what was theirs; without `cleanup` that lives on for its lifetime."""
        await run_to_end(_managers.give_back())

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:
        """End the sandboxes of all samples, or one of them: those that a killed evaluation left, or that were kept."""
        async with open_manager() as manager:
            if id is not None:
                await manager.destroy(id, volumes=True)
                return
            outcomes = await manager.destroy_all(Filter(labels=_OURS), volumes=True)
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        if failed:
            told = f"{len(failed)} of {len(outcomes)} sandboxes could not be destroyed; ask again"
            raise ProviderError(f"{told}. {failed[0].id}: {failed[0].error}")

    # a sandbox in use

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        done = await self._run(cmd, timeout, stdin=input, cwd=cwd, env=env, user=user)
        if done.truncated:
            kept = done.text if done.stdout_cut else done.error_text
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, kept)
        return _told(done)

    async def _run(self, cmd: list[str], timeout: float | None, **options: Unpack[ExecOptions]) -> Done:
        """Run a command: what the command or the box is to blame for is a result, or one of Python's own errors."""
        options = {**options, "timeout_s": timeout, "limit": SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE}
        try:
            done = await self.sandbox.exec(cmd, **options)
        except (UserNotFound, ArgumentsTooLong, BoxFull) as error:
            return Done(exit_code=_CANNOT_RUN, stderr=str(error).encode())
        except Unsupported as error:
            raise SandboxUserUnsupportedError(str(error)) from error
        if done.not_started is NotStarted.CANNOT_RUN:
            raise PermissionError(done.error_text)
        if done.timed_out:
            raise _timed_out(timeout, done.text + done.error_text)
        return done

    @overload
    async def exec_remote(
        self, cmd: list[str], options: StreamingOptions | None = None, *, stream: Literal[True] = True
    ) -> ExecRemoteProcess: ...

    @overload
    async def exec_remote(
        self, cmd: list[str], options: AwaitableOptions | None = None, *, stream: Literal[False]
    ) -> ExecResult[str]: ...

    async def exec_remote(
        self, cmd: list[str], options: StreamingOptions | AwaitableOptions | None = None, *, stream: bool = True
    ) -> ExecRemoteProcess | ExecResult[str]:
        """A command that is streamed as it speaks, by the agent of the box; nothing is injected or asked again and
        again."""
        if stream:
            return await Process.begin(self, self.sandbox, cmd, options or StreamingOptions())
        given = options or AwaitableOptions()
        how: ExecOptions = {"stdin": given.input, "cwd": given.cwd, "env": given.env, "user": given.user}
        return _told(await self._run(cmd, getattr(given, "timeout", None), **how))

    async def _refuse(self, file: str, bit: int) -> None:
        """Raise PermissionError for what its owner may not do. Root could do it all the same, and Inspect wants an
        error then too."""
        if not (await self.sandbox.files.stat(file)).mode & bit:
            raise PermissionError(f"{file}: its permissions do not allow that")

    async def write_file(self, file: str, contents: str | bytes) -> None:
        try:
            with suppress(PathNotFound):
                await self._refuse(file, stat.S_IWUSR)
            await self.sandbox.files.write(file, contents)
        except PathIsFolder as error:
            raise IsADirectoryError(f"{file} is a directory") from error
        except (PathNotFolder, PathNotFile) as error:
            raise PermissionError(str(error)) from error

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        try:
            await self._refuse(file, stat.S_IRUSR)
            content = await self.sandbox.files.read(file, max_bytes=SandboxEnvironmentLimits.MAX_READ_FILE_SIZE)
        except TooLarge:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None) from None
        except PathIsFolder as error:
            raise IsADirectoryError(f"{file} is a directory") from error
        except PathNotFolder as error:
            raise FileNotFoundError(str(error)) from error
        except PathNotFile as error:
            raise PermissionError(str(error)) from error
        return content.decode() if text else content

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        """How a person gets in. Raises ConnectionError where nothing answers."""
        if not await self.sandbox.is_healthy():
            raise ConnectionError(f"sandbox {self.sandbox.id} does not answer")
        whose = ["--user", user] if user else []
        return SandboxConnection(
            type="skerry",
            command=shlex.join(["skerry", "exec", "-it", *whose, self.sandbox.id]),
            ports=[_mapping(port, address) for port, address in self.sandbox.addresses.items()] or None,
        )


def _told(done: Done) -> ExecResult[str]:
    return ExecResult(done.ok, done.exit_code, done.text, done.error_text)


def _timed_out(timeout: float | None, output: str) -> TimeoutError:
    """Their error for a command that took too long, with what it said until then."""
    error = TimeoutError(f"the command took longer than {timeout} seconds")
    if output:
        error.truncated_output = output  # type: ignore[attr-defined] # where Inspect looks for it
    return error


def _mapping(port: int, address: str) -> PortMapping:
    host, _, local = address.rpartition(":")
    return PortMapping(container_port=port, protocol="tcp", mappings=[HostMapping(host_ip=host, host_port=int(local))])


class _Wanted(NamedTuple):
    """What a sample is to have: a sandbox of these fields, or a fleet of which one member is the default."""

    options: SpecOptions
    fleet: FleetSpec | None = None
    default: str = ""
    builds: Mapping[str, tuple[Build, str]] = {}
    """Sources of images that a compose file wants built, by their names, and the provider that builds them."""

    @classmethod
    def of(cls, config: SandboxEnvironmentConfigType | None, task_name: str) -> _Wanted:
        """Raises InvalidSpec for a configuration that is none of ours, and InvalidFleet."""
        labels = {**_OURS, LABEL: _printable(task_name)}
        if isinstance(config, str):
            return cls({}, *_read_fleet(Path(config), labels))
        if config is None or isinstance(config, SkerryConfig):
            options = cast("SpecOptions", {}) if config is None else config.options()
            return cls(cast("SpecOptions", {**options, "labels": {**options.get("labels", {}), **labels}}))
        raise InvalidSpec(f"sandbox: a {type(config).__name__} is neither a SkerryConfig nor the path of a file")

    async def check(self, manager: AsyncSandboxManager) -> None:
        """Raise ProviderUnavailable, with what mends it, for a provider that does not work on this host."""
        if manager.is_remote:
            return
        if self.fleet is None:
            names = {manager.complete(None, self.options).provider}
        else:
            names = {phase.spec.provider for phase in self.fleet.phases}
        for name in sorted(names):
            await manager.provider(name).check()

    async def build(self, manager: AsyncSandboxManager) -> None:
        """Build what is not up to date."""
        for name, (build, provider) in self.builds.items():
            await make_image(manager, build, name, provider, again=True)


def _read_fleet(path: Path, labels: Mapping[str, str]) -> tuple[FleetSpec, str, Mapping[str, tuple[Build, str]]]:
    """The fleet of a file, with a name that no other sample has, the name of its default, and what is to be built."""
    text, builds = _without_builds(path)
    spec = load_fleet(path, text)
    project = load().project
    replace = msgspec.structs.replace
    phases = tuple(
        replace(each, spec=replace(each.spec, labels={**each.spec.labels, **labels})) for each in spec.phases
    )
    own = replace(spec, name=f"inspect-{uuid4().hex[:12]}", project=project, phases=phases)
    return own, _default(own, text, path), builds


def _without_builds(path: Path) -> tuple[str, Mapping[str, tuple[Build, str]]]:
    """The text of a file, where images that a compose file wants built are named instead."""
    text = path.read_text()
    root = parse(text, Problems(str(path)))
    services = root.get("services") if isinstance(root, TableNode) else None
    entries = services.entries if isinstance(services, TableNode) else ()
    if not any(isinstance(node, TableNode) and node.get("build") is not None for _, node in entries):
        return text, {}  # read as it stands, so that mistakes are told with their lines
    project = read([path], {}, {})
    images, builds = {}, {}
    for service, build in project.builds.items():
        images[service] = build.image or f"skerry-inspect:{build.key(str(path.absolute()))}"
        if not build.image:
            ours = project.content["services"][service].get("x-skerry", {})
            builds[images[service]] = (build, ours.get("provider") or load().provider)
    return project.as_text(project.with_images(images)), builds


def _default(spec: FleetSpec, text: str, path: Path) -> str:
    """The service with `x-default: true`, or the one of that name, as Inspect has it."""
    root = parse(text, Problems(str(path)))
    services = root.get("services") if isinstance(root, TableNode) else None
    for name, node in services.entries if isinstance(services, TableNode) else ():
        marked = node.get("x-default") if isinstance(node, TableNode) else None
        if isinstance(marked, Scalar) and marked.text == "true":
            return name.text
    names = [phase.name for phase in spec.phases]
    if "default" not in names and len(names) > 1:
        raise InvalidSpec(f"{path}: none of {', '.join(names)} is called 'default' or has 'x-default: true'")
    return "default" if "default" in names else names[0]


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:_LONGEST_LABEL]
