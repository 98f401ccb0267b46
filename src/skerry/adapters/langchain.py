"""Sandbox of LangChain's deepagents: `create_deep_agent(backend=SkerrySandbox(sandbox))`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepagents.backends.protocol import ExecuteResponse, FileDownloadResponse, FileUploadResponse
from deepagents.backends.sandbox import BaseSandbox

from skerry.errors import (
    BoxFull,
    FileError,
    InvalidSpec,
    PathDenied,
    PathIsFolder,
    PathNotFound,
    SkerryError,
    TooLarge,
)
from skerry.sync.loop_thread import loop_thread

if TYPE_CHECKING:
    from skerry.model.results import ExecResult
    from skerry.sandbox.sandbox import AsyncSandbox
    from skerry.sync.api import Sandbox

_OF_THE_CALL = (FileError, InvalidSpec, TooLarge, BoxFull)
"""Errors that a model can do something about, so that they are answers. All others are raised."""
_CANNOT_RUN = 126


class SkerrySandbox(BaseSandbox):
    """A sandbox in which an agent runs commands and has its files. It is as it was when the agent is through: whoever
    made it ends it. What fails in the machinery is raised as SkerryError and never an answer to the model."""

    def __init__(self, sandbox: Sandbox, *, timeout_s: float | None = None) -> None:
        """`timeout_s` is that of commands for which the agent says nothing; None is the sandbox's own, 0 none."""
        self.sandbox = sandbox
        self._timeout_s = timeout_s

    @property
    def id(self) -> str:
        return self.sandbox.id

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Run a line of shell; both outputs in the order in which they were written. Raises SkerryError."""
        return loop_thread.run(self._execute(command, timeout))

    async def aexecute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """The same. Cancelling it ends the command."""
        return await loop_thread.lend(self._execute(command, timeout))

    async def _execute(self, command: str, timeout: int | None) -> ExecuteResponse:
        timeout_s = self._timeout_s if timeout is None else timeout
        try:
            done = await _of(self.sandbox).exec(command, combined=True, timeout_s=timeout_s)
        except _OF_THE_CALL as error:
            return ExecuteResponse(output=f"Error: {error}", exit_code=_CANNOT_RUN)
        return ExecuteResponse(output=_said(done), exit_code=done.exit_code, truncated=done.truncated)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """Write files, each for itself. Raises SkerryError if the machinery fails."""
        return loop_thread.run(self._upload(files))

    async def aupload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """The same."""
        return await loop_thread.lend(self._upload(files))

    async def _upload(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return [FileUploadResponse(path=path, error=await self._write(path, content)) for path, content in files]

    async def _write(self, path: str, content: bytes) -> str | None:
        if not path.startswith("/"):
            return "invalid_path"
        try:
            await _of(self.sandbox).files.write(path, content)
        except _OF_THE_CALL as error:
            return _word(error)
        return None

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """Read files, each for itself. Raises SkerryError if the machinery fails."""
        return loop_thread.run(self._download(paths))

    async def adownload_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """The same."""
        return await loop_thread.lend(self._download(paths))

    async def _download(self, paths: list[str]) -> list[FileDownloadResponse]:
        return [await self._read(path) for path in paths]

    async def _read(self, path: str) -> FileDownloadResponse:
        if not path.startswith("/"):
            return FileDownloadResponse(path=path, error="invalid_path")
        try:
            return FileDownloadResponse(path=path, content=await _of(self.sandbox).files.read(path))
        except _OF_THE_CALL as error:
            return FileDownloadResponse(path=path, error=_word(error))


def _of(sandbox: Sandbox) -> AsyncSandbox:
    return sandbox._async


def _said(done: ExecResult) -> str:
    """All output, with what a model would not see otherwise."""
    if not done.timed_out:
        return done.text
    return f"{done.text}\nError: the command was ended after {done.duration_s:.0f} s, which was its timeout."


_WORDS: tuple[tuple[type[SkerryError], str], ...] = (
    (PathNotFound, "file_not_found"),
    (PathDenied, "permission_denied"),
    (PathIsFolder, "is_directory"),
)


def _word(error: SkerryError) -> str:
    """Their word for an error, or the message where they have none."""
    words = (word for kind, word in _WORDS if isinstance(error, kind))
    return next(words, str(error))
