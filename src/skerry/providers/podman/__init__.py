"""Boxes as Podman containers."""

from skerry.providers.podman.provider import Podman, PodmanConfig

__all__ = ["Podman", "PodmanConfig"]
