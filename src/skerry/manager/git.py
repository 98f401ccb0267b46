"""git on the host with a source that is not trusted: no settings of this machine, no hooks, no helpers, a deadline."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from contextlib import suppress
from pathlib import Path

from skerry.aio import run_to_end
from skerry.config import variable
from skerry.errors import CreateFailed, InvalidSpec

DEADLINE_S = 600.0
_SCHEMES = ("http", "https", "ssh", "git", "file")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)")
_SSH_SHORT = re.compile(r"[A-Za-z0-9._~-]+@[A-Za-z0-9][A-Za-z0-9.-]*:[^:].*")
_WHOLE_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_BEGINNING_OF_HASH = re.compile(r"[0-9a-f]{4,39}")
_NOT_IN_NAMES = re.compile(r"[\s~^:?*\[\\]|\.\.|@\{")
_TAIL = 4096
_log = logging.getLogger("skerry.manager")

_KEPT = (
    "PATH", "HOME", "SSH_AUTH_SOCK", "GIT_SSL_CAINFO", "SSL_CERT_FILE",
    "http_proxy", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY",
)  # fmt: skip
"""Variables of ours that git and ssh need to get there; HOME is for the keys of ssh, and for .netrc."""

_ENVIRONMENT = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ASKPASS": "",
    "SSH_ASKPASS": "",
    "GIT_ALLOW_PROTOCOL": ":".join(_SCHEMES),
    "GIT_SSH_COMMAND": "ssh -o BatchMode=yes",
    "LC_ALL": "C",
}
_SETTINGS = (
    f"core.hooksPath={os.devnull}",
    f"core.attributesFile={os.devnull}",
    "core.fsmonitor=false",
    "credential.helper=",
    "submodule.recurse=false",
    "gc.auto=0",
)
_CLONE = ("--quiet", "--no-checkout", "--no-local", "--no-recurse-submodules", "--template=", "--origin=origin")


def check_source(source: str) -> None:
    """Raise unless git can clone it without running anything, and without a secret that we would write down."""
    url = _URL.match(source)
    if url is None:
        if not source.startswith("/") and not _SSH_SHORT.fullmatch(source):
            allowed = f"an absolute path or a URL of git ({', '.join(_SCHEMES)})"
            raise InvalidSpec(f"workspace: the source must be {allowed}", field="workspace")
        return
    scheme, authority = url[1].lower(), url[2]
    if scheme not in _SCHEMES:
        raise InvalidSpec(f"workspace: {scheme}:// is not cloned; use {', '.join(_SCHEMES)}", field="workspace")
    user, at, _ = authority.rpartition("@")
    if at and (scheme != "ssh" or ":" in user):
        raise InvalidSpec(
            "workspace: the source has a password or a token in it, which would be written down; leave it out and use "
            "ssh or ~/.netrc, or clone it yourself and give the folder",
            field="workspace",
        )


def check_commit(commit: str) -> None:
    """Raise unless it can be the name of a branch or tag, or a hash."""
    if commit.startswith("-") or _NOT_IN_NAMES.search(commit):
        raise InvalidSpec(f"workspace: commit {commit!r} is no branch, tag or hash", field="workspace")


async def clone(source: str, commit: str | None, folder: Path) -> str:
    """Make the folder a work tree of the source at that commit, by default its HEAD; the commit's whole hash."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            code, _, errors = await _git("clone", *_CLONE, "--", source, str(folder))
            if code != 0:
                raise _not_cloned(source, errors)
            hash, how = await _find(source, commit, folder)
            code, _, errors = await _git("-C", str(folder), "checkout", "--quiet", "--force", *how, "--")
            if code != 0:
                raise CreateFailed(f"commit {hash} of {source} could not be checked out", log=errors)
            return hash
    except TimeoutError:
        advice = "clone it yourself and give the folder"
        raise CreateFailed(f"{source} could not be cloned within {DEADLINE_S:g} s: {advice}") from None


async def head_of(folder: str) -> str | None:
    """The hash of the commit that a work tree is at; None if it is no work tree, or not one that git trusts."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            return await _resolve(Path(folder), "HEAD")
    except (TimeoutError, CreateFailed) as error:
        _log.debug("the commit of %s is not known: %s", folder, error)
        return None


async def _find(source: str, commit: str | None, folder: Path) -> tuple[str, tuple[str, ...]]:
    """The hash, and what to tell `checkout`. A whole hash is never taken for a branch: that may be named to mislead."""
    if commit in (None, "HEAD"):
        hash = await _resolve(folder, "HEAD")
        if hash is None:
            raise CreateFailed(f"{source} has no commit yet: commit something there, or name a branch that has one")
        return hash, ()
    branch, tag = f"refs/remotes/origin/{commit}", f"refs/tags/{commit}"
    names = [commit] if _WHOLE_HASH.fullmatch(commit) else [branch, tag]
    if _BEGINNING_OF_HASH.fullmatch(commit):
        names.append(commit)
    for name in names:
        hash = await _resolve(folder, name)
        if hash is not None:
            return hash, ("-B", commit, "--track", branch) if name == branch else ("--detach", hash)
    advice = "give a branch, a tag, or the hash of a commit on one of them"
    raise CreateFailed(f"{source} has no commit {commit!r}: {advice}")


async def _resolve(folder: Path, name: str) -> str | None:
    code, output, _ = await _git("-C", str(folder), "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    return output if code == 0 and _WHOLE_HASH.fullmatch(output) else None


async def _git(*arguments: str) -> tuple[int, str, str]:
    """Exit code, and the end of stdout and of stderr. Cancelled, it ends with all that it has started."""
    settings = [word for setting in _SETTINGS for word in ("-c", setting)]
    inherited = {name: value for name in _KEPT if (value := variable(name)) is not None}
    try:
        process = await asyncio.create_subprocess_exec(
            "git",
            *settings,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=inherited | _ENVIRONMENT,
            cwd="/",
            start_new_session=True,
        )
    except FileNotFoundError:
        raise CreateFailed("git is not installed on this host: install it, or give a folder instead") from None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        output, errors = await asyncio.gather(_end_of(process.stdout), _end_of(process.stderr))
        return await process.wait(), output, errors
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await run_to_end(process.wait())


async def _end_of(stream: asyncio.StreamReader) -> str:
    """All of it is read, and the last bytes are kept: the other side of a clone can talk without end."""
    kept = b""
    while data := await stream.read(_TAIL):
        kept = (kept + data)[-_TAIL:]
    return kept.decode(errors="replace").strip()


def _not_cloned(source: str, errors: str) -> CreateFailed:
    what = f"{source} could not be cloned"
    if "dubious ownership" in errors:  # git's own advice would not help: we read no settings
        return CreateFailed(f"{what}: it belongs to another user; copy its folder instead (`copy`, --workspace-copy)")
    if "could not read Username" in errors or "publickey" in errors:
        what += ": it asks for credentials; use ssh with a key, or ~/.netrc, or clone it yourself and give the folder"
    return CreateFailed(what, log=errors)
