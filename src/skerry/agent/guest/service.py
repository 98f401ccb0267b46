"""The service of a box: one command that the agent keeps running, its last output, and the calls about it."""

from __future__ import annotations

from .channel import Call, Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .agent import Agent
    from .process import Process

KEPT_OUTPUT = 1 << 20
_MAX_PIECES = 4096
_PIECE = 1 << 12
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 30.0
_STEADY_S = 10.0  # who ran so long did start, and is restarted at once the next time
_MAX_RESTARTS = 10  # in a row, without one that ran so long
_CLEAN_SIGNALS = (1, 2, 13, 15)  # who is told to end and ends has not failed, as with systemd
_CANNOT_RUN = 126
_LISTENING = "0A"
_MOST_PORTS = 4096
RESTART = ("no", "on-failure", "always")
RUNNING, WAITING, EXITED, FAILED = "running", "waiting", "exited", "failed"
TAG = "service"


class ServiceLog:
    """Last output of a service, over its restarts, and calls that read it. The service waits for none of them: one that
    reads too slowly misses what is dropped meanwhile."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, int, bytearray]] = []  # offset of its first byte, descriptor, bytes
        self._end = 0
        self._readers: list[Call] = []
        self._is_over = False

    def add(self, number: int, data: bytes) -> None:
        last = self._pieces[-1] if self._pieces else None
        if last is not None and last[1] == number and len(last[2]) < _PIECE:
            last[2].extend(data)
        else:
            self._pieces.append((self._end, number, bytearray(data)))
        self._end += len(data)
        while len(self._pieces) > 1 and (
            self._end - self._pieces[1][0] >= KEPT_OUTPUT or len(self._pieces) > _MAX_PIECES
        ):
            del self._pieces[0]
        self._pump()

    def end(self) -> None:
        """Tell all readers that nothing more will come."""
        self._is_over = True
        self._pump()

    def _pump(self) -> None:
        for call in list(self._readers):
            if call.pump is not None:
                call.pump()

    def read(self, call: Call, follow: bool) -> None:
        """Send what is kept to the call, and with `follow` all that comes."""
        at, until = 0, None if follow else self._end

        def pump() -> None:
            nonlocal at
            at = self._send(call, at)
            if (self._is_over or until is not None) and at >= (self._end if until is None else until):
                leave()
                call.answer({})

        def leave() -> None:
            if call in self._readers:
                self._readers.remove(call)

        def cancel() -> None:
            leave()
            call.fail(Failure("cancelled", "nobody reads the log any more"))

        call.pump, call.on_cancel, call.on_close = pump, cancel, leave
        self._readers.append(call)
        pump()

    def _send(self, call: Call, at: int) -> int:
        """Send from an offset on as much as the call has room for; returns the offset of what is next."""
        index = len(self._pieces)
        while index and self._pieces[index - 1][0] + len(self._pieces[index - 1][2]) > at:
            index -= 1
        for start, number, data in self._pieces[index:]:
            at = max(at, start)
            while at < start + len(data):
                room = call.room()
                if room <= 0:
                    return at
                part = bytes(data[at - start : at - start + room])
                call.send(part, number)
                at += len(part)
        return at


class Service:
    """Command that is started again when it ends, as its restart policy says. One that never runs for long is given up
    after some restarts, each later than the one before."""

    def __init__(self, agent: Agent, params: dict[str, Any], restart: str, ports: list[int]) -> None:
        self._agent = agent
        self._params = params
        self._restart = restart
        self._ports = ports
        self._process: Process | None = None
        self._exit: tuple[int | None, int | None] = None, None
        self._restarts = self._in_a_row = 0
        self._is_ending = False
        self._state = WAITING
        self._started = 0.0
        self.log = ServiceLog()
        self._start()

    @property
    def is_kept_up(self) -> bool:
        """Whether it runs, or will again."""
        return self._state in (RUNNING, WAITING)

    def stop_restarting(self) -> None:
        """Let its next end be its last: the box is to end."""
        self._is_ending = True

    def go_on(self) -> None:
        """Start it again if it would have been before: the box has not ended after all."""
        self._is_ending = False
        if self._state == WAITING and self._process is None:
            self._start_again()

    def _start(self) -> None:
        if self._is_ending:
            return
        self._state, self._begin, self._started = RUNNING, self._agent.loop.now(), self._agent.loop.wall_clock()
        try:
            request = self._agent.request({**self._params, "background": True, "tag": TAG})
            request.on_output = self.log.add
            request.clean_up = self._on_end
            self._process = self._agent.processes.start(request)
        except Failure as failure:  # its folder is gone, or there is no room for one more process
            self.log.add(2, f"skerry: {failure}\n".encode("utf-8", "surrogateescape"))
            self._end(_CANNOT_RUN, None)

    def _on_end(self) -> None:
        process, self._process = self._process, None
        assert process is not None
        self._agent.processes.forget(process)
        self._end(process.exit_code, process.signal)

    def _end(self, code: int | None, signal: int | None) -> None:
        loop = self._agent.loop
        self._exit = code, signal
        is_clean = code == 0 if signal is None else signal in _CLEAN_SIGNALS
        if self._is_ending and self._restart != "no":
            self._state = WAITING
            return
        if self._restart == "no" or (self._restart == "on-failure" and is_clean):
            self._rest(EXITED)
            return
        self._in_a_row = 0 if loop.now() - self._begin >= _STEADY_S else self._in_a_row
        if self._in_a_row >= _MAX_RESTARTS:
            self.log.add(2, f"skerry: given up after {_MAX_RESTARTS} restarts in a row\n".encode())
            self._rest(FAILED)
            return
        self._state = WAITING
        delay_s = min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2**self._in_a_row)
        self._in_a_row += 1
        loop.later(delay_s, self._start_again)

    def _start_again(self) -> None:
        if not self._is_ending:
            self._restarts += 1
            self._start()

    def _rest(self, state: str) -> None:
        self._state = state
        self.log.end()

    def status(self) -> dict[str, Any]:
        """Tell its state. It is healthy while it runs and somebody in the box listens on each port that it is for."""
        heard = self._agent.listening_ports() if self._ports else set()
        listening = None if heard is None else [port for port in self._ports if port in heard]
        is_running = self._state == RUNNING and self._process is not None
        return {
            "state": self._state,
            "healthy": is_running and listening in (None, self._ports),
            "process": self._process.number if self._process is not None else None,
            "pid": self._process.pid if self._process is not None else None,
            "restarts": self._restarts,
            "exit_code": self._exit[0],
            "signal": self._exit[1],
            "started": self._started,
            "listening": listening or [],
        }


def listening_ports() -> set[int] | None:
    """Ports that somebody in the box listens on; None if the kernel does not tell."""
    found = set()
    told = False
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(path, "rb") as file:
                lines = file.read().decode("ascii", "replace").splitlines()[1:]
        except OSError:
            continue
        told = True
        for fields in (line.split() for line in lines):
            if len(fields) > 3 and fields[3] == _LISTENING:
                found.add(int(fields[1].rpartition(":")[2], 16))
    return found if told else None


def serve(agent: Agent, call: Call) -> None:
    """Begin the service of the box, once: whoever asks again is told how it is."""
    if agent.service is None:
        params: dict[str, Any] = {key: call.params[key] for key in ("argv", "shell") if key in call.params}
        if call.params.get("image"):
            if not agent.image_command:
                raise Failure("invalid", "the image of this box names no command")
            params = {"argv": agent.image_command}
        restart, ports = call.params.get("restart", RESTART[0]), call.params.get("ports") or []
        if restart not in RESTART:
            raise Failure("invalid", f"restart is one of {', '.join(RESTART)}")
        if type(ports) is not list or not all(type(port) is int and 0 < port < 65536 for port in ports):
            raise Failure("invalid", "ports is a list of numbers from 1 to 65535")
        agent.request(params)  # raises for what is no command
        agent.service = Service(agent, params, restart, ports)
    call.answer({"service": agent.service.status()})


def service(agent: Agent, call: Call) -> None:
    told: dict[str, Any] = {"service": None if agent.service is None else agent.service.status()}
    if call.params.get("listening"):
        heard = agent.listening_ports()
        told["listening"] = None if heard is None else sorted(heard)[:_MOST_PORTS]
    call.answer(told)


def service_log(agent: Agent, call: Call) -> None:
    if agent.service is None:
        raise Failure("no_process", "this box has no service")
    agent.service.log.read(call, bool(call.params.get("follow")))
