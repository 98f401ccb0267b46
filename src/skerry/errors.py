"""Every error a caller can see, as one tree; each leaf is named by what the caller does next.

SkerryError
├─ InvalidSpec               the request is wrong: fix it
│  ├─ InvalidFleet           a fleet's file is wrong: fix the lines that it names
│  ├─ UserNotFound           the box has no such user: give a UID, or make the user
│  └─ ArgumentsTooLong       no kernel starts a program with that much: use stdin or a file
├─ ConfigError               the configuration is wrong: fix the file, variable or flag it names
├─ Unsupported               this provider cannot do that here: choose another, or drop the field
├─ NotFound                  no such sandbox, process or provider: forget it
│  └─ ImageNotFound          no such image: build, import or pull it
├─ WrongState                not possible in the sandbox's state
├─ Conflict                  a name, id or idempotency key is taken
│  └─ PortTaken              a port of this host is taken: choose another, or let one be chosen
├─ LimitReached              no room: retry later, or raise the limit
│  ├─ TooLarge               a file or folder is larger than may come out: say how much may
│  ├─ HostFull               the host has no room for another box: retry later
│  └─ BoxFull                the box has no room for another process, file or call: end some
├─ AccessDenied              a server was given no token, or one that is not good: give another
├─ NotPermitted              the token is good, and not for this: have its scopes widened
├─ ProviderError             the provider failed
│  ├─ ProviderUnavailable    not usable on this host; `fix` says what to do
│  └─ CreateFailed           the box did not come up; carries the tail of its log
├─ AgentError                the agent in the box failed a call
│  ├─ AgentUnreachable       nothing answers: the box is stopped, paused or hangs
│  │  └─ SandboxGone         there is no box any more (also NotFound and WrongState): make another
│  ├─ AgentProtocolError     the agent broke the protocol: replace the sandbox
│  ├─ CallTimeout            no answer by the deadline
│  ├─ CallInterrupted        the stream broke during the call: what it did is unknown
│  ├─ InterpreterNotFound    the box has no interpreter for that language
│  └─ InterpreterDied        the code ended its own interpreter: what it knew is lost; start it again
│     └─ InterpreterKilled   it was killed, most likely at the box's limit of memory: start it again
├─ GateUnavailable           nothing gets out of the box: retry; `skerry doctor` tells more
├─ StoreError                the registry cannot be used; sandboxes live on
│  ├─ StoreUnavailable       it does not answer, or another process holds it: retry
│  ├─ StoreFull              no room to write: free some; destroying still works
│  ├─ StoreReadOnly          it cannot be written to
│  ├─ StoreCorrupt           it is damaged: restore it, or move it away
│  └─ StoreTooNew            a newer version made it: upgrade
├─ LedgerError               the ledger cannot be written, so nothing new is begun: mend its folder
│  └─ LedgerFull             no room to write it: free some; ending still works
└─ FileError                 a file call failed inside the box (also OSError)
   ├─ PathNotFound           (also FileNotFoundError)
   ├─ PathExists             (also FileExistsError)
   ├─ PathDenied             (also PermissionError)
   │  └─ PathReadOnly        on a file system that nobody in the box can write
   ├─ PathInvalid            a name that cannot be, links in a circle, ...
   │  ├─ PathIsFolder        a folder where a file was meant (also IsADirectoryError)
   │  ├─ PathNotFolder       no folder where one was meant (also NotADirectoryError)
   │  ├─ PathNotEmpty        a folder that still has something in it
   │  ├─ PathNotFile         a device, a pipe or a socket where a file was meant
   │  └─ PathTooLong         a name or a path longer than the box's file system has
   └─ DiskFull               the box's disk or quota is full

A command that fails is not here: it is a result, also where its program is missing or cannot be run
(`ExecResult.not_started`). A surface maps `code`, never the class.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple


def printable(text: str) -> str:
    """Text that does nothing but stand there, on one line, whoever wrote it: all else in it is escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class SkerryError(Exception):
    """The root of all errors that skerry raises on purpose."""

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False
    """Whether the same call may succeed later."""
    infrastructure: ClassVar[bool] = False
    """Whether the machinery failed: then it says nothing about the code in the box, nor about the request."""
    rpc_code: int | None = None
    """Code of the JSON-RPC error that an agent answered with, such as -32601 for a method that it does not know."""

    def __init_subclass__(
        cls, *, code: str = "", retryable: bool | None = None, infrastructure: bool | None = None, **more: Any
    ) -> None:
        super().__init_subclass__(**more)
        if code:
            cls.code = code
        if retryable is not None:
            cls.retryable = retryable
        if infrastructure is not None:
            cls.infrastructure = infrastructure

    @property
    def message(self) -> str:
        """The failure, its reason and the way on, in one or two sentences."""
        return str(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors go from process to process, whatever their constructors take."""
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[SkerryError], args: tuple[Any, ...], state: dict[str, Any]) -> SkerryError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class InvalidSpec(SkerryError, code="invalid_spec"):
    """A field of the request is wrong; `field` is its path, where one is known."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class Problem(NamedTuple):
    """One mistake in a file, and where it is; line 0 is the file as a whole."""

    line: int
    column: int
    message: str


class InvalidFleet(InvalidSpec, code="invalid_fleet"):
    """The description of a fleet is wrong; `problems` are all that were found, in the order of the file."""

    def __init__(self, problems: Iterable[Problem], *, path: str = "") -> None:
        self.problems = tuple(sorted(problems))
        self.path = path
        super().__init__("\n".join(self._place(each) + each.message for each in self.problems))

    def _place(self, problem: Problem) -> str:
        """`fleet.yaml:12:5: `, as compilers write it and editors read it."""
        place = [self.path] if self.path else []
        if problem.line:
            place += [str(problem.line), str(problem.column)]
        return f"{':'.join(place)}: " if place else ""


class UserNotFound(InvalidSpec, code="user_not_found"):
    """No user of that name is in the box."""

    def __init__(self, message: str) -> None:
        super().__init__(message, field="user")


class ArgumentsTooLong(InvalidSpec, code="arguments_too_long"): ...


class ConfigError(SkerryError, code="config_error"): ...


class Unsupported(SkerryError, code="unsupported"):
    """The provider cannot honour a field or verb on this host, so nothing was started."""

    def __init__(self, field: str, provider: str, reason: str) -> None:
        super().__init__(f"provider {provider!r} cannot honour {field!r}: {reason}")
        self.field = field
        self.provider = provider
        self.reason = reason


class NotFound(SkerryError, code="not_found"): ...


class ImageNotFound(NotFound, code="image_not_found"): ...


class WrongState(SkerryError, code="wrong_state"): ...


class Conflict(SkerryError, code="conflict"): ...


class PortTaken(Conflict, code="port_taken"): ...


class LimitReached(SkerryError, code="limit_reached", retryable=True, infrastructure=True): ...


class TooLarge(LimitReached, code="too_large", retryable=False, infrastructure=False): ...


class HostFull(LimitReached, code="host_full"): ...


class BoxFull(LimitReached, code="box_full", infrastructure=False): ...


class AccessDenied(SkerryError, code="access_denied"): ...


class NotPermitted(SkerryError, code="not_permitted"): ...


class ProviderError(SkerryError, code="provider_error", infrastructure=True): ...


class ProviderUnavailable(ProviderError, code="provider_unavailable"):
    """The provider cannot work on this host; `fix` is the one line that changes that."""

    def __init__(self, provider: str, reason: str, *, fix: str) -> None:
        super().__init__(f"provider {provider!r} is unavailable: {reason}. Fix: {fix}")
        self.provider = provider
        self.reason = reason
        self.fix = fix


class CreateFailed(ProviderError, code="create_failed"):
    """The box did not come up; nothing of it is left. `log` is the tail of what it said."""

    def __init__(self, message: str, *, log: str = "") -> None:
        super().__init__(f"{message}\n{log}" if log else message)
        self.log = log


class AgentError(SkerryError, code="agent_error", infrastructure=True): ...


class AgentUnreachable(AgentError, code="agent_unreachable", retryable=True): ...


class SandboxGone(AgentUnreachable, NotFound, WrongState, code="sandbox_gone", retryable=False):
    """The box of this sandbox is not there any more, whoever ended it; nothing but `destroy` is of use."""


class AgentProtocolError(AgentError, code="agent_protocol"): ...


class CallTimeout(AgentError, code="call_timeout", retryable=True): ...


class CallInterrupted(AgentError, code="call_interrupted", retryable=True): ...


class InterpreterNotFound(AgentError, code="interpreter_not_found", infrastructure=False): ...


class InterpreterDied(AgentError, code="interpreter_died", infrastructure=False): ...


class InterpreterKilled(InterpreterDied, code="interpreter_killed", retryable=True): ...


class GateUnavailable(SkerryError, code="gate_unavailable", retryable=True, infrastructure=True): ...


class StoreError(SkerryError, code="store_error", infrastructure=True): ...


class StoreUnavailable(StoreError, code="store_unavailable", retryable=True): ...


class StoreFull(StoreError, code="store_full"): ...


class StoreReadOnly(StoreError, code="store_read_only"): ...


class StoreCorrupt(StoreError, code="store_corrupt"): ...


class StoreTooNew(StoreError, code="store_too_new"): ...


class LedgerError(SkerryError, code="ledger_error", infrastructure=True): ...


class LedgerFull(LedgerError, code="ledger_full", retryable=True): ...


class FileError(SkerryError, OSError, code="file_error"): ...


class PathNotFound(FileError, FileNotFoundError, code="path_not_found"): ...


class PathExists(FileError, FileExistsError, code="path_exists"): ...


class PathDenied(FileError, PermissionError, code="path_denied"): ...


class PathReadOnly(PathDenied, code="path_read_only"): ...


class PathInvalid(FileError, code="path_invalid"): ...


class PathIsFolder(PathInvalid, IsADirectoryError, code="path_is_folder"): ...


class PathNotFolder(PathInvalid, NotADirectoryError, code="path_not_folder"): ...


class PathNotEmpty(PathInvalid, code="path_not_empty"): ...


class PathNotFile(PathInvalid, code="path_not_file"): ...


class PathTooLong(PathInvalid, code="path_too_long"): ...


class DiskFull(FileError, code="disk_full"): ...


def all_errors(root: type[SkerryError] = SkerryError) -> list[type[SkerryError]]:
    """Every class of the tree, so that a test can hold each surface's table against it. A provider may tell refusals of
    its own apart by classes below these; to all others they are what their code says."""
    ours = [each for each in root.__subclasses__() if each.__module__ == __name__ and each.__bases__[0] is root]
    return [root, *(leaf for child in ours for leaf in all_errors(child))]


_DETAILS: tuple[tuple[type[SkerryError], dict[str, Any]], ...] = (
    (InvalidFleet, {"problems": (), "path": ""}),
    (Unsupported, {"provider": "", "reason": ""}),
    (ProviderUnavailable, {"provider": "", "reason": "", "fix": ""}),
    (CreateFailed, {"log": ""}),
)
"""What errors know beside their message, which nobody tells who only tells their code."""


def of_code(code: str, message: str, *, field: str | None = None, infrastructure: bool | None = None) -> SkerryError:
    """The error that has a code, as a server tells it; one that nobody knows here is just a SkerryError, of which the
    server says whether its machinery failed."""
    cls = next((each for each in all_errors() if each.code == code), SkerryError)
    error = cls.__new__(cls, message)
    error.args = (message,)
    if infrastructure is not None and type(error) is SkerryError:
        error.__dict__["infrastructure"] = infrastructure
    if isinstance(error, InvalidSpec | Unsupported):
        error.__dict__["field"] = field
    for kind, details in _DETAILS:
        if isinstance(error, kind):
            error.__dict__.update(details, **({"reason": message} if "reason" in details else {}))
    return error
