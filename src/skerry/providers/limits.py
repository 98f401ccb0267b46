"""What a box gets, in bytes and counts."""

from __future__ import annotations

import msgspec

from skerry.spec import Spec

ULIMITS = {"core": 0, "nofile": 1024, "memlock": 64 * 1024, "msgqueue": 0, "rtprio": 0, "nice": 0}
"""What each process of a box may have at most."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    memory: int
    pids: int
    cpus: float | None
    disk: int
    tmp: int
    shm: int

    def of(self, spec: Spec) -> Limits:
        """These, but what the spec asks for."""
        return msgspec.structs.replace(
            self,
            memory=self.memory if spec.memory is None else spec.memory,
            pids=self.pids if spec.pids is None else spec.pids,
            cpus=self.cpus if spec.cpus is None else spec.cpus,
            disk=self.disk if spec.disk is None else spec.disk,
        )
