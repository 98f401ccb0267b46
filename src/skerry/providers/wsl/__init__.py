"""Boxes as distributions of WSL2."""

from .provider import Wsl

__all__ = ["Wsl"]
