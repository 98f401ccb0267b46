"""Every error a caller can see, as one tree; each leaf is named by what the caller does next.

SkerryError
├─ InvalidSpec               the request is wrong: fix it
│  └─ InvalidFleet           a fleet's file is wrong: fix the lines that it names
├─ ConfigError               the configuration is wrong: fix the file, variable or flag it names
├─ Unsupported               this provider cannot do that here: choose another, or drop the field
├─ NotFound                  no such sandbox, process or provider: forget it
│  └─ ImageNotFound          no such image: build, import or pull it
├─ WrongState                not possible in the sandbox's state
├─ Conflict                  a name, id or idempotency key is taken
├─ LimitReached              no room: retry later, or raise the limit
├─ ProviderError             the provider failed
│  ├─ ProviderUnavailable    not usable on this host; `fix` says what to do
│  └─ CreateFailed           the box did not come up; carries the tail of its log
├─ AgentError                the agent in the box failed a call
│  ├─ AgentUnreachable       nothing answers: the box died or hangs
│  ├─ AgentProtocolError     the agent broke the protocol: replace the sandbox
│  ├─ CallTimeout            no answer by the deadline
│  ├─ CallInterrupted        the stream broke during the call: what it did is unknown
│  └─ InterpreterNotFound    the box has no interpreter for that language
├─ StoreError                the registry cannot be used; sandboxes live on
│  ├─ StoreUnavailable       it does not answer, or another process holds it: retry
│  ├─ StoreFull              no room to write: free some; destroying still works
│  ├─ StoreReadOnly          it cannot be written to
│  ├─ StoreCorrupt           it is damaged: restore it, or move it away
│  └─ StoreTooNew            a newer version made it: upgrade
└─ FileError                 a file call failed inside the box
   ├─ PathNotFound           (also FileNotFoundError)
   ├─ PathExists             (also FileExistsError)
   ├─ PathDenied             (also PermissionError)
   ├─ PathInvalid            a folder where a file was meant, a name that cannot be, ...
   └─ DiskFull               the box's disk or quota is full

A command that fails is not here: it is a result. A surface maps `code`, never the class.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple


class SkerryError(Exception):
    """The root of all errors that skerry raises on purpose."""

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False

    @property
    def message(self) -> str:
        """What failed, why, and what to do, in one or two sentences."""
        return str(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors go from process to process, whatever their constructors take."""
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[SkerryError], args: tuple[Any, ...], state: dict[str, Any]) -> SkerryError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class InvalidSpec(SkerryError):
    """A field of the request is wrong; `field` is its path, where one is known."""

    code = "invalid_spec"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class Problem(NamedTuple):
    """One mistake in a file, and where it is; line 0 is the file as a whole."""

    line: int
    column: int
    message: str


class InvalidFleet(InvalidSpec):
    """The description of a fleet is wrong; `problems` are all that were found, in the order of the file."""

    code = "invalid_fleet"

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


class ConfigError(SkerryError):
    code = "config_error"


class Unsupported(SkerryError):
    """The provider cannot honour a field or verb on this host, so nothing was started."""

    code = "unsupported"

    def __init__(self, field: str, provider: str, reason: str) -> None:
        super().__init__(f"provider {provider!r} cannot honour {field!r}: {reason}")
        self.field = field
        self.provider = provider
        self.reason = reason


class NotFound(SkerryError):
    code = "not_found"


class ImageNotFound(NotFound):
    code = "image_not_found"


class WrongState(SkerryError):
    code = "wrong_state"


class Conflict(SkerryError):
    code = "conflict"


class LimitReached(SkerryError):
    code = "limit_reached"
    retryable = True


class ProviderError(SkerryError):
    code = "provider_error"


class ProviderUnavailable(ProviderError):
    """The provider cannot work on this host; `fix` is the one line that changes that."""

    code = "provider_unavailable"

    def __init__(self, provider: str, reason: str, *, fix: str) -> None:
        super().__init__(f"provider {provider!r} is unavailable: {reason}. Fix: {fix}")
        self.provider = provider
        self.reason = reason
        self.fix = fix


class CreateFailed(ProviderError):
    """The box did not come up; nothing of it is left. `log` is the tail of what it said."""

    code = "create_failed"

    def __init__(self, message: str, *, log: str = "") -> None:
        super().__init__(f"{message}\n{log}" if log else message)
        self.log = log


class AgentError(SkerryError):
    code = "agent_error"


class AgentUnreachable(AgentError):
    code = "agent_unreachable"
    retryable = True


class AgentProtocolError(AgentError):
    code = "agent_protocol"


class CallTimeout(AgentError):
    code = "call_timeout"
    retryable = True


class CallInterrupted(AgentError):
    code = "call_interrupted"
    retryable = True


class InterpreterNotFound(AgentError):
    code = "interpreter_not_found"


class StoreError(SkerryError):
    code = "store_error"


class StoreUnavailable(StoreError):
    code = "store_unavailable"
    retryable = True


class StoreFull(StoreError):
    code = "store_full"


class StoreReadOnly(StoreError):
    code = "store_read_only"


class StoreCorrupt(StoreError):
    code = "store_corrupt"


class StoreTooNew(StoreError):
    code = "store_too_new"


class FileError(SkerryError):
    code = "file_error"


class PathNotFound(FileError, FileNotFoundError):
    code = "path_not_found"


class PathExists(FileError, FileExistsError):
    code = "path_exists"


class PathDenied(FileError, PermissionError):
    code = "path_denied"


class PathInvalid(FileError):
    code = "path_invalid"


class DiskFull(FileError):
    code = "disk_full"


def all_errors(root: type[SkerryError] = SkerryError) -> list[type[SkerryError]]:
    """Every class of the tree, so that a test can hold each surface's table against it. A provider may tell refusals of
    its own apart by classes below these; to all others they are what their code says."""
    ours = [child for child in root.__subclasses__() if child.__module__ == __name__]
    return [root, *(leaf for child in ours for leaf in all_errors(child))]
