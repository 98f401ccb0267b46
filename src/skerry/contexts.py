"""Contexts: servers that the command line knows by name, with their tokens, in one file that is the user's alone."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec

from skerry.errors import ConfigError


class Context(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A server."""

    url: str
    token: str = ""
    ca: str = ""
    """File of certificates that are trusted beside those of the system."""


class Contexts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """All that are known, and the one that is used; none is this machine itself."""

    current: str = ""
    known: dict[str, Context] = {}

    @property
    def used(self) -> Context | None:
        return self.known.get(self.current)


def read(path: Path) -> Contexts:
    """The contexts of a file; none if there is no file. Raises ConfigError, also for one that others can read."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            data = file.read()
    except FileNotFoundError:
        return Contexts()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if status.st_mode & 0o077:
        raise ConfigError(f"{path}: others can read it, and it holds tokens: chmod 600 {path}")
    try:
        return msgspec.json.decode(data, type=Contexts)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: it is not what `skerry context` writes: {error}") from None


def write(path: Path, contexts: Contexts) -> None:
    """Write them, whole or not at all, for the user alone. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".contexts-", delete=False) as file:  # mode 0600
            try:
                file.write(msgspec.json.format(msgspec.json.encode(contexts)) + b"\n")
                file.flush()
                os.fsync(file.fileno())
                os.rename(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
