"""An Incus cluster of the tests' own: three members, each in a network namespace, on a wire that the host is on too."""

from __future__ import annotations

import base64
import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from ipaddress import IPv4Address, IPv4Interface
from typing import Any

from .api import Refused, ask_json
from .daemons import NotStartable
from .incus_leftovers import bridge_of, switch_of
from .incusd import IMAGE, INCUSD, POOL, Incusd, free_subnet, image

NETWORK = "boxes"
"""The bridge that every member has, for its own containers."""
_SUBNET = "10.63.0.1/24"
"""Of that bridge. Each is in a namespace, so that all of them may have the same."""
_PORT = 8443
_OFFLINE_S = 11
"""How long a silent member counts as online: the least that Incus takes."""
_SEEN_S = 60.0
_WIRE = "eth0"

# The daemon looks for devices in /sys, which has to be that of its own namespace, and for cgroups below it.
_MEMBER = """
mkdir -p "$1/cgroup" && mount --rbind /sys/fs/cgroup "$1/cgroup" && mount -t sysfs sysfs /sys \
&& mount --rbind "$1/cgroup" /sys/fs/cgroup && cd / && exec "$2" --group root
"""


class Member(Incusd):
    """One daemon of the cluster, in a folder and a namespace of its own."""

    programs = (*Incusd.programs, "ip", "nsenter", "unshare")

    def __init__(self, number: int, ip: IPv4Address) -> None:
        super().__init__()
        self.member = f"n{number}"
        self.ip = ip

    @property
    def namespace(self) -> str:
        return bridge_of(self.folder)

    @property
    def bridge(self) -> str:
        return NETWORK

    @property
    def endpoint(self) -> str:
        return f"{self.ip}:{_PORT}"

    @property
    def https(self) -> str:
        return f"https://{self.endpoint}"

    def start(self) -> None:
        self.begin()
        self._await_answer("/1.0")

    def begin(self) -> None:
        enter = ["nsenter", f"--net=/run/netns/{self.namespace}", "unshare", "--mount", "--propagation", "slave"]
        argv = [*enter, "sh", "-c", _MEMBER, "sh", str(self.folder), INCUSD]
        self._process = self._run("incus", argv, {"INCUS_DIR": str(self.folder), "PWD": "/"})

    def _empty(self) -> None:
        """All that there is goes with its processes, its folder and its namespace."""

    def _end_daemons(self) -> None:
        self.kill()  # in peace they would wait for each other


class Cluster:
    """Its members by name: n1, n2 and n3. n1 is the one to ask while others are away."""

    def __init__(self, members: list[Member], subnet: IPv4Interface) -> None:
        self.members = {each.member: each for each in members}
        self._first, *self._others = members
        self._subnet = subnet

    @property
    def address(self) -> str:
        return self._first.address

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        return self._first.ask(method, path, body)

    def start_all(self) -> None:
        try:
            self._connect()
        except RuntimeError as error:
            raise NotStartable(f"no networks for a cluster here: {error}") from error
        for each in self.members.values():
            each.begin()
        for each in self.members.values():
            each._await_answer("/1.0")
        self._found()
        for each in self._others:
            self._join(each)
        self.ask("PATCH", "/1.0", {"config": {"cluster.offline_threshold": str(_OFFLINE_S)}})
        made = self._first.wait_for(ask_json(self.address, "POST", "/1.0/images", body=image()))
        self.ask("POST", "/1.0/images/aliases", {"name": IMAGE, "target": made["metadata"]["fingerprint"]})

    def _connect(self) -> None:
        """A switch in a namespace of its own, where no firewall of the host looks at what passes."""
        switch, host = switch_of(self._first.folder), bridge_of(self._first.folder)
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for each in self.members.values():
            _ip("netns", "add", each.namespace)
            _ip("-n", each.namespace, "link", "set", "lo", "up")
            _plug(switch, each.member, _WIRE, each.namespace, self._on_wire(each.ip))
        _plug(switch, "host", host, None, self._on_wire(self._subnet.network.broadcast_address - 1))

    def _on_wire(self, ip: IPv4Address) -> str:
        return f"{ip}/{self._subnet.network.prefixlen}"

    def _found(self) -> None:
        self.ask("PATCH", "/1.0", {"config": {"core.https_address": self._first.endpoint}})
        self.ask("POST", "/1.0/storage-pools", {"name": POOL, "driver": "dir"})
        config = {"ipv4.address": _SUBNET, "ipv4.nat": "true", "ipv6.address": "none"}
        self.ask("POST", "/1.0/networks", {"name": NETWORK, "type": "bridge", "config": config})
        root = {"type": "disk", "path": "/", "pool": POOL}
        self.ask("PUT", "/1.0/profiles/default", {"config": {}, "devices": {"root": root}})
        self.ask("PUT", "/1.0/cluster", {"server_name": self._first.member, "enabled": True})

    def _join(self, member: Member) -> None:
        answer = ask_json(self.address, "POST", "/1.0/cluster/members", json_body={"server_name": member.member})
        invited = answer["metadata"]["metadata"]
        token = {
            "server_name": invited["serverName"],
            "fingerprint": invited["fingerprint"],
            "addresses": invited["addresses"],
            "secret": invited["secret"],
            "expires_at": invited["expiresAt"],
        }
        wanted = {
            "server_name": member.member,
            "enabled": True,
            "server_address": member.endpoint,
            "cluster_address": self._first.endpoint,
            "cluster_certificate": (self._first.folder / "cluster.crt").read_text(),
            "cluster_token": base64.b64encode(json.dumps(token).encode()).decode(),
        }
        member.ask("PUT", "/1.0/cluster", wanted)

    def kill(self, member: str) -> None:
        """SIGKILL to its daemon alone: its containers live on."""
        self.members[member].kill()

    def start(self, member: str) -> None:
        self.members[member].start()

    def cut_off(self, member: str) -> None:
        """Pull its plug: it runs on, and nobody hears of it."""
        _ip("-n", self.members[member].namespace, "link", "set", _WIRE, "down")

    def join_again(self, member: str) -> None:
        _ip("-n", self.members[member].namespace, "link", "set", _WIRE, "up")

    def await_seen(self, member: str, *, online: bool) -> None:
        """Until the others know that it has gone, or it and they can be asked through each other again."""
        deadline = time.monotonic() + _SEEN_S
        while not (self._is_whole(member) if online else self._status(member) == "Offline"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{member} is not {'online' if online else 'offline'} within {_SEEN_S:g} s")
            time.sleep(0.2)

    def _status(self, member: str) -> str:
        """What n1 thinks of it."""
        status: str = self.ask("GET", f"/1.0/cluster/members/{member}")["status"]
        return status

    def _is_whole(self, member: str) -> bool:
        """A member that is called online may not yet be ready for others."""
        pairs = [(each, member) for each in self.members] + [(member, each) for each in self.members]
        try:
            for asked, of in pairs:
                self.members[asked].ask("GET", f"/1.0/cluster/members/{of}/state")
        except (OSError, Refused):
            return False
        return self._status(member) == "Online"


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    with ExitStack() as stack:
        subnet = free_subnet()
        members = []
        for number in (1, 2, 3):
            members.append(Member(number, subnet.ip + number - 1))
            stack.callback(members[-1].stop)
        cluster = Cluster(members, subnet)
        cluster.start_all()
        yield cluster


def _plug(switch: str, port: str, name: str, namespace: str | None, address: str) -> None:
    """A wire from the switch to an interface with that name and address, in that namespace or on the host."""
    inside, there = (["-n", namespace], ["netns", namespace]) if namespace else ([], [])
    _ip("link", "add", name, *there, "type", "veth", "peer", "name", port, "netns", switch)
    _ip("-n", switch, "link", "set", port, "master", "switch", "up")
    _ip(*inside, "address", "add", address, "dev", name)
    _ip(*inside, "link", "set", name, "up")


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True, timeout=10)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
