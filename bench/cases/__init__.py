"""What is measured, each in a file of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from skerry.measure.figures import Figure

from .box_memory import box_memory
from .burst import burst
from .command_line import command_line
from .create import create
from .docker import docker
from .docker_peers import docker_peers
from .e2b import e2b
from .engines import gvisor, podman
from .execute import execute
from .files import files
from .fleet import fleet
from .incus import incus
from .interpreter import interpreter
from .machine_docker import vmdocker
from .machines import vm
from .many import many
from .network import network
from .opened import opened
from .peers import peers
from .registry import registry
from .server import server
from .server_peer import server_peer
from .settings import Settings
from .stream import stream

CASES: dict[str, Callable[[Settings], Awaitable[list[Figure]]]] = {
    "create": create,
    "burst": burst,
    "exec": execute,
    "interpreter": interpreter,
    "stream": stream,
    "files": files,
    "cli": command_line,
    "memory": box_memory,
    "many": many,
    "opened": opened,
    "registry": registry,
    "fleet": fleet,
    "network": network,
    "server": server,
    "e2b": e2b,
    "peers": peers,
    "docker": docker,
    "gvisor": gvisor,
    "podman": podman,
    "docker-peers": docker_peers,
    "server-peer": server_peer,
    "incus": incus,
    "vm": vm,
    "vmdocker": vmdocker,
}

__all__ = ["CASES", "Settings"]
