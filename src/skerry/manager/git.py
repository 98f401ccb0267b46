"""git on the host with a source that is not trusted: no settings of this machine, no hooks, no helpers, a deadline."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from skerry.aio import backoff, run_to_end
from skerry.config import variable
from skerry.errors import CreateFailed, InvalidSpec
from skerry.model.spec import SandboxId
from skerry.units import format_size

DEADLINE_S = 600.0
MOST = 16 << 30
"""Bytes of a clone for a box of which nobody knows how much it holds."""
_LOOK_S = (0.05, 0.25)
_LEAST_FILE = 1024
"""What a file takes at the least, so that many empty ones are not nothing."""
_SCHEMES = ("http", "https", "ssh", "git", "file")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)")
_SSH_SHORT = re.compile(r"[A-Za-z0-9._~-]+@[A-Za-z0-9][A-Za-z0-9.-]*:[^:].*")
_WHOLE_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_BEGINNING_OF_HASH = re.compile(r"[0-9a-f]{4,39}")
_PUBLIC_URL = re.compile(r"(https?)://([A-Za-z0-9.-]+)(?::([0-9]{1,5}))?(?:/.*)?")
_PUBLIC_PORTS = {"http": 80, "https": 443}
_VERSION = re.compile(r"git version ([0-9]+)\.([0-9]+)")
_PINS_SINCE = (2, 37)
"""Version of git that can be told at which address a name is."""
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
_PUBLIC_ENVIRONMENT = {"HOME": os.devnull, "GIT_ALLOW_PROTOCOL": "http:https"}
"""For a source that nothing of this host is for; without HOME, curl would look for .netrc where our user lives."""
_PUBLIC_KEPT = ("PATH", "GIT_SSL_CAINFO", "SSL_CERT_FILE")
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


def check_public(source: str) -> tuple[str, int]:
    """The host and port of a source that is on the internet, as far as its text tells. Raises InvalidSpec."""
    from skerry.gate.base import Refused  # most sandboxes have no work of others, and start without it
    from skerry.gate.decide import address_of, host_of, is_public

    url = _PUBLIC_URL.fullmatch(source)
    if url is None:
        raise InvalidSpec("workspace: the source must be https:// or http:// and a host's name", field="workspace")
    host, port = url[2].lower(), int(url[3] or _PUBLIC_PORTS[url[1]])
    try:
        is_plain = host_of(host) == host  # else git might take another host for meant than we
    except Refused:
        is_plain = False
    address = address_of(host)
    if not is_plain or not 0 < port < 65536 or (address is not None and not is_public(address)):
        raise InvalidSpec("workspace: the source is not on the internet", field="workspace")
    return host, port


def check_commit(commit: str) -> None:
    """Raise unless it can be the name of a branch or tag, or a hash."""
    if commit.startswith("-") or _NOT_IN_NAMES.search(commit):
        raise InvalidSpec(f"workspace: commit {commit!r} is no branch, tag or hash", field="workspace")


async def clone(source: str, commit: str | None, folder: Path, *, most: int = MOST, public: bool = False) -> str:
    """Make the folder a work tree of the source at that commit, by default its HEAD; the commit's whole hash. With
    `public` the source has to be on the internet, and is told nothing of this host. Raises CreateFailed, also when it
    takes more than `most` bytes: what is small on its way may be of any size when it is unpacked."""
    cloning = asyncio.create_task(_clone(source, commit, folder, public))
    growing = asyncio.create_task(_grow(folder, most))
    try:
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait((cloning, growing), return_when=asyncio.FIRST_COMPLETED)
            hash = cloning.result() if cloning.done() else None
            if hash is None or await asyncio.to_thread(_size, folder, most) > most:
                reason = f"with all its commits it is larger than the {format_size(most)} that the box holds"
                raise CreateFailed(f"{source} was not cloned: {reason}; ask for more disk")
            return hash
    except TimeoutError:
        advice = "clone it yourself and give the folder"
        raise CreateFailed(f"{source} could not be cloned within {DEADLINE_S:g} s: {advice}") from None
    finally:
        cloning.cancel()
        growing.cancel()
        await run_to_end(asyncio.wait((cloning, growing)))


async def _clone(source: str, commit: str | None, folder: Path, public: bool) -> str:
    settings = await _pin(source) if public else ()
    code, _, errors = await _git("clone", *_CLONE, "--", source, str(folder), settings=settings, public=public)
    if code != 0:
        raise _not_cloned(source, errors)
    hash, how = await _find(source, commit, folder)
    code, _, errors = await _git("-C", str(folder), "checkout", "--quiet", "--force", *how, "--")
    if code != 0:
        raise CreateFailed(f"commit {hash} of {source} could not be checked out", log=errors)
    return hash


async def _grow(folder: Path, most: int) -> None:
    """Wait until there are more bytes in a folder."""
    for delay_s in backoff(*_LOOK_S):
        if await asyncio.to_thread(_size, folder, most) > most:
            return
        await asyncio.sleep(delay_s)


def _size(folder: Path, most: int) -> int:
    """The bytes in a folder; they are not counted to their end where they are more than `most`."""
    size, left = 0, [os.fspath(folder)]
    while left and size <= most:
        with suppress(OSError), os.scandir(left.pop()) as entries:  # git removes what it has made for a while
            for entry in entries:
                size += max(entry.stat(follow_symlinks=False).st_size, _LEAST_FILE)
                if entry.is_dir(follow_symlinks=False):
                    left.append(entry.path)
                if size > most:
                    break
    return size


async def _pin(source: str) -> Sequence[str]:
    """Settings by which git connects to addresses that were checked, and goes nowhere else. Raises CreateFailed."""
    from skerry.gate.base import Policy, Refused
    from skerry.gate.decide import address_of
    from skerry.gate.dialer import Dialer
    from skerry.model.rules import Rules

    host, port = check_public(source)
    _, told, _ = await _git("version")
    version = _VERSION.match(told)
    if version is None or (int(version[1]), int(version[2])) < _PINS_SINCE:
        raise CreateFailed("git on this host is too old to clone what others name: it takes 2.37")
    try:
        found = await Dialer().find(Policy(id=SandboxId("workspace"), rules=Rules()), host, port)
    except Refused:  # which address it is, is nobody's business who asks for it
        found = ()
    if not found:
        raise CreateFailed(f"{source} could not be cloned: it is not found on the internet")
    addresses = ",".join(f"[{each}]" if each.version == 6 else str(each) for each in found)
    pinned = () if address_of(host) else (f"http.curloptResolve={host}:{port}:{addresses}",)
    return *pinned, "http.followRedirects=false", "http.proxy="


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


async def _git(*arguments: str, settings: Sequence[str] = (), public: bool = False) -> tuple[int, str, str]:
    """Exit code, and the end of stdout and of stderr. Cancelled, it ends with all that it has started."""
    words = [word for setting in (*_SETTINGS, *settings) for word in ("-c", setting)]
    names = _PUBLIC_KEPT if public else _KEPT
    inherited = {name: value for name in names if (value := variable(name)) is not None}
    try:
        process = await asyncio.create_subprocess_exec(
            "git",
            *words,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=inherited | _ENVIRONMENT | (_PUBLIC_ENVIRONMENT if public else {}),
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
