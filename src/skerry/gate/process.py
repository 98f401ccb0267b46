"""The gate as a process: one for an installation. The registry tells it which sandboxes have rules and what these are;
it keeps a stream to each, and ends itself when there has been none for a while."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import msgspec

from skerry import clock, providers
from skerry.agent.client import AgentClient
from skerry.agent.guest import users
from skerry.agent.network import AgentNetwork
from skerry.config import Config
from skerry.errors import InvalidSpec, NotFound, SkerryError, WrongState
from skerry.gate.base import Policy
from skerry.gate.box import Box
from skerry.gate.ca import write_bundle
from skerry.gate.client import MAX_LINE, Answer, BoxNetwork, GateStatus, Request, Task
from skerry.gate.dialer import Dialer
from skerry.gate.journal import Journal, LogLine, Pulse, write_down
from skerry.gate.members import FleetMembers, reach_of
from skerry.gate.secrets import Vault, environment, seed_of
from skerry.gate.session import Session
from skerry.host import background, locks
from skerry.ledger.ledger import Ledger
from skerry.model.records import Record
from skerry.model.results import FileInfo
from skerry.model.rules import Rule, Rules
from skerry.model.spec import Network, SandboxId
from skerry.model.states import State
from skerry.providers.base import Provider
from skerry.store import Store

if TYPE_CHECKING:
    from skerry.gate.opener import TlsOpener

LINGER_S = 60.0
"""Seconds for which it stays when nothing needs it any more."""
_TICK_S = 2.0
_LIST_S = 30.0
"""Seconds between two looks at all records, where no event says that one has changed."""
_LATE_S = 30.0
"""How long after its lifetime a sandbox has ended, whatever the registry says: nobody may have looked."""
_LINE_S = 10.0
_MOST_CLIENTS = 512
_PARTING_S = 5.0
_PULSE_S = 1.0
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_AT_REST = frozenset({State.PAUSED, State.ASLEEP, State.STOPPED, State.LOST})
_log = logging.getLogger("skerry.gate")


class Gate:
    """Boxes of all sandboxes with rules, and the answers to managers."""

    def __init__(self, config: Config, store: Store, *, linger_s: float = LINGER_S) -> None:
        self._config = config
        self._store = store
        self._linger_s = linger_s
        self._boxes: dict[SandboxId, Box] = {}
        self._provided: dict[SandboxId, set[str]] = {}
        """Names of the secrets that managers have given values for."""
        self._providers: dict[bytes, Provider] = {}
        """By name and settings: those of before may still serve boxes."""
        self._dialer = Dialer()
        self._ledger = Ledger.of(config)
        self._folder = Path(config.state_dir) / "gate"
        self._vault = Vault(self._folder)
        self._openers: dict[str | None, TlsOpener] = {}
        """What opens TLS for hosts of secrets, by the certificates that it trusts."""
        self._members = FleetMembers(store, self._provider)
        self._changing: WeakValueDictionary[SandboxId, asyncio.Lock] = WeakValueDictionary()
        """A box is taken up, changed and ended by one at a time: by a manager's word, or by a look at the registry."""
        self._clients: set[asyncio.Task[None]] = set()
        self._journal = Journal()
        self._over = asyncio.Event()
        self._started_at = time.time()
        self._needed_at = time.monotonic()
        self._is_stale = True
        self._last_event = -1
        self._listed_at = 0.0
        self._error = ""

    async def serve(self, listener: socket.socket, note: Path, lock_fd: int) -> None:
        """Serve until nobody needs it, it is told to end, or its note is gone."""
        for number in _ENDING:
            asyncio.get_running_loop().add_signal_handler(number, self._over.set)
        self._ledger.note("gate", event="start", pid=os.getpid())
        self._journal.begin()
        server = await asyncio.start_unix_server(self._accept, sock=listener, limit=MAX_LINE)
        try:
            while not self._over.is_set() and locks.is_in_place(lock_fd, note) and await self._is_needed():
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(_TICK_S, self._linger_s)):
                        await self._over.wait()
        finally:
            self._ledger.note("gate", event="end", pid=os.getpid())
            server.close()  # who asks from now on finds nobody, and starts another gate
            for number in _ENDING:
                asyncio.get_running_loop().remove_signal_handler(number)
            await self._end()
            self._journal.end()

    async def _end(self) -> None:
        for client in self._clients:
            client.cancel()
        if self._clients:
            await asyncio.wait(self._clients, timeout=_PARTING_S)
        await asyncio.gather(*(box.end() for box in self._boxes.values()))
        self._members.close()
        for provider in self._providers.values():
            await provider.aclose()

    # the registry

    async def _is_needed(self) -> bool:
        """Follow the registry; whether anything was to do within the last while. What fails is retried."""
        try:
            await self._follow()
        except (SkerryError, OSError) as error:
            self._note_error("the registry cannot be read", error)
        if self._clients or any(not box.is_gone for box in self._boxes.values()):
            self._needed_at = time.monotonic()
        return time.monotonic() - self._needed_at < self._linger_s

    async def _follow(self) -> None:
        last_event = await self._store.last_event()
        is_new = last_event != self._last_event or self._is_stale
        if not is_new and time.monotonic() - self._listed_at < _LIST_S:
            return
        self._is_stale = False
        records = {record.id: record for record in await self._store.list() if self._why_not(record) is None}
        self._last_event, self._listed_at = last_event, time.monotonic()
        ended = (self._follow_end(id) for id in self._boxes if id not in records)
        await asyncio.gather(*ended, *map(self._follow_one, records.values()))

    async def _follow_end(self, id: SandboxId) -> None:
        """Drop a sandbox that was not among those listed, unless it is newer than the list."""
        async with self._turn(id):
            try:
                is_ours = self._why_not(await self._store.get(id)) is None
            except NotFound:
                is_ours = False
            if not is_ours:
                await self._drop(id)

    async def _follow_one(self, record: Record) -> None:
        try:
            async with self._turn(record.id):
                await self._take_up(record)
        except (SkerryError, OSError) as error:
            self._note_error(f"sandbox {record.id} has no network", error)

    def _turn(self, id: SandboxId) -> asyncio.Lock:
        return self._changing.setdefault(id, asyncio.Lock())

    async def _take_up(self, record: Record) -> None:
        """Have a box as its record says, unless a manager told us of a newer one: what that denies stays denied."""
        box = self._boxes.get(record.id)
        if record.version < (0 if box is None else box.version):
            return
        if box is None and record.state is State.CREATING:
            return  # its maker tells when there is a box
        policy = self._policy(record)
        box = box or await self._open(record, policy)
        if policy != box.policy:
            await box.change(policy)
        if record.version != box.version:
            box.version = record.version
            box.hurry()
        if record.state is State.READY:
            box.start()
        elif record.state in _AT_REST and not box.is_up and not box.is_awaited:
            await box.end()

    def _why_not(self, record: Record) -> str | None:
        """Why a sandbox is not for this gate; None if it is."""
        if record.spec.network is not Network.RULES:
            return "it was not made with network='rules'"
        if record.doomed or not record.is_live or record.is_over(self._store.now(), _LATE_S):
            return "it has ended"
        if record.owner.host.partition("/")[0] != clock.machine_id():
            return "it is on another machine"
        return None

    def _policy(self, record: Record) -> Policy:
        """All that decides what a sandbox may reach. Rules that cannot be understood allow nothing."""
        spec, known = record.spec, self._config.network
        try:
            rules = Rules.of(spec.allow, spec.deny, known.sets)
            of_secrets = (Rule.parse(host) for secret in spec.secrets.values() for host in secret.hosts)
            rules = msgspec.structs.replace(rules, allow=(*rules.allow, *of_secrets))
        except InvalidSpec as error:
            self._note_error(f"the rules of sandbox {record.id} allow nothing", error)
            rules = Rules()
        return Policy(
            id=record.id,
            rules=rules,
            hosts=known.hosts,
            reach=reach_of(record),
            secrets=spec.secrets,
            labels=spec.labels,
            egress=spec.egress,
        )

    # boxes

    async def _open(self, record: Record, policy: Policy) -> Box:
        box = Box(policy, await self._provider(record.spec.provider), self._begin)
        self._boxes[record.id] = box
        _log.info("sandbox %s has the gate", record.id)
        return box

    async def _begin(self, policy: Policy, client: AgentClient) -> Session:
        """Tell a box what it has for its secrets, and bring its network up."""
        opener = None
        if policy.secrets:
            opener = await self._opener()
            await self._tell_secrets(policy, client)
        network = await AgentNetwork.open(client)
        return Session(
            network, policy, dialer=self._dialer, recorder=self._ledger, opener=opener, members=self._members
        )

    async def _opener(self) -> TlsOpener:
        ca = self._config.network.ca
        if ca not in self._openers:
            from skerry.gate.opener import TlsOpener  # most gates need none, and run without what it takes

            made = await asyncio.to_thread(TlsOpener, self._folder, self._vault, ca=ca)
            self._openers.setdefault(ca, made)  # another may have been quicker
        return self._openers[ca]

    async def _tell_secrets(self, policy: Policy, client: AgentClient) -> None:
        """Give a box its placeholders and the certificates that it trusts. Variables that its spec has stay. Where its
        home is the box itself says, so nobody vouches for variables that name it."""
        home = (await client.call("stat", {"path": "~"}, type=FileInfo)).path
        env = environment(policy.secrets, seed_of(self._folder, policy.id), home)
        given = (await self._store.get(policy.id)).spec.env
        env = {name: value for name, value in env.items() if name not in given}
        await write_bundle(client, home, self._folder)
        await self._store.note_env(policy.id, {name: env[name] for name in policy.secrets if name in env})
        await client.call("set_env", {"env": env}, type=dict[str, Any])

    async def _drop(self, id: SandboxId) -> None:
        box = self._boxes.pop(id, None)
        self._vault.forget(id)
        self._provided.pop(id, None)
        if box is not None:
            await box.end()
            _log.info("sandbox %s is forgotten", id)

    async def _provider(self, name: str) -> Provider:
        config = self._config
        key = msgspec.json.encode((name, config.providers.get(name)))
        if key not in self._providers:
            await asyncio.to_thread(providers.provider_class, name)  # what it imports is imported in a thread
        if key not in self._providers:  # another may have waited for the same
            self._providers[key] = config.load_provider(name)
        return self._providers[key]

    def _note_error(self, what: str, error: Exception) -> None:
        self._error = f"{what}: {str(error) or type(error).__name__}"
        _log.warning("%s", self._error)

    # managers

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            if len(self._clients) >= _MOST_CLIENTS or not _is_ours(writer):
                return
            self._clients.add(task)
            while line := await self._read(reader):
                answer = await self._answer(line)
                await _send(writer, answer)
                if answer.pulse is not None:
                    await self._tell(writer)
        except (OSError, ValueError) as error:  # it left, sends nothing, or what is no line
            _log.debug("a manager is not answered: %s", error)
        finally:
            self._clients.discard(task)
            writer.close()

    async def _tell(self, writer: asyncio.StreamWriter) -> None:
        """Tell how it is, until nobody listens any more; that long it is needed."""
        with self._journal.read() as lines:
            while True:
                await _send(writer, Answer(pulse=self._pulse(lines)))
                await asyncio.sleep(_PULSE_S)

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        async with asyncio.timeout(_LINE_S):
            line = await reader.readline()
        return line if line.endswith(b"\n") else b""

    async def _answer(self, line: bytes) -> Answer:
        """Do what a line asks. Nothing of it may be told to anybody: it may hold secrets."""
        try:
            request = msgspec.json.decode(line, type=Request)
        except (msgspec.DecodeError, InvalidSpec):
            return Answer(error="this is no request: look, forget, status, follow or retire")
        try:
            if request.look is not None:
                await self._look(request.look, request)
            if request.forget is not None:
                async with self._turn(request.forget):
                    await self._drop(request.forget)
            if request.retire:
                self._retire()
            return Answer(
                status=self._status() if request.status else None,
                pulse=self._pulse(deque()) if request.follow else None,
            )
        except (SkerryError, OSError) as error:
            return Answer(error=str(error) or type(error).__name__)
        except Exception as error:
            _log.exception("a manager could not be answered")
            return Answer(error=f"{type(error).__name__}; this is a bug")

    async def _look(self, id: SandboxId, request: Request) -> None:
        """Follow the registry for one sandbox, and wait until its network is up. Raises SkerryError."""
        if request.config is not None:
            self._take_settings(request.config)
        async with self._turn(id):
            record = request.record if id not in self._boxes else None  # if it is, somebody has told of a newer one
            record = record or await self._store.get(id)
            if (why := self._why_not(record)) is not None:
                await self._drop(id)
                raise WrongState(why)
            self._provide(id, request)
            policy = self._policy(record)
            box = self._boxes.get(id) or await self._open(record, policy)
            box.provider = await self._provider(record.spec.provider)
            box.version = record.version
            await box.change(policy)
            if request.fresh:
                await box.end()
            is_started = request.fresh or record.state not in _AT_REST  # the registry hears of a start after us
            if is_started:
                box.hurry()
                box.start()
        if is_started:
            await box.wait_until_up()

    def _take_settings(self, told: Config) -> None:
        """Take settings over that have changed since we were started."""
        known = self._config.providers
        changed = {name: each for name, each in told.providers.items() if known.get(name) != each}
        if told.network == self._config.network and not changed:
            return
        self._config = msgspec.structs.replace(self._config, network=told.network, providers={**known, **changed})
        self._is_stale = True

    def _provide(self, id: SandboxId, request: Request) -> None:
        """Take values of secrets; those that are only offered if there are none."""
        known = self._provided.setdefault(id, set())
        values = {name: each for name, each in request.secrets.items() if not (request.offers and name in known)}
        if values:
            known.update(values)
            self._vault.provide(id, values)
            self._ledger.note("secret", id, provided=sorted(values))

    def _retire(self) -> None:
        """End, if there is no sandbox for us. Raises WrongState."""
        if served := sum(not box.is_gone for box in self._boxes.values()):
            raise WrongState(f"{served} sandboxes have rules")
        self._over.set()

    def _pulse(self, lines: deque[LogLine]) -> Pulse:
        """How we are, with lines of the log, which are taken out."""
        boxes, taken = self._boxes.values(), [*lines]
        lines.clear()
        return Pulse(
            pid=os.getpid(),
            sandboxes=len(boxes),
            up=sum(box.is_up for box in boxes),
            connections=sum(box.connections for box in boxes),
            log=taken,
        )

    def _status(self) -> GateStatus:
        boxes: Sequence[BoxNetwork] = [
            BoxNetwork(id=id, up=box.is_up, connections=box.connections, error=box.error)
            for id, box in self._boxes.items()
        ]
        return GateStatus(pid=os.getpid(), started_at=self._started_at, boxes=[*boxes], error=self._error)


async def _send(writer: asyncio.StreamWriter, answer: Answer) -> None:
    writer.write(msgspec.json.encode(answer) + b"\n")
    async with asyncio.timeout(_LINE_S):
        await writer.drain()


def _is_ours(writer: asyncio.StreamWriter) -> bool:
    """Whether whoever connected is of our user, or root."""
    if sys.platform == "darwin":
        return True  # the folder of the socket is our user's alone
    found = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", found)
    return uid in (0, os.geteuid())


def run(text: bytes) -> None:
    """Be the gate that a task describes, to its end."""
    users.allow_many_files()
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))  # it has values of secrets, and 0 is no bound for a pipe
    task = msgspec.json.decode(text, type=Task)
    task = msgspec.structs.replace(task, config=msgspec.structs.replace(task.config, tool="gate"))
    note = Path(task.note)
    with background.holding(note, task.lock_fd):
        error = note.with_name("error")
        try:
            error.unlink(missing_ok=True)
            asyncio.run(_serve(task, note))
        except BaseException as failure:
            write_down(failure, error)
            raise
        finally:
            if locks.is_in_place(task.lock_fd, note):
                note.with_name("control").unlink(missing_ok=True)


async def _serve(task: Task, note: Path) -> None:
    os.set_inheritable(task.listen_fd, False)
    listener = socket.socket(fileno=task.listen_fd)
    store = await Store.open(task.config.database)
    try:
        await Gate(task.config, store).serve(listener, note, task.lock_fd)
    finally:
        await store.aclose()
