"""What an Incus left on this machine when nobody ended it: monitors, containers, its bridge and its firewall rules."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

_PROGRAMS = ("incusd", "dnsmasq")
_LEAST_NAME = 36
"""Shorter names of containers than our boxes have may be those of another daemon's too."""


def bridge_of(folder: Path) -> str:
    """Found from the folder alone, as there may be nobody left to ask."""
    return f"sk{folder.name.rpartition('-')[2]}"[:15]


def switch_of(folder: Path) -> str:
    """The namespace of the wires of the cluster whose first member this is."""
    return f"{bridge_of(folder)}-sw"


def is_process(pid: int, folder: Path, read: Callable[[int, str], str]) -> bool:
    """Whether it is a program of the daemon in this folder, or runs in one of its containers."""
    words = read(pid, "cmdline").split("\0")
    if words[0].startswith(f"[lxc monitor] {folder}/"):
        return True
    if Path(words[0]).name in _PROGRAMS and f"INCUS_DIR={folder}" in read(pid, "environ").split("\0"):
        return True
    fields = read(pid, "stat").rpartition(")")[2].split()
    if fields[:1] in (["Z"], []):
        return False
    return _is_contained(read(pid, "cgroup"), folder) or read(int(fields[1]), "cmdline").startswith(
        f"[lxc monitor] {folder}/"
    )


def _is_contained(groups: str, folder: Path) -> bool:
    return any(f"/lxc.payload.{name}" in groups for name in container_names(folder))


def container_names(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("containers/*") if len(path.name) >= _LEAST_NAME]


def remove_network(folder: Path) -> None:
    """The bridges, the rules that name them, and the namespaces of a cluster's member."""
    for path in Path("/sys/class/net").glob(f"{bridge_of(folder)}*"):
        _remove_bridge(path.name)
    for name in (bridge_of(folder), switch_of(folder)):
        if Path("/run/netns", name).exists():
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=10)


def _remove_bridge(bridge: str) -> None:
    subprocess.run(["ip", "link", "delete", bridge], check=False, capture_output=True, timeout=10)
    shown = subprocess.run(["nft", "-j", "list", "chains"], check=False, capture_output=True, timeout=10)
    chains = [each["chain"] for each in json.loads(shown.stdout or "{}").get("nftables", []) if "chain" in each]
    for chain in chains:
        if chain["table"] == "incus" and chain["name"].endswith(f".{bridge}"):
            words = ["nft", "delete", "chain", chain["family"], chain["table"], chain["name"]]
            subprocess.run(words, check=False, capture_output=True, timeout=10)
