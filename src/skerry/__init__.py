"""skerry: isolated machines for untrusted code, in one command.

with skerry.Sandbox(memory="512M") as sandbox:
    print(sandbox.exec(["uname", "-a"]).text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.version import __version__

if TYPE_CHECKING:
    from skerry.api import AsyncSandbox
    from skerry.errors import (
        AgentError,
        AgentUnreachable,
        CallTimeout,
        ConfigError,
        CreateFailed,
        FileError,
        InterpreterNotFound,
        InvalidSpec,
        LimitReached,
        NotFound,
        PathNotFound,
        ProviderError,
        ProviderUnavailable,
        SkerryError,
        Unsupported,
        WrongState,
    )
    from skerry.fleet.fleet import AsyncFleet, load_fleet
    from skerry.fleet.model import FleetSpec
    from skerry.lifecycle import State
    from skerry.manager import AsyncSandboxManager
    from skerry.pool import AsyncSandboxPool
    from skerry.records import Cause, Filter, Record
    from skerry.results import ExecResult, FileEvent, FileInfo, FileType, Metrics, ProcessInfo
    from skerry.spec import Cache, Mount, Network, SandboxId, Spec, Workspace
    from skerry.sync import Fleet, Sandbox, SandboxManager, SandboxPool

_HOME = {
    "skerry.api": ["AsyncSandbox"],
    "skerry.errors": [
        "AgentError", "AgentUnreachable", "CallTimeout", "ConfigError", "CreateFailed", "FileError",
        "InterpreterNotFound", "InvalidSpec", "LimitReached", "NotFound", "PathNotFound", "ProviderError",
        "ProviderUnavailable", "SkerryError", "Unsupported", "WrongState",
    ],
    "skerry.fleet.fleet": ["AsyncFleet", "load_fleet"],
    "skerry.fleet.model": ["FleetSpec"],
    "skerry.lifecycle": ["State"],
    "skerry.results": ["ExecResult", "FileEvent", "FileInfo", "FileType", "Metrics", "ProcessInfo"],
    "skerry.manager": ["AsyncSandboxManager"],
    "skerry.pool": ["AsyncSandboxPool"],
    "skerry.records": ["Cause", "Filter", "Record"],
    "skerry.spec": ["Cache", "Mount", "Network", "SandboxId", "Spec", "Workspace"],
    "skerry.sync": ["Fleet", "Sandbox", "SandboxManager", "SandboxPool"],
}  # fmt: skip

__all__ = [
    "AgentError",
    "AgentUnreachable",
    "AsyncFleet",
    "AsyncSandbox",
    "AsyncSandboxManager",
    "AsyncSandboxPool",
    "Cache",
    "CallTimeout",
    "Cause",
    "ConfigError",
    "CreateFailed",
    "ExecResult",
    "FileError",
    "FileEvent",
    "FileInfo",
    "FileType",
    "Filter",
    "Fleet",
    "FleetSpec",
    "InterpreterNotFound",
    "InvalidSpec",
    "LimitReached",
    "Metrics",
    "Mount",
    "Network",
    "NotFound",
    "PathNotFound",
    "ProcessInfo",
    "ProviderError",
    "ProviderUnavailable",
    "Record",
    "Sandbox",
    "SandboxId",
    "SandboxManager",
    "SandboxPool",
    "SkerryError",
    "Spec",
    "State",
    "Unsupported",
    "Workspace",
    "WrongState",
    "__version__",
    "load_fleet",
]


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: `skerry version` needs none of them."""
    for module, names in _HOME.items():
        if name in names:
            import importlib

            value = getattr(importlib.import_module(module), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
