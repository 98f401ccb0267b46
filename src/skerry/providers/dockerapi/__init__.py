"""Boxes as containers of an engine that speaks Docker's API.

Each engine is a provider of its own beside this package: it takes `EngineProvider`, `EngineConfig` and `Quirks`.
"""

from skerry.providers.dockerapi.api import EngineConfig, Quirks
from skerry.providers.dockerapi.provider import EngineProvider

__all__ = ["EngineConfig", "EngineProvider", "Quirks"]
