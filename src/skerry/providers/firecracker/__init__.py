"""Boxes as virtual machines of Firecracker."""

from skerry.providers.firecracker.provider import Firecracker, FirecrackerConfig

__all__ = ["Firecracker", "FirecrackerConfig"]
