"""Boxes as virtual machines on macOS."""

from .provider import Vfkit

__all__ = ["Vfkit"]
