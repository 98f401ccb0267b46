"""What projects need of virtual machines, and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from skerry.providers.base import Enforcement

SOCKET = "docker.sock"
"""In a machine's folder: leads to the Docker in it."""


class Machines(ABC):
    """Machines with Docker in them, each in a folder that tells all there is to know of it."""

    @abstractmethod
    async def check(self) -> None:
        """Raises ProviderUnavailable, with the one-line fix, if this host runs no such machines."""

    @abstractmethod
    async def describe(self) -> Mapping[str, Enforcement]:
        """What stands between a machine and the host, and how large it is."""

    @abstractmethod
    async def start(self, folder: Path, name: str) -> None:
        """Start one with the disk that its folder has, or with a new one; returns once its Docker answers. Raises
        CreateFailed with the last words of its console; what is left then is for `kill`."""

    @abstractmethod
    def is_running(self, folder: Path) -> bool: ...

    @abstractmethod
    async def tell(self, folder: Path, *, lifetime_s: float | None, idle_s: float | None) -> None:
        """Have it power itself off after so long, or after so long without anybody who speaks with its Docker, whatever
        it was told before. Raises AgentError if it does not answer."""

    @abstractmethod
    async def wait(self, folder: Path, timeout_s: float) -> bool:
        """Wait until one that ends has ended; False if it has not by then."""

    @abstractmethod
    async def kill(self, folder: Path) -> None:
        """End it at once; its disk and its console stay. Quiet if there is nothing."""

    @abstractmethod
    def last_words(self, folder: Path) -> str:
        """The end of its console."""
