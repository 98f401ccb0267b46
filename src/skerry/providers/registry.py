"""Registry of providers by name: found by entry point, imported only when used."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import msgspec

from skerry.errors import ConfigError, NotFound, ProviderUnavailable
from skerry.providers.base import Provider

GROUP = "skerry.providers"


def names() -> list[str]:
    """The names of all installed providers."""
    from importlib.metadata import entry_points

    return sorted({point.name for point in entry_points(group=GROUP)})


@cache
def provider_class(name: str) -> type[Provider]:
    """The class behind a name; its own dependencies are imported here, and named if they are missing."""
    where = find(GROUP, name)
    if where is None:  # it may be in a package that is no plain folder, such as an archive
        from importlib.metadata import entry_points

        where = next((point.value for point in entry_points(group=GROUP, name=name)), None)
    if where is None:
        raise NotFound(f"no provider is called {name!r}; there are: {', '.join(names())}")
    module, _, attribute = where.partition(":")
    try:
        loaded: type[Provider] = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise ProviderUnavailable(
            name, f"the Python package {error.name!r} is missing", fix=f"pip install 'skerry[{name}]'"
        ) from error
    return loaded


def load(name: str, settings: Mapping[str, Any] | None = None) -> Provider:
    """A provider, made from its slice of the configuration."""
    cls = provider_class(name)
    try:
        config = msgspec.convert(dict(settings or {}), cls.Config, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"providers.{name}: {error}") from None
    return cls(config)


def find(group: str, name: str) -> str | None:
    """Find an entry point, as `module:attribute`, in the first package on the path that has it; None if no package in
    a plain folder does. `importlib.metadata` takes longer to import than most commands take altogether."""
    for text in _declared():
        section = f"\n{text}".partition(f"\n[{group}]\n")[2].partition("\n[")[0]
        for line in section.splitlines():
            key, _, value = line.partition("=")
            if key.strip() == name:
                return value.partition("[")[0].strip()
    return None


def _declared() -> Iterator[str]:
    for folder in sys.path:
        try:
            with os.scandir(folder or ".") as entries:
                found = sorted(each.path for each in entries if each.name.endswith((".dist-info", ".egg-info")))
        except OSError:
            continue
        for path in found:
            try:
                with open(os.path.join(path, "entry_points.txt"), encoding="utf-8") as file:
                    yield file.read()
            except (OSError, UnicodeDecodeError):
                continue
