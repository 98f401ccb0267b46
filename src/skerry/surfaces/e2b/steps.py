"""Steps of a template's build, each done in the sandbox that becomes the template."""

from __future__ import annotations

import posixpath
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec

from skerry.errors import InvalidSpec, LimitReached, NotFound, PathNotFound, UserNotFound
from skerry.host import folders
from skerry.model.results import ExecResult
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.units import format_size

_RUN_S = 3600.0
_KEPT_S = 86400.0
_MOST_KEPT = 8 << 30
_SHOWN = 32 << 10
_ARCHIVE = "/tmp/.skerry-copy.tar"
_UNPACKED = "/tmp/.skerry-copy"
_COPY = r"""
set -eu
rm -rf "$UNPACKED"; mkdir -p "$UNPACKED"
tar -xf "$ARCHIVE" -C "$UNPACKED"
cd "$UNPACKED"
IFS=
set -- $SOURCE
case "$TARGET" in */) mkdir -p "$TARGET" ;; *) mkdir -p "$(dirname "$TARGET")" ;; esac
if [ "$#" -gt 1 ] || [ "$SOURCE" != "$1" ]; then mkdir -p "$TARGET"; fi
for each in "$@"; do
    [ -n "$OWNER" ] && chown -hR "$OWNER" "$each"
    [ -n "$MODE" ] && chmod -R "$MODE" "$each"
    if [ -d "$each" ] && [ ! -L "$each" ]; then mkdir -p "$TARGET"; cp -a "$each/." "$TARGET/"
    else cp -a "$each" "$TARGET"; fi
done
rm -rf "$UNPACKED" "$ARCHIVE"
"""
"""Docker's rules: a folder gives its content, several files go into a folder. What is asked for is in variables."""
_PROVISION = r"""
set -e
id user >/dev/null 2>&1 || useradd --uid 1000 --user-group --create-home --shell /bin/bash user 2>/dev/null ||
    useradd --user-group --create-home --shell /bin/bash user || adduser -D -s /bin/sh user
mkdir -p /home/user /code && chown user: /home/user /code
"""
"""The user that E2B's clients take for granted, in an image that has none."""


class Step(msgspec.Struct, frozen=True, rename="camel"):
    """One step, as a client sends it."""

    type: str
    args: tuple[str, ...] = ()
    files_hash: str = ""
    force: bool = False


class StepFailed(Exception):
    """A step that failed, in words for whoever wrote it."""


class Stage:
    """The sandbox of a build, and what the steps so far have set for those after them."""

    def __init__(self, sandbox: AsyncSandbox, tell: Callable[[str], None], user: str) -> None:
        self._sandbox = sandbox
        self._tell = tell
        self.user = user
        self.cwd = ""
        self.env: dict[str, str] = {}

    async def provision(self) -> None:
        """Have the user that clients take for granted. Raises StepFailed."""
        await self._shell(_PROVISION, {}, "root", "the image takes no user `user`")

    async def do(self, step: Step, archive: IO[bytes] | None) -> None:
        """Do a step. Raises StepFailed."""
        args = (*step.args, "", "", "", "")
        match step.type.upper():
            case "RUN":
                await self.run(args[0], args[1] or self.user)
            case "COPY" | "ADD":
                await self._copy(args[0], args[1], args[2], args[3], archive)
            case "ENV" | "ARG":
                self.env |= dict(zip(step.args[::2], step.args[1::2], strict=True))
            case "WORKDIR":
                self.cwd = self._absolute(args[0])
                made = {"TARGET": self.cwd, "OWNER": self.user}
                script = '[ -d "$TARGET" ] || { mkdir -p "$TARGET" && chown "$OWNER" "$TARGET"; }'
                await self._shell(script, made, "root", "the folder cannot be made")
            case "USER":
                self.user = args[0]
            case kind:
                raise StepFailed(f"there is no step {kind[:40]!r}")

    async def run(self, command: str, user: str, *, quiet: bool = False) -> ExecResult:
        """Run a command of the template's author. Raises StepFailed."""
        try:
            result = await self._exec(command, user)
        except UserNotFound:
            reason = f"command failed: unauthenticated: invalid username: '{user}'"
            raise StepFailed(f"failed to run command '{command}': {reason}") from None
        except (PathNotFound, InvalidSpec, NotFound) as error:
            raise StepFailed(f"failed to run command '{command}': {error.message}") from None
        for line in (*result.text.splitlines(), *result.error_text.splitlines()):
            if not quiet:
                self._tell(line)
        if not result.ok and not quiet:
            raise StepFailed(f"failed to run command '{command}': exit status {result.exit_code}")
        return result

    async def _exec(self, command: str, user: str) -> ExecResult:
        return await self._sandbox.exec(
            ["/bin/bash", "-l", "-c", command],
            user=user,
            cwd=self.cwd or None,
            env=self.env,
            timeout_s=_RUN_S,
            limit=_SHOWN,
        )

    async def _copy(self, source: str, target: str, owner: str, mode: str, archive: IO[bytes] | None) -> None:
        if archive is None:
            raise StepFailed(f"the files of COPY {source} were not uploaded")
        if posixpath.isabs(source) or ".." in source.split("/"):
            raise StepFailed(f"COPY {source}: a source is below the build's own folder")
        await self._sandbox.files.write(_ARCHIVE, archive)
        variables = {
            "ARCHIVE": _ARCHIVE,
            "UNPACKED": _UNPACKED,
            "SOURCE": source,
            "TARGET": self._absolute(target) + ("/" if target.endswith("/") else ""),
            "OWNER": owner or self.user,
            "MODE": mode,
        }
        await self._shell(_COPY, variables, "root", f"COPY {source} {target} failed")

    async def _shell(self, script: str, variables: dict[str, str], user: str, failure: str) -> None:
        """Run a script of ours; what it works on is in variables, and in no text of a shell."""
        result = await self._sandbox.exec(
            ["/bin/sh", "-c", script], user=user, env=variables, timeout_s=_RUN_S, limit=_SHOWN
        )
        if not result.ok:
            raise StepFailed(f"{failure}: {result.error_text.strip()[:1000]}")

    def _absolute(self, path: str) -> str:
        home = "/root" if self.user == "root" else f"/home/{self.user}"
        return posixpath.normpath(posixpath.join(self.cwd or home, path))


class Files:
    """Files that clients upload for COPY, as archives by the hash that the client gives them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, project: str, hash: str) -> Path:
        """Where an archive is kept. Raises InvalidSpec for what is no hash."""
        if not hash.isascii() or not hash.isalnum() or len(hash) > 128:
            raise InvalidSpec("hash: it is none", field="hash")
        return self._folder / (project or "-") / f"{hash}.tar"

    def make_room(self, folder: Path) -> None:
        """Forget archives of a project that are old. Raises LimitReached if there are too many all the same."""
        folders.make(folder)
        taken = 0
        for path in folder.iterdir():
            found = path.stat()
            if found.st_mtime < time.time() - _KEPT_S:
                path.unlink(missing_ok=True)
            else:
                taken += found.st_size
        if taken > _MOST_KEPT:
            raise LimitReached(f"the files that were sent for builds take more than {format_size(_MOST_KEPT)}: wait")
