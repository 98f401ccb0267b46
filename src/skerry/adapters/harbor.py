"""Harbor: tasks of Terminal-Bench and others in sandboxes, by `skerry.adapters.harbor:SkerryEnvironment`.

What the machinery did, such as a box that is lost, is raised as it is: Harbor keeps it as the trial's exception, by the
name of its class, tries again if it was told to, and counts no reward.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import msgspec
from harbor.environments.base import BaseEnvironment, ExecResult, SandboxBuildFailedError
from harbor.environments.base import ServiceOperationsUnsupportedError as NoService
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.environments.definition import require_agent_environment_definition
from harbor.models.task.config import NetworkMode, NetworkPolicy
from harbor.models.trial.config import ResourceMode

from skerry.adapters.compose import Build, read
from skerry.adapters.images import make_image
from skerry.adapters.opened import open_manager
from skerry.aio import run_to_end
from skerry.config import load
from skerry.errors import (
    BoxFull,
    CreateFailed,
    InvalidSpec,
    NotFound,
    PathNotFound,
    ProviderError,
    ProviderUnavailable,
    TooLarge,
    Unsupported,
    WrongState,
)
from skerry.fleet.fleet import AsyncFleet
from skerry.fleet.load import load as load_fleet
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.results import NotStarted
from skerry.model.spec import SpecOptions
from skerry.providers.registry import provider_class
from skerry.sandbox.sandbox import AsyncSandbox

BRIDGE = "bridge"
COMPOSE_FILE = "docker-compose.yaml"
MAIN = "main"
OURS = "x-skerry"
_ROOT = ("root", "0", "0:0")
_FOLDERS = ("/logs", "/tests", "/solution", "/app")
"""Folders at the root of a box that Harbor and its tasks write into."""
_LOGS = ("/logs/agent", "/logs/verifier", "/logs/artifacts")
_CANNOT_RUN = 126
_OF_SERVICES = ("provider", "writable_root", "admin", "user", "network", "allow")
"""Fields of the spec that every service of a compose file has."""
_OF_CONTAINERS = ("command", "entrypoint", "stdin_open", "tty", "pull_policy", "container_name", "platform", "init")
"""Fields of a service that keep a container there, or say how docker gets it."""


class SkerryEnvironment(BaseEnvironment):
    """The sandbox of a trial, or with a compose file the fleet of which `main` is a member.

    Keywords (`--environment-kwarg NAME=VALUE`): `provider`, else the settings' own; `spec`, more fields of the spec;
    `public`, what a task may reach that asks for the public network: `bridge`, the engine's, or a list of rules;
    `dockerfile=false` runs a task without its Dockerfile, on a provider whose boxes are not made of images;
    `build_network`, that of the RUN steps of a Dockerfile.
    """

    def __init__(
        self,
        *args: Any,
        provider: str | None = None,
        spec: dict[str, Any] | None = None,
        public: str | list[str] = BRIDGE,
        dockerfile: bool = True,
        build_network: str = BRIDGE,
        **more: Any,
    ) -> None:
        self._provider = provider or load().provider
        self._honours = provider_class(self._provider).honours
        self._spec = dict(spec or {})
        self._public = [public] if isinstance(public, str) else public
        self._uses_dockerfile = dockerfile
        self._build_network = build_network
        self._manager: AsyncSandboxManager | None = None
        self._fleet: AsyncFleet | None = None
        self._members: dict[str, AsyncSandbox] = {}
        self._folder: Path | None = None
        super().__init__(*args, **more)

    @staticmethod
    def type() -> str:
        return "skerry"

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True)

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(
            disable_internet=True,
            network_allowlist=True,
            network_allowlist_hostnames=True,
            network_allowlist_wildcard_hostnames=True,
            network_allowlist_ipv4_addresses=True,
            network_allowlist_ipv6_addresses=True,
            network_allowlist_ipv4_cidrs=True,
            network_allowlist_ipv6_cidrs=True,
            dynamic_network_policy=True,
            docker_compose=True,
        )

    @property
    def _uses_compose(self) -> bool:
        return (self.environment_dir / COMPOSE_FILE).exists() or bool(self.extra_docker_compose_paths)

    @property
    def _has_images(self) -> bool:
        return "image" in self._honours

    def _validate_definition(self) -> None:
        """Raises FileNotFoundError where nothing says what the box is made of, and ValueError where that is asked of a
        provider that cannot."""
        if self._has_images and self._uses_dockerfile:
            require_agent_environment_definition(
                self.environment_dir,
                docker_image=self.task_env_config.docker_image,
                extra_docker_compose_paths=self.extra_docker_compose_paths,
            )
        elif self._uses_dockerfile and (self._dockerfile.exists() or self.task_env_config.docker_image):
            raise ValueError(
                f"the task has an image, and boxes of {self._provider!r} are not made of any: choose another provider, "
                "or say dockerfile=false if it can do without"
            )

    @property
    def _dockerfile(self) -> Path:
        return Path(self.environment_dir, "Dockerfile")

    # network

    def _validate_network_policy_support(self) -> None:
        super()._validate_network_policy_support()
        modes = {each.network_mode for each in (self._network_policy, *self._phase_network_policies)}
        if self._public == [BRIDGE] and NetworkMode.PUBLIC in modes and len(modes) > 1:
            raise ValueError(
                "a box behind the engine's bridge cannot have rules later, nor one with rules the bridge: say by "
                "`public` what the public network is to be for this task, such as public=python"
            )

    def _rules(self, policy: NetworkPolicy) -> list[str] | None:
        """What a box may reach; None is the engine's bridge."""
        if policy.network_mode == NetworkMode.PUBLIC:
            return None if self._public == [BRIDGE] else self._public
        return list(policy.allowed_hosts)

    def _network(self) -> SpecOptions:
        rules = self._rules(self._network_policy)
        return {"network": "bridge"} if rules is None else {"network": "rules", "allow": rules}

    async def _apply_network_policy(self, network_policy: NetworkPolicy) -> None:
        """Raises WrongState for a box behind a bridge."""
        rules = self._rules(network_policy)
        if rules is None:
            raise WrongState("a box with rules cannot be put behind the engine's bridge")
        for member in self._members.values():
            await member.network.set(allow=rules)

    # beginning and end

    def _options(self) -> SpecOptions:
        """What every box of the task is."""
        options: dict[str, Any] = {"provider": self._provider, "labels": {"made-by": "harbor"}, **self._network()}
        if "writable_root" in self._honours:
            options["writable_root"] = True
        if "admin" in self._honours:
            options["admin"] = True
        elif self._has_images:
            options["user"] = "root"
        return cast("SpecOptions", {**options, **self._spec})

    def _limits(self) -> SpecOptions:
        """What the task says of its main box."""
        found: SpecOptions = {}
        cpus = self._resource_limit_value("cpu", auto_mode=ResourceMode.LIMIT)
        memory_mb = self._resource_limit_value("memory", auto_mode=ResourceMode.LIMIT)
        if cpus is not None:
            found["cpus"] = cpus
        if memory_mb is not None:
            found["memory"] = memory_mb << 20
        return found

    async def start(self, force_build: bool) -> None:
        """Make the box or the fleet, or nothing. Raises SandboxBuildFailedError for an image that cannot be built."""
        self._manager = await open_manager().__aenter__()
        try:
            if self._uses_compose:
                await self._bring_up(self._manager, force_build)
            else:
                await self._make(self._manager, force_build)
            await self._require_folders([*_LOGS, *self._mount_targets(writable_only=True)], chmod=True)
            if self.task_env_config.workdir:
                await self._require_folders([self.task_env_config.workdir], chmod=False)
            await self._upload_environment_dir_after_start()
        except BaseException:
            await run_to_end(self.stop(delete=True))
            raise

    async def _require_folders(self, folders: list[str], *, chmod: bool) -> None:
        made = await self.ensure_dirs(folders, chmod=chmod)
        if made is not None and made.return_code != 0:
            raise CreateFailed(f"folders of the trial could not be made: {made.stderr}")

    async def _make(self, manager: AsyncSandboxManager, force_build: bool) -> None:
        options = {**self._options(), **self._limits()}
        if self._has_images and self._uses_dockerfile:
            options["image"] = await self._image(manager, self._main_build(), force_build)
        elif not self._has_images:
            options["mounts"] = self._own_folders()
        self._members[MAIN] = await manager.create(**cast("SpecOptions", options))

    def _main_build(self) -> Build:
        """What the main box is made of, unless the compose file says."""
        return Build(context=self.environment_dir, image=self.task_env_config.docker_image or "")

    def _own_folders(self) -> list[str]:
        """Folders of the host for those at the root of a box that it could not make there."""
        self._folder = Path(tempfile.mkdtemp(prefix="skerry-harbor-"))  # whose mode keeps others out
        wanted = {*_FOLDERS, *([self.task_env_config.workdir] if self.task_env_config.workdir else [])}
        mounts = []
        for number, target in enumerate(sorted(wanted)):
            source = self._folder / str(number)
            source.mkdir()
            source.chmod(0o777)  # the user of the box is nobody whom the host knows
            mounts.append(f"{source}:{target}")
        return mounts

    async def _image(self, manager: AsyncSandboxManager, build: Build, force_build: bool) -> str:
        """The name of an image that is there. Raises SandboxBuildFailedError for one that cannot be built."""
        if force_build and (build.context / build.dockerfile).is_file():
            build = build._replace(image="")
        name = f"skerry-harbor:{build.key(self.environment_id)}"
        network = self._build_network
        try:
            return await make_image(manager, build, name, self._provider, network=network, again=force_build)
        except (ProviderError, InvalidSpec, OSError) as error:
            if build.image or isinstance(error, ProviderUnavailable):
                raise
            raise SandboxBuildFailedError(f"{name}: {error}") from error

    async def _bring_up(self, manager: AsyncSandboxManager, force_build: bool) -> None:
        path = self.environment_dir / COMPOSE_FILE
        env = {"CONTEXT_DIR": str(self.environment_dir), **self._startup_env()}
        project = read([path, *self.extra_docker_compose_paths], {"services": {MAIN: {}}}, env)
        builds = {MAIN: self._main_build(), **project.builds}
        images = {service: await self._image(manager, build, force_build) for service, build in sorted(builds.items())}
        services = {name: self._service(name, each) for name, each in project.with_images(images).items()}
        text = project.as_text(services)
        spec = load_fleet(path, text, provider=self._provider, sets=load().network.sets)
        name = f"harbor-{uuid4().hex[:12]}"
        self._fleet = AsyncFleet(manager, msgspec.structs.replace(spec, name=name, project=load().project))
        report = await self._fleet.up()
        if not report.ok:
            failures = [f"{member}: {why}" for each in report.phases.values() for member, why in each.errors.items()]
            raise CreateFailed(f"the services did not come up. {'; '.join(failures)}")
        for phase in spec.phases:
            self._members[phase.name] = await self._fleet.member(phase.member_name(1))

    def _service(self, name: str, service: dict[str, Any]) -> dict[str, Any]:
        """A service as one of a fleet: a box is there anyway, and a command of any but the main one is kept running."""
        ours = {key: value for key, value in self._options().items() if key in _OF_SERVICES}
        ours |= self._limits() if name == MAIN else {}
        if name != MAIN and service.get("command") is not None:
            ours["command"] = service["command"]
        kept = {key: value for key, value in service.items() if key not in _OF_CONTAINERS}
        return {**kept, OURS: {**ours, **service.get(OURS, {})}}

    async def stop(self, delete: bool) -> None:
        """End it all; without `delete` it lives on for its lifetime."""
        await run_to_end(self._stop(delete))

    async def _stop(self, delete: bool) -> None:
        manager, self._manager = self._manager, None
        if manager is None:
            return
        try:
            if delete and self._fleet is not None:
                await self._fleet.down(volumes=True, grace_s=0)
            elif delete:
                for member in self._members.values():
                    await manager.destroy(member.id, volumes=True, grace_s=0)
        finally:
            await manager.aclose()
        if delete and self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    # a box in use

    def _member(self, service: str | None) -> AsyncSandbox:
        """Raises ServiceOperationsUnsupportedError for a service that there is not."""
        name = MAIN if service is None else service
        if name not in self._members:
            raise NoService(f"there is no service {name!r}; there are {', '.join(self._members) or 'none'}")
        return self._members[name]

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        return await self._run(
            self._member(None),
            command,
            cwd or self.task_env_config.workdir,
            self._merge_env(env),
            timeout_sec,
            self._resolve_user(user),
        )

    async def service_exec(
        self,
        command: str,
        *,
        service: str | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        if self.is_main_service(service):
            return await self.exec(command, cwd, env, timeout_sec, user)
        return await self._run(self._member(service), command, cwd, env, timeout_sec, user)

    async def _run(
        self,
        sandbox: AsyncSandbox,
        command: str,
        cwd: str | None,
        env: dict[str, str] | None,
        timeout_sec: int | None,
        user: str | int | None,
    ) -> ExecResult:
        """Run a command of a shell. What the command or its caller is to blame for is a result, a timeout too (124)."""
        whose = None if user is None or (not self._has_images and str(user) in _ROOT) else str(user)
        for shell in ("bash", "sh"):
            try:
                done = await sandbox.exec([shell, "-c", command], cwd=cwd, env=env, user=whose, timeout_s=timeout_sec)
            except (InvalidSpec, PathNotFound, Unsupported, TooLarge, BoxFull) as error:
                return ExecResult(stderr=str(error), return_code=_CANNOT_RUN)
            if done.not_started is not NotStarted.NOT_FOUND:
                break
        told = f"\nthe command took longer than {timeout_sec} seconds" if done.timed_out else ""
        return ExecResult(stdout=done.text, stderr=done.error_text + told, return_code=done.exit_code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        main = self._member(None)
        if target_path.endswith("/") or await self._is_folder(main, target_path):
            target_path = f"{target_path.rstrip('/')}/{Path(source_path).name}"
        await main.files.upload(source_path, target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._member(None).files.upload(source_dir, target_dir)

    @staticmethod
    async def _is_folder(sandbox: AsyncSandbox, path: str) -> bool:
        with suppress(PathNotFound):
            return (await sandbox.files.stat(path)).is_dir
        return False

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await self.service_download_file(source_path, target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self.service_download_dir(source_dir, target_dir)

    async def service_download_file(
        self, source_path: str, target_path: Path | str, *, service: str | None = None
    ) -> None:
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        await self._member(service).files.download(source_path, target_path)

    async def service_download_dir(
        self, source_dir: str, target_dir: Path | str, *, service: str | None = None
    ) -> None:
        Path(target_dir).mkdir(parents=True, exist_ok=True)
        await self._member(service).files.download(source_dir, target_dir)

    async def stop_service(self, service: str) -> None:
        """End the processes of a service; its files stay. A box that cannot be stopped loses those that were begun from
        outside, and all that they have started."""
        member = self._member(service)
        assert self._manager is not None
        with suppress(Unsupported):
            await self._manager.stop(member.id, 0)
            return
        for process in await member.processes.list():
            with suppress(NotFound, WrongState):
                await member.processes.kill(process.process)

    async def attach(self) -> None:
        """Become the shell of a person in the main box."""
        os.execvp("skerry", ["skerry", "exec", "-it", self._member(None).id])
