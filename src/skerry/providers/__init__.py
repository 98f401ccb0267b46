"""Providers by name: found by entry point, imported only when used."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from skerry.errors import ConfigError, NotFound, ProviderUnavailable
from skerry.providers import points
from skerry.providers.base import Provider

GROUP = "skerry.providers"


def names() -> list[str]:
    """The names of all installed providers."""
    from importlib.metadata import entry_points

    return sorted({point.name for point in entry_points(group=GROUP)})


@cache
def provider_class(name: str) -> type[Provider]:
    """The class behind a name; its own dependencies are imported here, and named if they are missing."""
    where = points.find(GROUP, name) or _from_elsewhere(name)
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


def _from_elsewhere(name: str) -> str | None:
    """From a package that is no plain folder, such as an archive."""
    from importlib.metadata import entry_points

    return next((point.value for point in entry_points(group=GROUP, name=name)), None)


def load(name: str, settings: Mapping[str, Any] | None = None) -> Provider:
    """A provider, made from its slice of the configuration."""
    cls = provider_class(name)
    try:
        config = msgspec.convert(dict(settings or {}), cls.Config, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"providers.{name}: {error}") from None
    return cls(config)
