"""Boxes as containers of an engine that speaks Docker's API; each engine is a provider of its own beside this."""

from skerry.providers.engine.habits import Habits
from skerry.providers.engine.provider import EngineProvider
from skerry.providers.engine.settings import EngineConfig

__all__ = ["EngineConfig", "EngineProvider", "Habits"]
