"""Boxes as Docker containers in a virtual machine that their project has for itself.

`machines` starts machines, `lifecycle` decides how long they stay up; only what is named here is for the outside.
"""

from skerry.providers.vmdocker.engine import VmDockerConfig
from skerry.providers.vmdocker.provider import VmDocker

__all__ = ["VmDocker", "VmDockerConfig"]
