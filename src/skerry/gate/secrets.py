"""Secrets of sandboxes in the gate: where a value comes from when a request needs it, and the placeholder that the box
has in its stead. A value is in memory alone, and nothing shows it by accident."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, NoReturn

from skerry.config import variable
from skerry.errors import InvalidSpec
from skerry.gate.ca import IN_THE_BOX, VARIABLES, made_once
from skerry.model.rules import WEB_PORTS, Rule
from skerry.model.secrets import Secret
from skerry.model.spec import SandboxId

PREFIX = "skerry-secret-"
_SEED = "seed"
_MAX_VALUE = 1 << 16
_COMMAND_S = 10.0
_KEPT_S = 60.0
_FAILED_S = 5.0
"""How long a command that failed is not run again, so that a box cannot keep the host busy with it."""


class Value:
    """A secret's value, which is told to whoever calls `reveal` and shown nowhere else."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return "Value(***)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret's value is not written down")


class NoValue(Exception):
    """A secret's value cannot be had; the text names the secret, says why and what to do."""


def placeholder(name: str, seed: bytes) -> str:
    """The text that a box has for a secret, worth something only in requests of that box to the secret's hosts."""
    return f"{PREFIX}{name}-{hashlib.blake2b(name.encode(), key=seed, digest_size=16).hexdigest()}"


def seed_of(folder: Path, id: SandboxId) -> bytes:
    """The seed of a sandbox's placeholders, from one of the installation that is made once in its folder of the gate.
    Raises OSError."""
    return hashlib.blake2b(id.encode(), key=_installation_seed(folder), digest_size=32).digest()


@lru_cache(maxsize=8)
def _installation_seed(folder: Path) -> bytes:
    return made_once(folder / _SEED, lambda: os.urandom(32))


def environment(secrets: Mapping[str, Secret], seed: bytes, home: str) -> dict[str, str]:
    """Variables of a box with secrets: the placeholders by name, and those by which programs find the CA bundle that
    `write_bundle` puts below its home. None for a box without secrets."""
    if not secrets:
        return {}
    bundle = f"{home.rstrip('/')}/{IN_THE_BOX}"
    return {**dict.fromkeys(VARIABLES, bundle), **{name: placeholder(name, seed) for name in secrets}}


def from_environment(secrets: Mapping[str, Secret]) -> dict[str, str]:
    """Values that this program has for secrets of the environment, to be provided to the gate. Raises InvalidSpec if a
    variable is not set."""
    values = {}
    for name, secret in secrets.items():
        if secret.file is None and not secret.command and not secret.given:
            value = variable(secret.env or name)
            if not value:
                reason = f"the variable {secret.env or name} is not set here; set it, or give file or command"
                raise InvalidSpec(f"secrets: {name}: {reason}", field="secrets")
            check_text(name, value)
            values[name] = value
    return values


def check_text(name: str, value: str) -> None:
    """Raise InvalidSpec for a value that is no text, before an error that shows it is made of that."""
    if any("\ud800" <= each <= "\udfff" for each in value):
        raise InvalidSpec(f"secrets: {name}: its value is no UTF-8", field="secrets")


def covering(secrets: Mapping[str, Secret], name: str, port: int) -> dict[str, Secret]:
    """The secrets that are for a host and port. Port 80, where all travels in clear, has to be said: `NAME:80`."""
    return {each: secret for each, secret in secrets.items() if _covers(secret.hosts, name, port)}


@lru_cache(maxsize=4096)
def _covers(hosts: tuple[str, ...], name: str, port: int) -> bool:
    rules = (Rule.parse(host, "secrets") for host in hosts)
    return any(rule.names(name) and port in rule.ports - ({80} if rule.ports == WEB_PORTS else set()) for rule in rules)


class _Kept(NamedTuple):
    until: float
    value: Value | None
    reason: str


class Vault:
    """Values of the secrets of all sandboxes, each got when a request needs it."""

    def __init__(self, folder: Path) -> None:
        """`folder`: that of the gate, in the installation's state."""
        self._folder = folder
        self._given: dict[SandboxId, dict[str, Value]] = {}
        self._printed: dict[tuple[SandboxId, str], _Kept] = {}
        self._running: dict[tuple[SandboxId, str], asyncio.Lock] = {}

    def provide(self, id: SandboxId, values: Mapping[str, str]) -> None:
        """Take values from the program that makes a sandbox, or rotate them. What commands printed is forgotten."""
        self._given.setdefault(id, {}).update({name: Value(text) for name, text in values.items()})
        self._forget_printed(id)

    def forget(self, id: SandboxId) -> None:
        """Forget all values of a sandbox; quiet if there are none."""
        self._given.pop(id, None)
        self._forget_printed(id)

    def placeholders(self, id: SandboxId, names: Mapping[str, Secret]) -> dict[str, str]:
        """Placeholders of a box by the names of its secrets. Raises OSError if the seed cannot be read."""
        seed = seed_of(self._folder, id)
        return {name: placeholder(name, seed) for name in names}

    async def value(self, id: SandboxId, name: str, secret: Secret) -> Value:
        """The value that a secret has now. Raises NoValue."""
        if secret.file is not None:
            return _read(name, secret.file)
        if secret.command:
            return await self._run_once(id, name, secret.command)
        try:
            return self._given[id][name]
        except KeyError:
            how = "give it again" if secret.given else f"set {secret.env or name} and connect to the sandbox again"
            why = "no program has provided its value since the gate was started"
            raise NoValue(f"the secret {name}: {why}: {how}") from None

    async def _run_once(self, id: SandboxId, name: str, command: tuple[str, ...]) -> Value:
        """What a command printed, at most a minute ago. Many requests wait for one run."""
        key = (id, name)
        async with self._running.setdefault(key, asyncio.Lock()):
            kept = self._printed.get(key)
            if kept is None or kept.until < time.monotonic():
                try:
                    kept = _Kept(time.monotonic() + _KEPT_S, await _run(name, command), "")
                except NoValue as error:
                    kept = _Kept(time.monotonic() + _FAILED_S, None, str(error))
                self._printed[key] = kept
        if kept.value is None:
            raise NoValue(kept.reason)
        return kept.value

    def _forget_printed(self, id: SandboxId) -> None:
        for key in [key for key in self._running if key[0] == id]:
            self._running.pop(key)
            self._printed.pop(key, None)


def _read(name: str, path: str) -> Value:
    """A value from a file, which is small and read each time, so that a change of it holds at once. Its path is not
    told: the box hears of what is wrong, and it is none of its business where things lie on the host."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise NoValue(f"the secret {name}: its file is no regular file")
            data = os.read(fd, _MAX_VALUE + 2)
        finally:
            os.close(fd)
    except OSError as error:
        raise NoValue(f"the secret {name}: its file cannot be read: {error.strerror}") from None
    return _checked(name, data, "its file")


async def _run(name: str, command: tuple[str, ...]) -> Value:
    """What a command of the host prints, by a deadline; it is killed with all that it started."""
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=null, stdout=pipe, stderr=null, start_new_session=True
        )
    except OSError as error:
        raise NoValue(f"the secret {name}: its command cannot be run: {error.strerror}") from None
    assert process.stdout is not None
    data = b""
    try:
        async with asyncio.timeout(_COMMAND_S):
            while len(data) <= _MAX_VALUE + 1 and (piece := await process.stdout.read(_MAX_VALUE)):
                data += piece
            if len(data) <= _MAX_VALUE + 1 and await process.wait():
                raise NoValue(f"the secret {name}: its command ended with code {process.returncode}")
    except TimeoutError:
        raise NoValue(f"the secret {name}: its command did not end in {_COMMAND_S:g} s") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    return _checked(name, data, "the output of its command")


def _checked(name: str, data: bytes, what: str) -> Value:
    data = data.removesuffix(b"\n")
    if not data:
        raise NoValue(f"the secret {name}: {what} is empty")
    if len(data) > _MAX_VALUE:
        raise NoValue(f"the secret {name}: {what} is larger than {_MAX_VALUE} bytes")
    try:
        return Value(data.decode())
    except UnicodeDecodeError:
        raise NoValue(f"the secret {name}: {what} is no UTF-8") from None
