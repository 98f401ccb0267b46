"""An Incus of the tests' own: one daemon in a folder of its own, with a pool, a bridge and a small image."""

from __future__ import annotations

import ipaddress
import os
import subprocess
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from typing import Any

from .api import Refused, ask_json
from .daemons import Daemon, NotStartable
from .images import busybox
from .incus_leftovers import bridge_of

IMAGE = "busybox"
"""The alias of the image that every one of them has."""
POOL, BTRFS = "default", "quotas"
"""A pool that holds no limits, and one that does, where this machine can have it."""
INCUSD = "/usr/libexec/incus/incusd"
_OPERATION_S = 60
_TRIES = 5
_LINK_WENT = "ip -d -j link show"


class Incusd(Daemon):
    name = "incus"
    programs: tuple[str, ...] = ("incus", "dnsmasq", "nft", INCUSD)

    @property
    def address(self) -> str:
        return f"unix://{self.folder}/unix.socket"

    @property
    def bridge(self) -> str:
        return bridge_of(self.folder)

    def start(self) -> None:
        argv = [INCUSD, "--group", "root"]
        self._process = self._run("incus", argv, {"INCUS_DIR": str(self.folder), "PWD": "/"})
        self._await_answer("/1.0")
        if not self.ask("GET", "/1.0/storage-pools"):
            self._fill()

    def _fill(self) -> None:
        self.ask("POST", "/1.0/storage-pools", {"name": POOL, "driver": "dir"})
        config = {"ipv4.address": str(free_subnet()), "ipv4.nat": "true", "ipv6.address": "none"}
        self.ask("POST", "/1.0/networks", {"name": self.bridge, "type": "bridge", "config": config})
        root = {"type": "disk", "path": "/", "pool": POOL}
        self.ask("PUT", "/1.0/profiles/default", {"config": {}, "devices": {"root": root}})
        fingerprint = self.wait_for(ask_json(self.address, "POST", "/1.0/images", body=image()))["metadata"][
            "fingerprint"
        ]
        self.ask("POST", "/1.0/images/aliases", {"name": IMAGE, "target": fingerprint})

    def add_pool_with_quotas(self, name: str = BTRFS) -> str:
        """A pool on a btrfs of its own."""
        try:
            config = {"size": "1GiB"}
            self.ask("POST", "/1.0/storage-pools", {"name": name, "driver": "btrfs", "config": config})
        except Refused as error:
            if "already exists" not in str(error):
                raise NotStartable(f"no btrfs here: {error}") from error
        return name

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """What it answers, in the end: whatever it began is waited for. Where it looks at every link of the host it
        fails if one goes meanwhile, such as another engine's, and undoes what it did."""
        for _ in range(_TRIES):
            try:
                return self.wait_for(ask_json(self.address, method, path, json_body=body))
            except Refused as error:
                if _LINK_WENT not in str(error):
                    raise
                refused = error
        raise refused

    def wait_for(self, answer: Any) -> Any:
        if answer["type"] != "async":
            return answer["metadata"]
        path = f"/1.0/operations/{answer['metadata']['id']}/wait"
        ended = ask_json(self.address, "GET", path, {"timeout": str(_OPERATION_S)}, timeout_s=_OPERATION_S + 5)
        if ended["type"] == "error":
            raise Refused(ended["error_code"], ended["error"])
        if ended["metadata"]["status_code"] != 200:
            raise Refused(ended["metadata"]["status_code"], ended["metadata"]["err"])
        return ended["metadata"]

    def _empty(self) -> None:
        """Only the daemon takes its rules out of the firewall."""
        with suppress(OSError, Refused):
            for instance in self.ask("GET", "/1.0/instances?recursion=1&all-projects=true"):
                at = f"/1.0/instances/{instance['name']}"
                where = f"?project={instance['project']}"
                with suppress(Refused):
                    self.ask("PUT", f"{at}/state{where}", {"action": "stop", "force": True, "timeout": 10})
                with suppress(Refused):
                    self.ask("DELETE", f"{at}{where}")
            self.ask("DELETE", f"/1.0/networks/{self.bridge}")


@contextmanager
def running_incus() -> Iterator[Incusd]:
    daemon = Incusd()
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.stop()


def free_subnet() -> ipaddress.IPv4Interface:
    """The first address of a network that no other of this machine meets."""
    shown = subprocess.run(["ip", "-4", "-o", "address"], capture_output=True, text=True, check=True, timeout=10)
    taken = [ipaddress.ip_interface(line.split()[3]).network for line in shown.stdout.splitlines()]
    for number in range(256):
        wanted = ipaddress.IPv4Interface(f"10.{64 + (os.getpid() + number) % 128}.{number}.1/24")
        if not any(wanted.network.overlaps(each) for each in taken):
            return wanted
    raise NotStartable("every network of 10.0.0.0/8 that was tried is taken")


def image(name: str = IMAGE) -> bytes:
    """A unified image: a shell with its usual programs and users, and an init of its own. Those of different names are
    different images."""
    made = BytesIO()
    about = f"architecture: {os.uname().machine}\ncreation_date: {int(time.time())}\nproperties: {{os: {name}}}\n"
    with busybox() as root, tarfile.open(fileobj=root) as source, tarfile.open(fileobj=made, mode="w") as target:
        _add(target, "metadata.yaml", about.encode())
        for member in source:
            content = source.extractfile(member) if member.isreg() else None
            member.name = f"rootfs/{member.name}"
            target.addfile(member, content)
        for folder in ("proc", "sys", "dev", "run", "tmp", "root", "sbin"):
            entry = tarfile.TarInfo(f"rootfs/{folder}")
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            target.addfile(entry)
        _add(
            target,
            "rootfs/sbin/init",
            b"#!/bin/sh\ntrap 'exit 0' TERM PWR\nwhile :; do sleep 3600 & wait; done\n",
            0o755,
        )
    return made.getvalue()


def _add(tar: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    tar.addfile(entry, BytesIO(content))
