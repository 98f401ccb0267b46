"""Boxes as system containers of Incus, on one host or a cluster."""

from skerry.providers.incus.provider import Incus
from skerry.providers.incus.settings import IncusConfig

__all__ = ["Incus", "IncusConfig"]
