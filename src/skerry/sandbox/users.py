"""Users of a sandbox, and the processes and files of each, for those who serve many clients by one handle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from skerry.agent.client import NO_METHOD, AgentClient
from skerry.errors import AgentError, AgentProtocolError, NotFound, Unsupported
from skerry.model.results import Id, ProcessInfo
from skerry.sandbox.connection import Connect
from skerry.sandbox.files import AsyncFiles
from skerry.sandbox.processes import AsyncProcess, command_params
from skerry.sandbox.sandbox import AsyncSandbox

_TOO_OLD = "it was made by an older version, which cannot do this: make the sandbox anew"


class User(msgspec.Struct, frozen=True):
    """A user, as the box's agent tells it."""

    name: str
    uid: Id
    gid: Id
    home: str


class ProcessDetails(ProcessInfo, frozen=True, kw_only=True):
    """A process with what it was started with."""

    cwd: str = ""
    env: dict[str, str] = {}  # noqa: RUF012


class _Processes(msgspec.Struct, frozen=True):
    processes: list[ProcessDetails]


_known: WeakKeyDictionary[AgentClient, dict[str, User]] = WeakKeyDictionary()
"""What agents have told of users, for as long as their streams are open."""


class Account:
    """One user of a sandbox: their home, files, and processes that live on."""

    def __init__(self, sandbox: AsyncSandbox, user: User, connect: Connect, *, by_root: bool) -> None:
        """`connect` reaches their own agent; with `by_root` the box's own, which is root's, starts their processes."""
        self.user = user
        self._sandbox = sandbox
        self._connect = sandbox.connection.connect if by_root else connect
        self._named = user.name if by_root else None
        self._env = {"HOME": user.home, "USER": user.name, "LOGNAME": user.name} if by_root else {}
        self.files = sandbox.files if connect == sandbox.connection.connect else AsyncFiles(connect)

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bool = False,
        pty: tuple[int, int] | None = None,
        timeout_s: float | None = None,
        tag: str | None = None,
    ) -> AsyncProcess:
        """Start a process that lives on when nobody listens, and waits a while with its output for whoever does first.
        In a box whose agent is not root, one of another user ends with this handle."""
        env = {**self._env, **(env or {})}
        cwd = self.user.home if cwd is None else cwd
        params = command_params(argv, cwd=cwd, env=env, user=self._named, timeout_s=timeout_s)
        params |= {"stdin": stdin, "background": True, "hold": True, "tag": tag}
        if pty is not None:
            params["pty"] = {"rows": pty[0], "cols": pty[1]}
        how = "start" if pty is None else "terminal"
        told = self._sandbox.tell(how, argv, params | {"user": self.user.name})
        return await AsyncProcess.start(self._connect, "exec", params, told=told)


async def account(sandbox: AsyncSandbox, name: str) -> Account:
    """The account of a user. Raises UserNotFound, and Unsupported where the box cannot be that one."""
    connection = sandbox.connection
    connect, named = connection.of_user(name, sandbox.spec.user)
    client = await connect()
    user = await _user_of(client, None)
    if named is not None:
        other = await _user_of(client, named)
        if other.uid != user.uid:
            reason = f"this box runs everything as {user.name}; it cannot become {name!r}"
            raise Unsupported("user", connection.provider.name, reason)
    by_root = named is None and sandbox.spec.admin
    if by_root:  # whose home is as the box has it, and not where the box's own commands start
        user = await _user_of(client, name)
    return Account(sandbox, user, connect, by_root=by_root)


async def _user_of(client: AgentClient, name: str | None) -> User:
    """Whoever an agent is, or a user whom it knows. Raises UserNotFound."""
    known = _known.setdefault(client, {})
    if (found := known.get(name or "")) is not None:
        return found
    params = {} if name is None else {"user": name}
    try:
        found = await client.call("user", params, type=User)
    except AgentError as error:
        if error.rpc_code == NO_METHOD:
            raise Unsupported("call", "agent", _TOO_OLD) from None
        raise
    if not found.home.startswith("/") or "\0" in found.home + found.name:
        raise AgentProtocolError("the agent told of a user whose home is no path. Destroy this sandbox")
    known[name or ""] = found
    return found


async def processes(sandbox: AsyncSandbox) -> list[ProcessDetails]:
    """All processes that run, of all users, with those that ended a while ago."""
    return [each for _, found in await _listed(sandbox) for each in found]


async def find_process(
    sandbox: AsyncSandbox, *, pid: int | None = None, tag: str | None = None, ended: bool = False
) -> AsyncProcess:
    """The newest process that runs with a pid, or a tag; or with `ended` one whose end is not yet forgotten. It tells
    what it says from now on. Raises NotFound."""
    found: dict[bool, tuple[AgentClient, ProcessDetails]] = {}
    for client, known in await _listed(sandbox):
        for each in known:
            if each.background and (each.pid == pid if pid is not None else each.tag == tag and tag is not None):
                found[each.running] = client, each
    if not found or (True not in found and not ended):
        raise NotFound(f"no process runs with {f'pid {pid}' if pid is not None else f'tag {tag!r}'}")
    client, known_process = found.get(True) or found[False]

    async def connect() -> AgentClient:
        return client

    return AsyncProcess(connect, None, number=known_process.process, pid=known_process.pid, replay=False)


async def _listed(sandbox: AsyncSandbox) -> list[tuple[AgentClient, list[ProcessDetails]]]:
    own = await sandbox.connection.connect()
    clients = [own, *(each for each in sandbox.connection.clients() if each is not own)]
    params: dict[str, Any] = {"env": True}
    return [(each, (await each.call("processes", params, type=_Processes)).processes) for each in clients]
