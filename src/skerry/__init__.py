"""skerry: isolated machines for untrusted code, in one command.

with skerry.Sandbox(memory="512M") as sandbox:
    print(sandbox.exec(["uname", "-a"]).text)
"""

from __future__ import annotations

import sys

from skerry.version import __version__

TYPE_CHECKING = False  # `typing` takes longer to import than all of this
if TYPE_CHECKING:
    from skerry.errors import AccessDenied as AccessDenied
    from skerry.errors import AgentError as AgentError
    from skerry.errors import AgentProtocolError as AgentProtocolError
    from skerry.errors import AgentUnreachable as AgentUnreachable
    from skerry.errors import ArgumentsTooLong as ArgumentsTooLong
    from skerry.errors import BoxFull as BoxFull
    from skerry.errors import CallInterrupted as CallInterrupted
    from skerry.errors import CallTimeout as CallTimeout
    from skerry.errors import ConfigError as ConfigError
    from skerry.errors import Conflict as Conflict
    from skerry.errors import CreateFailed as CreateFailed
    from skerry.errors import DiskFull as DiskFull
    from skerry.errors import FileError as FileError
    from skerry.errors import GateUnavailable as GateUnavailable
    from skerry.errors import HostFull as HostFull
    from skerry.errors import ImageNotFound as ImageNotFound
    from skerry.errors import InterpreterDied as InterpreterDied
    from skerry.errors import InterpreterKilled as InterpreterKilled
    from skerry.errors import InterpreterNotFound as InterpreterNotFound
    from skerry.errors import InvalidFleet as InvalidFleet
    from skerry.errors import InvalidSpec as InvalidSpec
    from skerry.errors import LedgerError as LedgerError
    from skerry.errors import LedgerFull as LedgerFull
    from skerry.errors import LimitReached as LimitReached
    from skerry.errors import NotFound as NotFound
    from skerry.errors import NotPermitted as NotPermitted
    from skerry.errors import PathDenied as PathDenied
    from skerry.errors import PathExists as PathExists
    from skerry.errors import PathInvalid as PathInvalid
    from skerry.errors import PathIsFolder as PathIsFolder
    from skerry.errors import PathNotEmpty as PathNotEmpty
    from skerry.errors import PathNotFile as PathNotFile
    from skerry.errors import PathNotFolder as PathNotFolder
    from skerry.errors import PathNotFound as PathNotFound
    from skerry.errors import PathReadOnly as PathReadOnly
    from skerry.errors import PathTooLong as PathTooLong
    from skerry.errors import PortTaken as PortTaken
    from skerry.errors import ProviderError as ProviderError
    from skerry.errors import ProviderUnavailable as ProviderUnavailable
    from skerry.errors import SandboxGone as SandboxGone
    from skerry.errors import SkerryError as SkerryError
    from skerry.errors import StoreCorrupt as StoreCorrupt
    from skerry.errors import StoreError as StoreError
    from skerry.errors import StoreFull as StoreFull
    from skerry.errors import StoreReadOnly as StoreReadOnly
    from skerry.errors import StoreTooNew as StoreTooNew
    from skerry.errors import StoreUnavailable as StoreUnavailable
    from skerry.errors import TooLarge as TooLarge
    from skerry.errors import Unsupported as Unsupported
    from skerry.errors import UserNotFound as UserNotFound
    from skerry.errors import WrongState as WrongState
    from skerry.fleet.fleet import AsyncFleet as AsyncFleet
    from skerry.fleet.fleet import load_fleet as load_fleet
    from skerry.fleet.model import FleetSpec as FleetSpec
    from skerry.manager.manager import AsyncSandboxManager as AsyncSandboxManager
    from skerry.model.records import Cause as Cause
    from skerry.model.records import Filter as Filter
    from skerry.model.records import Record as Record
    from skerry.model.results import ExecResult as ExecResult
    from skerry.model.results import FileEvent as FileEvent
    from skerry.model.results import FileInfo as FileInfo
    from skerry.model.results import FileType as FileType
    from skerry.model.results import Metrics as Metrics
    from skerry.model.results import ProcessInfo as ProcessInfo
    from skerry.model.results import ServiceStatus as ServiceStatus
    from skerry.model.secrets import Secret as Secret
    from skerry.model.spec import Cache as Cache
    from skerry.model.spec import Mount as Mount
    from skerry.model.spec import Network as Network
    from skerry.model.spec import Port as Port
    from skerry.model.spec import Restart as Restart
    from skerry.model.spec import SandboxId as SandboxId
    from skerry.model.spec import Spec as Spec
    from skerry.model.spec import Workspace as Workspace
    from skerry.model.states import State as State
    from skerry.pool.pool import AsyncSandboxPool as AsyncSandboxPool
    from skerry.remote.manager import AsyncRemoteManager as AsyncRemoteManager
    from skerry.remote.manager import aconnect as aconnect
    from skerry.sandbox.sandbox import AsyncSandbox as AsyncSandbox
    from skerry.sync.api import Fleet as Fleet
    from skerry.sync.api import Sandbox as Sandbox
    from skerry.sync.api import SandboxManager as SandboxManager
    from skerry.sync.api import SandboxPool as SandboxPool
    from skerry.sync.api import connect as connect

_HOME = {
    "skerry.sandbox.sandbox": ["AsyncSandbox"],
    "skerry.errors": [
        "AccessDenied", "AgentError", "AgentProtocolError", "AgentUnreachable", "ArgumentsTooLong", "BoxFull",
        "CallInterrupted",
        "CallTimeout", "ConfigError", "Conflict", "CreateFailed", "DiskFull", "FileError", "GateUnavailable",
        "HostFull", "ImageNotFound", "InterpreterDied", "InterpreterKilled", "InterpreterNotFound", "InvalidFleet",
        "InvalidSpec", "LedgerError", "LedgerFull",
        "LimitReached", "NotFound", "NotPermitted", "PathDenied", "PathExists", "PathInvalid", "PathIsFolder",
        "PathNotEmpty", "PathNotFile", "PathNotFolder", "PathNotFound", "PathReadOnly", "PathTooLong", "PortTaken",
        "ProviderError", "ProviderUnavailable", "SandboxGone", "SkerryError", "StoreCorrupt", "StoreError", "StoreFull",
        "StoreReadOnly", "StoreTooNew",
        "StoreUnavailable", "TooLarge", "Unsupported", "UserNotFound", "WrongState",
    ],
    "skerry.fleet.fleet": ["AsyncFleet", "load_fleet"],
    "skerry.fleet.model": ["FleetSpec"],
    "skerry.model.states": ["State"],
    "skerry.model.results": [
        "ExecResult", "FileEvent", "FileInfo", "FileType", "Metrics", "ProcessInfo", "ServiceStatus",
    ],
    "skerry.manager.manager": ["AsyncSandboxManager"],
    "skerry.pool.pool": ["AsyncSandboxPool"],
    "skerry.model.records": ["Cause", "Filter", "Record"],
    "skerry.model.secrets": ["Secret"],
    "skerry.model.spec": ["Cache", "Mount", "Network", "Port", "Restart", "SandboxId", "Spec", "Workspace"],
    "skerry.remote.manager": ["AsyncRemoteManager", "aconnect"],
    "skerry.sync.api": ["Fleet", "Sandbox", "SandboxManager", "SandboxPool", "connect"],
}  # fmt: skip

__all__ = ["__version__", *(name for names in _HOME.values() for name in names)]


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: `skerry version` needs none of them."""
    for module, names in _HOME.items():
        if name in names:
            import importlib

            value = getattr(importlib.import_module(module), name)
            globals()[name] = value
            _leave_logging_to_the_program()
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _leave_logging_to_the_program() -> None:
    """Keep Python's handler of last resort from printing our warnings in a program that configures no logging."""
    logging = sys.modules.get("logging")
    if logging is not None and not logging.getLogger(__name__).handlers:
        logging.getLogger(__name__).addHandler(logging.NullHandler())


def __dir__() -> list[str]:
    return sorted(__all__)
