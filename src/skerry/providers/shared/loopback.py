"""Loopback of a box whose only way out is the gate (`Network.RULES`). It has the walls of a box without a network, and
is prepared for the agent: who is not root can listen on any port, and programs ask a resolver at 127.0.0.1."""

from __future__ import annotations

from skerry.agent.client import CONTROL_TIMEOUT_S, AgentClient
from skerry.errors import CreateFailed, FileError
from skerry.model.spec import Network, Spec

BY_RULES = "a network namespace of its own, with loopback only; the gate lets through what its rules allow"
RESOLVER = "127.0.0.1"
RESOLV_CONF = "/etc/resolv.conf"
RESOLV_CONF_TEXT = f"nameserver {RESOLVER}\n"
"""What a C library without any such file does too, and what programs read that have no C library."""
LOW_PORTS = "net.ipv4.ip_unprivileged_port_start"
"""Setting of a network namespace: the first port that takes no privilege."""
LOW_PORTS_FILE = f"/proc/sys/{LOW_PORTS.replace('.', '/')}"
_MAX_BYTES = 4096


async def check(client: AgentClient, spec: Spec) -> None:
    """Read back, as the box's user sees it, that a box with rules is prepared. Raises CreateFailed if it is not."""
    if spec.network is not Network.RULES:
        return
    first = await _read(client, LOW_PORTS_FILE)
    if first.strip() not in ("0", ""):  # gVisor has no such setting, and lets everybody have any port
        raise CreateFailed(f"the box cannot have rules: {LOW_PORTS} is {first.strip()[:20]!r} in it, and not 0")
    lines = [line.split() for line in (await _read(client, RESOLV_CONF)).splitlines()]
    servers = {words[1] for words in lines if len(words) > 1 and words[0] == "nameserver"}
    if servers - {RESOLVER}:
        reason = f"its {RESOLV_CONF} names other servers than {RESOLVER}; make it a file, or no file at all"
        raise CreateFailed(f"the box cannot have rules: {reason}")


async def _read(client: AgentClient, path: str) -> str:
    """Read a small file of the box; one that is not there, or not for its user to read, is empty."""
    call = client.open("read_file", {"path": path, "length": _MAX_BYTES}).within(CONTROL_TIMEOUT_S)
    try:
        return b"".join([data async for _, data in call.chunks()]).decode(errors="replace")
    except FileError:
        return ""
    finally:
        call.abandon()
