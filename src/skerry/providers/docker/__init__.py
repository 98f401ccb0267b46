"""Boxes as Docker containers."""

from skerry.providers.docker.provider import Docker, DockerConfig

__all__ = ["Docker", "DockerConfig"]
