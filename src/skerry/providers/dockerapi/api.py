"""API of Docker, as far as we need it, with the settings and the quirks of the engines that speak it.

Requests have a deadline, answers a type, and refusals become errors of ours.
"""

from __future__ import annotations

import asyncio
import os
import re
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar, Unpack
from urllib.parse import unquote, urlsplit

import msgspec

from skerry.errors import ConfigError, Conflict, InvalidSpec, NotFound, ProviderError, ProviderUnavailable, SkerryError
from skerry.net.http import AnswerStream, Content, HttpClient, HttpError, NoAnswer, UpgradeRefused
from skerry.net.stream import Stream
from skerry.providers.shared.limits import DaemonConfig
from skerry.units import parse_size

T = TypeVar("T")

_MAX_MESSAGE = 2000
_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=30")
"""Nobody can be asked for a password: each request is a connection of its own."""
_SSH_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,252}")


class EngineConfig(DaemonConfig, frozen=True):
    host: str = ""
    """The daemon: unix:///path, tcp://host:port, or ssh://[user@]host[:port], where its own program is then run."""
    tls_verify: bool | str = ""
    """For tcp: TLS, with the daemon's certificate checked, by any value but an empty one or false."""
    cert_path: str = ""
    """For tcp: the folder with ca.pem, cert.pem and key.pem, which also means TLS; empty: ~/.docker."""
    runtime: str = ""
    """The OCI runtime of boxes that name none, such as runsc; empty: the daemon's own default."""
    state_dir: str = ""
    """A folder for each box that has a disk; empty: /var/lib/skerry/NAME for root, else ~/.local/state/skerry/NAME."""
    disk: int | str = "512M"
    """The work folder."""
    max_root: int | str = "4G"
    """The most that a snapshot keeps of what a box has written to its root, which nothing else bounds."""

    def root_size(self, provider: str) -> int:
        try:
            return parse_size(self.max_root, "max_root")
        except InvalidSpec as error:
            raise ConfigError(f"providers.{provider}.{error}") from None

    def tls(self, scheme: str) -> ssl.SSLContext | None:
        """The context by which both sides prove who they are; None where no TLS is asked for. Raises ConfigError."""
        is_asked = scheme == "https" or bool(self.cert_path) or self.tls_verify not in (False, "", "false")
        if not is_asked:
            return None
        folder = Path(self.cert_path or "~/.docker").expanduser()
        try:
            context = ssl.create_default_context(cafile=folder / "ca.pem")
            context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        except OSError as error:
            reason = f"ca.pem, cert.pem or key.pem of {folder} cannot be read: {error}"
            raise ConfigError(f"TLS: {reason}; set cert_path or DOCKER_CERT_PATH") from error
        return context

    def state(self, provider: str) -> Path:
        default = f"/var/lib/skerry/{provider}" if os.geteuid() == 0 else f"~/.local/state/skerry/{provider}"
        return Path(self.state_dir or default).expanduser().absolute()


class Quirks(msgspec.Struct, frozen=True):
    """Differences of one engine from Docker."""

    may_be_here: bool = True
    """Whether its daemon can be one of this machine, and so see our files and processes."""
    reads_seccomp_from_file: bool = False
    masks_by_option: bool = False
    """It is told what to hide as a security option, and leaves Docker's field for that unread."""
    tmpfs_owner: str = "uid={uid},gid={gid}"
    """Option by which a tmpfs is the box user's."""
    log_driver: str = "json-file"
    chooses_runtime: bool = True
    sets_resolver: bool = True
    """It can be told the resolver of a box without a network; else that is a file that the box is given."""
    parts_bridge: bool = True
    """Boxes on its bridge can be kept from each other."""
    builds_with_buildah: bool = False
    """Its builds share the host's network unless told otherwise as Buildah wants it, and need fewer capabilities."""
    ulimits: dict[str, int] = {}
    """Limits that it must be told, since what it asks for by itself is more than a daemon may have everywhere."""


class EngineFailed(ProviderError):
    """A request that the engine failed at (status 5xx), and that it may serve the next time."""


class Engine:
    """One daemon. It holds no connection and no state: any number of programs may talk to it."""

    def __init__(self, address: str, config: EngineConfig, *, provider: str, fix: str) -> None:
        self.provider = provider
        self._fix = fix
        self._http = http_client(address, config, provider)
        self.address = self._http.address

    async def get(self, path: str, type: type[T], **content: Unpack[Content]) -> T:
        return await self.ask("GET", path, type, **content)

    async def post(
        self, path: str, type: type[T] | None = None, *, timeout_s: float | None = None, **content: Unpack[Content]
    ) -> T:
        return await self.ask("POST", path, type, timeout_s=timeout_s, **content)

    async def delete(self, path: str, *, timeout_s: float | None = None, **content: Unpack[Content]) -> None:
        await self.ask("DELETE", path, None, timeout_s=timeout_s, **content)

    async def ask(
        self, method: str, path: str, type: type[T] | None, timeout_s: float | None = None, **content: Unpack[Content]
    ) -> T:
        """A body is a tar."""
        if content.get("body") is not None:
            content["headers"] = {"Content-Type": "application/x-tar"}
        with self._translating_errors():
            answer = await self._http.request(method, path, timeout_s=timeout_s, **content)
            if answer.status >= 400:
                raise self._refusal(answer.status, answer.body)
            # Without a type nobody reads the answer.
            return answer.json(type) if type is not None else None  # type: ignore[return-value]

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        timeout_s: float | None = None,
        whole_s: float | None = None,
        **content: Unpack[Content],
    ) -> AsyncIterator[AnswerStream]:
        """An answer that comes piece by piece; `timeout_s` is for its beginning, `whole_s` for all of it."""
        if content.get("body") is not None:
            content["headers"] = {"Content-Type": "application/x-tar"}
        with self._translating_errors():
            async with (
                asyncio.timeout(whole_s),
                self._http.stream(method, path, timeout_s=timeout_s, **content) as answer,
            ):
                if answer.status >= 400:
                    async with asyncio.timeout(self._http.timeout_s):
                        raise self._refusal(answer.status, await answer.whole())
                yield answer

    async def upgrade(self, path: str, *, json: Any) -> tuple[Stream, bytes]:
        """The connection itself, which is the caller's, and what came early."""
        with self._translating_errors():
            try:
                return await self._http.upgrade("POST", path, json=json)
            except UpgradeRefused as error:
                raise self._refusal(error.answer.status, error.answer.body) from None

    @contextmanager
    def _translating_errors(self) -> Iterator[None]:
        try:
            yield
        except NoAnswer as error:
            raise ProviderUnavailable(self.provider, f"its daemon does not answer: {error}", fix=self._fix) from error
        except TimeoutError:
            reason = "its daemon began an answer, and did not come to its end in time"
            raise ProviderUnavailable(self.provider, reason, fix=self._fix) from None
        except HttpError as error:
            raise ProviderError(f"{self.provider}: {error}") from error

    def _refusal(self, status: int, body: bytes) -> SkerryError:
        message = _message(body) or f"status {status}, without a reason"
        if (known := {404: NotFound, 409: Conflict}.get(status)) is not None:
            return known(f"{self.provider}: {message}")
        error = EngineFailed if status >= 500 else ProviderError
        return error(f"{self.provider} refused (status {status}): {message}")


def http_client(address: str, config: EngineConfig, program: str) -> HttpClient:
    """A client for an address as engines write them; `program` is what speaks for the daemon behind ssh. Raises
    ConfigError."""
    parts = urlsplit(address)
    try:
        port = parts.port
    except ValueError:  # out of range
        port = -1
    is_plain = parts.path in ("", "/") and not parts.query and not parts.fragment and parts.password is None
    if parts.scheme == "unix" and parts.path:
        return HttpClient(address, timeout_s=config.timeout_s)
    if parts.scheme in ("tcp", "http", "https") and parts.hostname and port != -1 and is_plain and not parts.username:
        tls = config.tls(parts.scheme)
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        usual = 2375 if tls is None else 2376
        url = f"{'http' if tls is None else 'https'}://{host}:{port or usual}"
        return HttpClient(url, tls=tls, timeout_s=config.timeout_s)
    if parts.scheme == "ssh" and _SSH_NAME.fullmatch(parts.hostname or "") and port != -1 and is_plain:
        user = unquote(parts.username or "")
        if not user or _SSH_NAME.fullmatch(user):
            who = [*(["-l", user] if user else []), *(["-p", str(port)] if port else [])]
            through = [*_SSH, *who, "--", parts.hostname or "", f"{program} system dial-stdio"]
            return HttpClient(address, timeout_s=config.timeout_s, through=through)
    raise ConfigError(
        f"the daemon's address {address!r} is none of unix:///path, tcp://host:port and ssh://[user@]host[:port]"
    )


def _message(body: bytes) -> str:
    try:
        data = msgspec.json.decode(body)
        text = data.get("message") or data.get("cause") if isinstance(data, dict) else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        text = None
    return str(text or body.decode(errors="replace")).strip()[:_MAX_MESSAGE]
