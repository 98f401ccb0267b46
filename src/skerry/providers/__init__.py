"""Providers by name: found by entry point, imported only when used."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from skerry.errors import ConfigError, NotFound, ProviderUnavailable
from skerry.providers.base import Provider

GROUP = "skerry.providers"


def names() -> list[str]:
    """The names of all installed providers."""
    return sorted({point.name for point in importlib.metadata.entry_points(group=GROUP)})


@cache
def provider_class(name: str) -> type[Provider]:
    """The class behind a name; its own dependencies are imported here, and named if they are missing."""
    points = importlib.metadata.entry_points(group=GROUP, name=name)
    if not points:
        raise NotFound(f"no provider is called {name!r}; there are: {', '.join(names())}")
    try:
        loaded: type[Provider] = next(iter(points)).load()
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
