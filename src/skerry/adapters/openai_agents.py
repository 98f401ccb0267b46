"""Sandboxes for the OpenAI Agents SDK: `SandboxRunConfig(client=SkerrySandboxClient(memory="1G"))`."""

from __future__ import annotations

import asyncio
import io
import tarfile
import tempfile
import uuid
from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal, NoReturn, Unpack

from agents.sandbox.errors import (
    ErrorCode,
    ExecTimeoutError,
    ExecTransportError,
    OpName,
    SandboxRuntimeError,
    WorkspaceArchiveReadError,
    WorkspaceArchiveWriteError,
    WorkspaceReadNotFoundError,
    WorkspaceWriteTypeError,
)
from agents.sandbox.manifest import Manifest
from agents.sandbox.session import SandboxSession, SandboxSessionState
from agents.sandbox.session.base_sandbox_session import BaseSandboxSession
from agents.sandbox.session.dependencies import Dependencies
from agents.sandbox.session.manager import Instrumentation
from agents.sandbox.session.pty_types import PtyExecUpdate
from agents.sandbox.session.runtime_helpers import RESOLVE_WORKSPACE_PATH_HELPER, RuntimeHelperScript
from agents.sandbox.session.sandbox_client import BaseSandboxClient, BaseSandboxClientOptions
from agents.sandbox.snapshot import SnapshotBase, SnapshotSpec, resolve_snapshot
from agents.sandbox.types import ExecResult, ExposedPortEndpoint, User
from agents.sandbox.util.tar_utils import UnsafeTarMemberError, validate_tarfile

from skerry import config
from skerry.adapters.openai_terminals import Terminals
from skerry.errors import BoxFull, FileError, InvalidSpec, NotFound, PathNotFound, SkerryError, TooLarge
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.spec import SpecOptions
from skerry.sandbox.files import MAX_DOWNLOAD
from skerry.sandbox.sandbox import AsyncSandbox

if TYPE_CHECKING:
    from tarfile import TarInfo

_OF_THE_CALL = (FileError, InvalidSpec, TooLarge, BoxFull)
"""Errors of what was asked, or of the code in the box. All others are those of the machinery."""
_CANNOT_RUN = 126
_SUDO = 4
"""Words of `sudo -u USER --`, by which the SDK asks for a user."""
_IN_MEMORY = 16 << 20


class SkerrySandboxClientOptions(BaseSandboxClientOptions):
    """Wishes of one run."""

    type: Literal["skerry"] = "skerry"
    exposed_ports: tuple[int, ...] = ()


class SkerrySandboxSessionState(SandboxSessionState):
    """What a later process needs to go on in the same sandbox, or in another with the same files."""

    type: Literal["skerry"] = "skerry"
    sandbox_id: str


class SkerrySandboxSession(BaseSandboxSession):
    """One sandbox, whose workspace is a folder of it. What fails in the machinery is raised as the SDK's
    SandboxRuntimeError, with the SkerryError as its cause."""

    state: SkerrySandboxSessionState

    def __init__(self, state: SkerrySandboxSessionState, sandbox: AsyncSandbox) -> None:
        self.state = state
        self.sandbox = sandbox
        self._terminals = Terminals()
        self._has_root = state.workspace_root_ready

    async def _prepare_backend_workspace(self) -> None:
        try:
            await self.sandbox.files.make_dir(self.state.manifest.root)
        except SkerryError as error:
            _fail(error, "start")
        self._has_root = True

    async def _shutdown_backend(self) -> None:
        await self.sandbox.destroy()

    async def running(self) -> bool:
        return self._has_root and await self.sandbox.is_healthy()

    async def _place(self) -> tuple[str | None, dict[str, str]]:
        """Folder and variables of each command."""
        return (self.state.manifest.root if self._has_root else None), await self.state.manifest.environment.resolve()

    async def _exec_internal(self, *command: str | Path, timeout: float | None = None) -> ExecResult:
        words, user = _without_sudo(command)
        cwd, env = await self._place()
        try:
            done = await self.sandbox.exec(words, cwd=cwd, env=env, user=user, timeout_s=timeout)
        except _OF_THE_CALL as error:
            return ExecResult(stdout=b"", stderr=str(error).encode(), exit_code=_CANNOT_RUN)
        except SkerryError as error:
            raise _transport_error(command, error) from error
        if done.timed_out:
            raise ExecTimeoutError(command=command, timeout_s=timeout)
        return ExecResult(stdout=done.stdout, stderr=done.stderr, exit_code=done.exit_code)

    def supports_pty(self) -> bool:
        return True

    async def pty_exec_start(
        self,
        *command: str | Path,
        timeout: float | None = None,
        shell: bool | list[str] = True,
        user: str | User | None = None,
        tty: bool = False,
        yield_time_s: float | None = None,
        max_output_tokens: int | None = None,
    ) -> PtyExecUpdate:
        words, name = _without_sudo(self._prepare_exec_command(*command, shell=shell, user=user))
        cwd, env = await self._place()
        start = self.sandbox.pty if tty else self.sandbox.start
        try:
            process = await start(words, cwd=cwd, env=env, user=name, timeout_s=timeout)
            return await self._terminals.begin(process, tty=tty, yield_s=yield_time_s, max_tokens=max_output_tokens)
        except _OF_THE_CALL as error:
            return PtyExecUpdate(
                process_id=None, output=str(error).encode(), exit_code=_CANNOT_RUN, original_token_count=None
            )
        except SkerryError as error:
            raise _transport_error(command, error) from error

    async def pty_write_stdin(
        self,
        *,
        session_id: int,
        chars: str,
        yield_time_s: float | None = None,
        max_output_tokens: int | None = None,
    ) -> PtyExecUpdate:
        try:
            return await self._terminals.write(session_id, chars, yield_s=yield_time_s, max_tokens=max_output_tokens)
        except SkerryError as error:
            raise _transport_error((), error) from error

    async def pty_terminate_all(self) -> None:
        await self._terminals.end_all()

    async def _resolve_exposed_port(self, port: int) -> ExposedPortEndpoint:
        try:
            host, _, local = (await self.sandbox.expose(port)).rpartition(":")
        except SkerryError as error:
            _fail(error, "resolve_exposed_port")
        return ExposedPortEndpoint(host=host, port=int(local))

    def _runtime_helpers(self) -> tuple[RuntimeHelperScript, ...]:
        return (RESOLVE_WORKSPACE_PATH_HELPER,)

    async def _validate_path_access(self, path: Path | str, *, for_write: bool = False) -> Path:
        inside: Path = await self._validate_remote_path_access(path, for_write=for_write)
        return inside

    async def read(self, path: Path, *, user: str | User | None = None) -> io.IOBase:
        if user is not None:
            await self._check_read_with_exec(path, user=user)
        return io.BytesIO(await self._content(path, None))

    async def _read_bounded(self, path: Path, *, max_bytes: int) -> bytes:
        return await self._content(path, max_bytes)

    async def _content(self, path: Path, length: int | None) -> bytes:
        inside = await self._validate_path_access(path)
        try:
            return await self.sandbox.files.read(inside, length=length)
        except PathNotFound as error:
            raise WorkspaceReadNotFoundError(path=path, cause=error) from error
        except _OF_THE_CALL as error:
            raise WorkspaceArchiveReadError(path=path, cause=error, retryable=False) from error
        except SkerryError as error:
            _fail(error, "read")

    async def write(self, path: Path, data: io.IOBase, *, user: str | User | None = None) -> None:
        if user is not None:
            await self._check_write_with_exec(path, user=user)
        content = await asyncio.to_thread(data.read)
        if isinstance(content, str):
            content = content.encode()
        if not isinstance(content, bytes | bytearray):
            raise WorkspaceWriteTypeError(path=path, actual_type=type(content).__name__)
        inside = await self._validate_path_access(path, for_write=True)
        try:
            await self.sandbox.files.write(inside, content)
        except _OF_THE_CALL as error:
            raise WorkspaceArchiveWriteError(path=inside, cause=error, retryable=False) from error
        except SkerryError as error:
            _fail(error, "write")

    async def persist_workspace(self) -> io.IOBase:
        root = self._workspace_root_path()
        skip = {path.as_posix() for path in self._persist_workspace_skip_relpaths()}
        with tempfile.SpooledTemporaryFile(_IN_MEMORY) as whole:
            try:
                await _spool(self.sandbox.files.read_tar(root), whole)
            except _OF_THE_CALL as error:
                raise WorkspaceArchiveReadError(path=root, cause=error, retryable=False) from error
            except SkerryError as error:
                _fail(error, "persist_workspace")
            try:
                return await asyncio.to_thread(_portable, whole, skip)
            except tarfile.TarError as error:
                raise WorkspaceArchiveReadError(path=root, cause=error, retryable=False) from error

    async def hydrate_workspace(self, data: io.IOBase) -> None:
        root = self._workspace_root_path()
        with tempfile.SpooledTemporaryFile(_IN_MEMORY) as whole:
            try:
                await asyncio.to_thread(_take, data, whole)
                await self.sandbox.files.make_dir(root)
                await self.sandbox.files.write_tar(root, whole)
            except (UnsafeTarMemberError, tarfile.TarError, *_OF_THE_CALL) as error:
                raise WorkspaceArchiveWriteError(path=root, cause=error, retryable=False) from error
            except SkerryError as error:
                _fail(error, "hydrate_workspace")


class SkerrySandboxClient(BaseSandboxClient[SkerrySandboxClientOptions | None]):
    """Makes sandboxes for agents: on this machine, or where a manager has them."""

    backend_id = "skerry"
    supports_default_options = True

    def __init__(
        self,
        *,
        manager: AsyncSandboxManager | None = None,
        instrumentation: Instrumentation | None = None,
        dependencies: Dependencies | None = None,
        **sandbox: Unpack[SpecOptions],
    ) -> None:
        """The keywords are those of `skerry.Sandbox`. `manager` may be one of a server (`skerry.aconnect`)."""
        self._manager = manager
        self._instrumentation = instrumentation or Instrumentation()
        self._dependencies = dependencies
        self._wanted = sandbox

    async def create(
        self,
        *,
        snapshot: SnapshotSpec | SnapshotBase | None = None,
        manifest: Manifest | None = None,
        options: SkerrySandboxClientOptions | None = None,
    ) -> SandboxSession:
        """Make a sandbox. Raises SkerryError."""
        manifest = self._validate_manifest_for_create(Manifest() if manifest is None else manifest)
        sandbox = await self._make()
        try:
            if manifest.root == Manifest().root:  # where only root could make it
                manifest = manifest.model_copy(update={"root": f"{await sandbox.cwd()}/workspace"}, deep=True)
            id = uuid.uuid4()
            state = SkerrySandboxSessionState(
                session_id=id,
                snapshot=resolve_snapshot(snapshot, str(id)),
                manifest=manifest,
                exposed_ports=() if options is None else tuple(dict.fromkeys(options.exposed_ports)),
                sandbox_id=sandbox.id,
            )
            return self._session(state, sandbox)
        except BaseException:
            await sandbox.destroy()
            raise

    async def resume(self, state: SandboxSessionState) -> SandboxSession:
        """Go on in the sandbox that the state names, or in a new one if it has ended. Raises SkerryError."""
        if not isinstance(state, SkerrySandboxSessionState):
            raise TypeError("this is the state of another kind of sandbox")
        state.assert_path_grants_rebound()
        try:
            sandbox, is_old = await self._find(state.sandbox_id), True
        except NotFound:
            sandbox, is_old = await self._make(), False
            state.sandbox_id = sandbox.id
            state.workspace_root_ready = False
        return self._session(state, sandbox, is_old=is_old)

    async def delete(self, session: SandboxSession) -> SandboxSession:
        """End the sandbox of a session. Quiet if it has ended. Raises SkerryError."""
        inner = session._inner
        if not isinstance(inner, SkerrySandboxSession):
            raise TypeError("this is a session of another kind of sandbox")
        await inner.sandbox.destroy()
        return session

    def deserialize_session_state(self, payload: dict[str, object]) -> SandboxSessionState:
        return self._deserialize_session_state_payload(payload, SkerrySandboxSessionState)

    def _session(
        self, state: SkerrySandboxSessionState, sandbox: AsyncSandbox, *, is_old: bool = False
    ) -> SandboxSession:
        inner = SkerrySandboxSession(state, sandbox)
        inner._set_start_state_preserved(is_old)
        return self._wrap_session(inner, instrumentation=self._instrumentation)

    async def _make(self) -> AsyncSandbox:
        if self._manager is not None:
            return await self._manager.create(**self._wanted)
        return await AsyncSandbox.create(config.load().spec(self._wanted))

    async def _find(self, id: str) -> AsyncSandbox:
        """Raises NotFound also for one that is there no more."""
        sandbox = await (AsyncSandbox.open(id) if self._manager is None else self._manager.get(id))
        await sandbox.ping()
        return sandbox


def _without_sudo(command: Sequence[str | Path]) -> tuple[list[str], str | None]:
    """A command, and the user that the SDK asks for by words before it."""
    words = [str(word) for word in command]
    if len(words) > _SUDO and words[:2] == ["sudo", "-u"] and words[3] == "--":
        return words[_SUDO:], words[2]
    return words, None


def _transport_error(command: Sequence[str | Path], error: SkerryError) -> ExecTransportError:
    """The SDK's error for a command that the machinery could not run."""
    return ExecTransportError(command=command, cause=error, message=str(error), retryable=error.retryable)


def _fail(error: SkerryError, op: OpName) -> NoReturn:
    """Raise the SDK's error for what failed in the machinery."""
    raise SandboxRuntimeError(
        message=str(error),
        error_code=ErrorCode.EXEC_TRANSPORT_ERROR,
        op=op,
        context={"code": error.code},
        cause=error,
        retryable=error.retryable,
    ) from error


async def _spool(pieces: AsyncIterator[bytes], file: IO[bytes]) -> None:
    """Raises TooLarge."""
    async for piece in pieces:
        if file.tell() + len(piece) > MAX_DOWNLOAD:
            raise TooLarge(f"the workspace is larger than {MAX_DOWNLOAD >> 30} GiB")
        file.write(piece)
    file.seek(0)


def _portable(whole: IO[bytes], skip: Collection[str]) -> io.IOBase:
    """What other sandboxes of the SDK take of an archive: files, folders and links, without those to skip."""
    kept = tempfile.TemporaryFile()  # noqa: SIM115  # the caller closes it
    try:
        with tarfile.open(fileobj=whole) as source, tarfile.open(fileobj=kept, mode="w") as target:
            for member in source:
                if _is_wanted(member, skip):
                    target.addfile(member, source.extractfile(member) if member.isreg() else None)
        kept.seek(0)
    except BaseException:
        kept.close()
        raise
    return kept


def _is_wanted(member: TarInfo, skip: Collection[str]) -> bool:
    path = Path(member.name)
    return (member.isreg() or member.isdir() or member.issym()) and not any(
        each.as_posix() in skip for each in (path, *path.parents)
    )


def _take(data: io.IOBase, whole: IO[bytes]) -> None:
    """Copy an archive and look at all of its members. Raises UnsafeTarMemberError or TarError."""
    while piece := data.read(1 << 20):
        whole.write(piece.encode() if isinstance(piece, str) else piece)
    whole.seek(0)
    with tarfile.open(fileobj=whole) as tar:
        validate_tarfile(tar)
    whole.seek(0)
