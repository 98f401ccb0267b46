"""Boxes as system containers of Incus, on one host or a cluster.

From outside only the provider and its settings are touched, by their entry point.
"""

from skerry.providers.incus.api import IncusConfig
from skerry.providers.incus.provider import Incus

__all__ = ["Incus", "IncusConfig"]
