"""Boxes as Docker containers in a virtual machine that their project has for itself."""

from skerry.providers.vmdocker.provider import VmDocker
from skerry.providers.vmdocker.settings import VmDockerConfig

__all__ = ["VmDocker", "VmDockerConfig"]
