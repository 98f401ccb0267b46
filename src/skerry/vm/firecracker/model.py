"""The bodies of Firecracker's API. What is None is left out: Firecracker refuses what its version does not know."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Name = Annotated[str, Meta(pattern="^[A-Za-z0-9_]{1,64}$")]
"""The id of a drive or an interface, which is also a part of a path."""
Path = Annotated[str, Meta(min_length=1)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
HugePages = Literal["None", "Transparent", "2M"]


class Body(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is sent."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What is answered; versions add fields to it, which are passed over."""


class InstanceInfo(Reply, frozen=True):
    id: str
    state: Literal["Not started", "Running", "Paused"]
    vmm_version: str
    app_name: str


class Version(Reply, frozen=True):
    firecracker_version: str


class MachineConfig(Body, frozen=True):
    vcpu_count: Annotated[int, Meta(ge=1, le=32)]
    mem_size_mib: Annotated[int, Meta(ge=1)]
    smt: bool | None = None
    track_dirty_pages: bool | None = None
    huge_pages: HugePages | None = None


class MachineConfigReply(Reply, frozen=True):
    vcpu_count: int
    mem_size_mib: int
    smt: bool = False
    track_dirty_pages: bool = False
    huge_pages: str = "None"


class BootSource(Body, frozen=True):
    kernel_image_path: Path
    boot_args: str | None = None
    """Without any, Firecracker has its own, and with them the guest loads no module."""
    initrd_path: Path | None = None


class TokenBucket(Body, frozen=True):
    size: Count
    refill_time: Count
    """In milliseconds."""
    one_time_burst: Count | None = None


class RateLimiter(Body, frozen=True):
    bandwidth: TokenBucket | None = None
    ops: TokenBucket | None = None


class Drive(Body, frozen=True):
    drive_id: Name
    is_root_device: bool
    path_on_host: Path
    is_read_only: bool
    cache_type: Literal["Unsafe", "Writeback"] | None = None
    """Unsafe is what Firecracker takes unless told: then a guest's flush is not the host's."""
    io_engine: Literal["Sync", "Async"] | None = None
    rate_limiter: RateLimiter | None = None


class DriveUpdate(Body, frozen=True):
    drive_id: Name
    path_on_host: Path | None = None
    rate_limiter: RateLimiter | None = None


class NetworkInterface(Body, frozen=True):
    iface_id: Name
    host_dev_name: Path
    """A TAP device."""
    guest_mac: str | None = None
    mtu: Annotated[int, Meta(ge=68, le=65535)] | None = None
    rx_rate_limiter: RateLimiter | None = None
    tx_rate_limiter: RateLimiter | None = None


class NetworkInterfaceUpdate(Body, frozen=True):
    iface_id: Name
    rx_rate_limiter: RateLimiter | None = None
    tx_rate_limiter: RateLimiter | None = None


class Vsock(Body, frozen=True):
    guest_cid: Annotated[int, Meta(ge=3, le=2**32 - 1)]
    """Firecracker takes 0 and 2 as well, with which no guest can be reached."""
    uds_path: Path


class Entropy(Body, frozen=True):
    rate_limiter: RateLimiter | None = None


class Balloon(Body, frozen=True):
    amount_mib: Annotated[int, Meta(ge=0, le=2**32 - 1)]
    deflate_on_oom: bool
    stats_polling_interval_s: Annotated[int, Meta(ge=0, le=2**16 - 1)] | None = None


class BalloonUpdate(Body, frozen=True):
    amount_mib: Annotated[int, Meta(ge=0, le=2**32 - 1)]


class BalloonStatsUpdate(Body, frozen=True):
    stats_polling_interval_s: Annotated[int, Meta(ge=0, le=2**16 - 1)]


class BalloonReply(Reply, frozen=True):
    amount_mib: int
    deflate_on_oom: bool
    stats_polling_interval_s: int = 0


class BalloonStats(Reply, frozen=True):
    target_pages: int
    actual_pages: int
    target_mib: int
    actual_mib: int
    free_memory: int | None = None
    total_memory: int | None = None
    available_memory: int | None = None


class Metrics(Body, frozen=True):
    metrics_path: Path


class Logger(Body, frozen=True):
    log_path: Path | None = None
    level: Literal["Error", "Warning", "Info", "Debug", "Trace", "Off"] | None = None
    show_level: bool | None = None
    show_log_origin: bool | None = None


class Serial(Body, frozen=True):
    serial_out_path: Path | None = None
    rate_limiter: TokenBucket | None = None


class Action(Body, frozen=True):
    action_type: Literal["FlushMetrics", "InstanceStart", "SendCtrlAltDel"]


class VmState(Body, frozen=True):
    state: Literal["Paused", "Resumed"]


class SnapshotCreate(Body, frozen=True):
    snapshot_path: Path
    mem_file_path: Path
    snapshot_type: Literal["Full", "Diff"] | None = None


class MemoryBackend(Body, frozen=True):
    backend_type: Literal["File", "Uffd"]
    backend_path: Path


class NetworkOverride(Body, frozen=True):
    iface_id: Name
    host_dev_name: Path


class VsockOverride(Body, frozen=True):
    uds_path: Path


class SnapshotLoad(Body, frozen=True):
    snapshot_path: Path
    mem_backend: MemoryBackend
    """A file is mapped privately: clones share it, so it must never change while one of them lives."""
    resume_vm: bool | None = None
    track_dirty_pages: bool | None = None
    network_overrides: list[NetworkOverride] | None = None
    vsock_override: VsockOverride | None = None
    clock_realtime: bool | None = None
    huge_pages: Literal["Snapshot", "None", "Transparent", "2M"] | None = None
