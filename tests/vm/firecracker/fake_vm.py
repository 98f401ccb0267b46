"""What Firecracker keeps of a machine and answers to each request: the same status and the same words."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

from fake_bodies import Fault, full_drive, read_body
from fake_guest import Guest
from swagger import Description

VERSION = "1.17.0-dev"
_FIRST_WITH_BZIMAGE = (1, 17)
_LOSES_WHAT_IT_RESUMES = (1, 16)
_LOSES_WHAT_IT_RESTORES = "1.16.0"
_WRITTEN = 8 << 20
_PAGE = 4096
MAX_PAYLOAD = 51200
_NOT_AFTER = "The requested operation is not supported after starting the microVM."
_NOT_BEFORE = "The requested operation is not supported before starting the microVM."
_VCPUS = (
    "Machine config error: The number of vCPUs must be greater than 0, less than 32 and must be 1 or an even number"
    " if SMT is enabled."
)
_MEMORY = "Machine config error: The memory size (MiB) is either 0, or not a multiple of the configured page size."
_BINDING = "Cannot create backend for vsock device: Error binding to the host-side Unix socket: "
_RESTORING = (
    "Load snapshot error: Failed to restore from snapshot: Failed to build microVM from snapshot: Failed to restore"
    " devices: Error restoring MMIO devices: VsockUnixBackend: Error binding to the host-side Unix socket: "
)


class FakeVm:
    """The state of one process, from fresh to running to paused."""

    def __init__(
        self, id: str, description: Description, guest: Guest, is_jailed: bool, version: str = VERSION
    ) -> None:
        self.id = id
        self.version = version
        self._release = tuple(map(int, version.split(".")[:2]))
        self.state = "Not started"
        self.violations: list[str] = []
        self._description = description
        self._guest = guest
        self._is_jailed = is_jailed
        self._machine: dict[str, Any] = {"vcpu_count": 1, "mem_size_mib": 128}
        self._boot: dict[str, Any] | None = None
        self._drives: dict[str, dict[str, Any]] = {}
        self._interfaces: dict[str, dict[str, Any]] = {}
        self._vsock: dict[str, Any] | None = None
        self._balloon: dict[str, Any] | None = None
        self._logger: dict[str, Any] | None = None
        self._metrics: dict[str, Any] | None = None
        self._mmds_config: dict[str, Any] | None = None
        self._mmds: dict[str, Any] = {}
        self._is_configured = False

    def path(self, path: str) -> str:
        """As it is for us, who run in the jail's folder but are not locked up in it."""
        return path.lstrip("/") if self._is_jailed else path

    async def answer(self, method: str, path: str, text: bytes) -> tuple[int, str]:
        try:
            return await self._answer(method, path, text)
        except Fault as fault:
            reply = json.dumps({"fault_message": str(fault)}, separators=(",", ":"))
            if fault.fatal:
                raise Fault(reply, fatal=True) from None
            return 400, reply

    async def _answer(self, method: str, path: str, text: bytes) -> tuple[int, str]:
        first, _, id = path.strip("/").partition("/")
        handler = self._handlers().get((method, first if first in ("drives", "network-interfaces") else path))
        if handler is None:
            raise Fault(f"Invalid request method and/or path: {method} {path.lstrip('/')}.")
        body = read_body(self._description, method, path, text) if method in ("PUT", "PATCH") else None
        if method != "DELETE":
            problems = self._description.problems(method, path, body)
            self.violations += [f"{method} {path}: {problem}" for problem in problems]
        has_id = body is not None and first in ("drives", "network-interfaces")
        if has_id and body.get("drive_id", body.get("iface_id")) != id:
            raise Fault("The id from the path does not match the id from the body!")
        reply = await handler(body)
        return (204, "") if reply is None else (200, json.dumps(reply, separators=(",", ":")))

    def _handlers(self) -> dict[tuple[str, str], Callable[[Any], Awaitable[Any]]]:
        return {
            ("GET", "/"): self._describe,
            ("GET", "/version"): self._version,
            ("GET", "/machine-config"): self._get_machine,
            ("PUT", "/machine-config"): self._put_machine,
            ("PUT", "/boot-source"): self._put_boot,
            ("PUT", "drives"): self._put_drive,
            ("PATCH", "drives"): self._patch_drive,
            ("DELETE", "drives"): self._delete_drive,
            ("PUT", "network-interfaces"): self._put_interface,
            ("PATCH", "network-interfaces"): self._patch_interface,
            ("PUT", "/vsock"): self._put_vsock,
            ("PUT", "/mmds/config"): self._put_mmds_config,
            ("PUT", "/mmds"): self._put_mmds,
            ("PATCH", "/mmds"): self._patch_mmds,
            ("GET", "/mmds"): self._get_mmds,
            ("PUT", "/balloon"): self._put_balloon,
            ("PATCH", "/balloon"): self._patch_balloon,
            ("GET", "/balloon"): self._get_balloon,
            ("GET", "/balloon/statistics"): self._get_balloon_statistics,
            ("PATCH", "/balloon/statistics"): self._patch_balloon,
            ("PUT", "/entropy"): self._put_entropy,
            ("PUT", "/serial"): self._put_serial,
            ("PUT", "/logger"): self._put_logger,
            ("PUT", "/metrics"): self._put_metrics,
            ("PATCH", "/vm"): self._patch_vm,
            ("PUT", "/snapshot/create"): self._create_snapshot,
            ("PUT", "/snapshot/load"): self._load_snapshot,
            ("GET", "/vm/config"): self._get_config,
            ("PUT", "/actions"): self._act,
        }

    def _before_start(self) -> None:
        if self.state != "Not started":
            raise Fault(_NOT_AFTER)
        self._is_configured = True

    def _after_start(self) -> None:
        if self.state == "Not started":
            raise Fault(_NOT_BEFORE)

    async def _describe(self, _: None) -> dict[str, str]:
        return {"id": self.id, "state": self.state, "vmm_version": self.version, "app_name": "Firecracker"}

    async def _version(self, _: None) -> dict[str, str]:
        return {"firecracker_version": self.version}

    async def _get_machine(self, _: None) -> dict[str, Any]:
        held = {"smt": False, "track_dirty_pages": False, "huge_pages": "None", **self._machine}
        return {name: held[name] for name in ("vcpu_count", "mem_size_mib", "smt", "track_dirty_pages", "huge_pages")}

    async def _put_machine(self, body: dict[str, Any]) -> None:
        self._before_start()
        vcpus = body["vcpu_count"]
        if not 1 <= vcpus <= 32 or (body.get("smt") and vcpus > 1 and vcpus % 2):
            raise Fault(_VCPUS)
        if body["mem_size_mib"] <= 0:
            raise Fault(_MEMORY)
        self._machine = body

    async def _put_boot(self, body: dict[str, Any]) -> None:
        self._before_start()
        for name, what in (("kernel_image_path", "kernel"), ("initrd_path", "initrd")):
            if body.get(name) is not None and not os.path.exists(self.path(body[name])):
                reason = "No such file or directory (os error 2)"
                raise Fault(f"Boot source error: The {what} file cannot be opened: {reason}")
        if len(body.get("boot_args") or "") >= 2048:
            raise Fault("Boot source error: The kernel command line is invalid: Invalid cmdline capacity provided.")
        self._boot = body

    def _open_drive(self, path: str, read_only: bool) -> None:
        try:
            os.close(os.open(self.path(path), os.O_RDONLY if read_only else os.O_RDWR))
        except OSError as error:
            raise Fault(
                "Drive config error: Unable to create the virtio block device: Virtio backend error: Error manipulating"
                f" the backing file: {error.strerror} (os error {error.errno}) {path}"
            ) from None

    async def _put_drive(self, body: dict[str, Any]) -> None:
        if self.state != "Not started":
            raise Fault("PCI is not enabled")
        self._is_configured = True
        self._open_drive(body["path_on_host"], body.get("is_read_only", False))
        others = [drive for id, drive in self._drives.items() if id != body["drive_id"]]
        if body["is_root_device"] and any(drive["is_root_device"] for drive in others):
            raise Fault("Drive config error: A root block device already exists!")
        self._drives[body["drive_id"]] = body

    async def _patch_drive(self, body: dict[str, Any]) -> None:
        self._after_start()
        drive = self._drives.get(body["drive_id"])
        if drive is None:
            raise Fault(f"Drive config error: Invalid block device ID: {body['drive_id']}")
        if "path_on_host" in body:
            self._open_drive(body["path_on_host"], drive.get("is_read_only", False))
            drive["path_on_host"] = body["path_on_host"]

    async def _delete_drive(self, _: None) -> None:
        self._after_start()
        raise Fault("PCI is not enabled")

    async def _put_interface(self, body: dict[str, Any]) -> None:
        if self.state != "Not started":
            raise Fault("PCI is not enabled")
        self._is_configured = True
        self._interfaces[body["iface_id"]] = body

    async def _patch_interface(self, body: dict[str, Any]) -> None:
        self._after_start()
        if body["iface_id"] not in self._interfaces:
            raise Fault(f"Network config error: Device not found: {body['iface_id']}")

    async def _put_vsock(self, body: dict[str, Any]) -> None:
        self._before_start()
        path = self.path(body["uds_path"])
        if len(os.fsencode(body["uds_path"])) > 107:
            raise Fault(f"Vsock config error: {_BINDING}path must be shorter than SUN_LEN")
        if self._vsock is not None:
            self._guest.close()
        try:
            await self._guest.bind(path)
        except OSError as error:
            raise Fault(f"Vsock config error: {_BINDING}{error.strerror} (os error {error.errno})") from None
        self._vsock = body

    async def _put_mmds_config(self, body: dict[str, Any]) -> None:
        self._before_start()
        if not set(body["network_interfaces"]) <= set(self._interfaces):
            raise Fault(
                "MMMDS config error: The list of network interface IDs provided contains at least one ID that does not"
                " correspond to any existing network interface."
            )
        self._mmds_config = body

    async def _put_mmds(self, body: dict[str, Any]) -> None:
        self._mmds = body

    async def _patch_mmds(self, body: dict[str, Any]) -> None:
        for name, value in body.items():
            held = self._mmds.get(name)
            self._mmds[name] = {**held, **value} if isinstance(held, dict) and isinstance(value, dict) else value

    async def _get_mmds(self, _: None) -> dict[str, Any]:
        return self._mmds

    async def _put_balloon(self, body: dict[str, Any]) -> None:
        self._before_start()
        self._balloon = body

    async def _patch_balloon(self, body: dict[str, Any]) -> None:
        self._after_start()
        if self._balloon is None:
            raise Fault("Balloon config error: No balloon device found.")
        self._balloon = {**self._balloon, **body}

    async def _get_balloon(self, _: None) -> dict[str, Any] | None:
        if self._balloon is None:
            raise Fault("Balloon config error: No balloon device found.")
        return self._full_balloon()

    def _full_balloon(self) -> dict[str, Any] | None:
        extras = {"stats_polling_interval_s": 0, "free_page_hinting": False, "free_page_reporting": False}
        if self._balloon is None:
            return None
        held = {**extras, **self._balloon}
        return {name: held[name] for name in ("amount_mib", "deflate_on_oom", *extras)}

    async def _get_balloon_statistics(self, _: None) -> dict[str, int]:
        self._after_start()
        if not (self._balloon or {}).get("stats_polling_interval_s"):
            raise Fault("Balloon config error: Cannot enable/disable the statistics after boot.")
        size = (self._balloon or {})["amount_mib"]
        return {"target_pages": size * 256, "actual_pages": 0, "target_mib": size, "actual_mib": 0}

    async def _put_entropy(self, _: dict[str, Any]) -> None:
        self._before_start()

    async def _put_serial(self, _: dict[str, Any]) -> None:
        self._before_start()

    async def _put_logger(self, body: dict[str, Any]) -> None:
        if self.state != "Not started":
            raise Fault(_NOT_AFTER)
        self._logger = body

    async def _put_metrics(self, body: dict[str, Any]) -> None:
        if self.state != "Not started":
            raise Fault(_NOT_AFTER)
        if self._metrics is not None:
            raise Fault(
                "Metrics error: Cannot initialize the metrics system due to bad user input: Reinitialization of metrics"
                " not allowed."
            )
        self._metrics = body

    async def _patch_vm(self, body: dict[str, Any]) -> None:
        self._after_start()
        if self.state == "Paused" and body["state"] == "Resumed" and self._release == _LOSES_WHAT_IT_RESUMES:
            self._guest.lose_vsock()
        self.state = "Paused" if body["state"] == "Paused" else "Running"
        self._guest.freeze(self.state == "Paused")

    async def _act(self, body: dict[str, Any]) -> None:
        if body["action_type"] != "InstanceStart":
            self._after_start()
            return
        if self.state != "Not started":
            raise Fault(_NOT_AFTER)
        if self._boot is None:
            raise Fault("Start microvm error: Cannot start microvm without kernel configuration.")
        with open(self.path(self._boot["kernel_image_path"]), "rb") as file:
            head = file.read(1024)
        if not self._can_boot(head):
            reason = "Cannot load kernel due to invalid memory configuration or invalid kernel image."
            raise Fault(f"Start microvm error: {reason}")
        self.state = "Running"
        self._guest.boot(self._boot.get("boot_args") or "", self._disk_paths())

    def _can_boot(self, head: bytes) -> bool:
        if os.uname().machine == "aarch64":
            return head[0x38:0x3C] == b"ARMd"
        return head[:4] == b"\x7fELF" or (head[0x202:0x206] == b"HdrS" and self._release >= _FIRST_WITH_BZIMAGE)

    def _disk_paths(self) -> list[str]:
        return [self.path(drive["path_on_host"]) for drive in self._drives.values() if not drive.get("is_read_only")]

    async def _create_snapshot(self, body: dict[str, Any]) -> None:
        self._after_start()
        if self.state != "Paused":
            raise Fault(
                "Create snapshot error: Cannot save the microVM state: Operation not allowed: save/restore unavailable"
                " while running"
            )
        saved = {"version": self.version, "machine": self._machine, "drives": self._drives, "vsock": self._vsock}
        with open(self.path(body["snapshot_path"]), "w") as file:
            json.dump({**saved, "guest": self._guest.save()}, file)
        with open(self.path(body["mem_file_path"]), "wb") as memory:
            # Firecracker writes all of it, zeros too; that of a whole machine would take its time
            memory.write((b"\1" * _PAGE + bytes(7 * _PAGE)) * (_WRITTEN // (8 * _PAGE)))
            memory.truncate(self._machine["mem_size_mib"] << 20)

    async def _load_snapshot(self, body: dict[str, Any]) -> None:
        if self.state != "Not started":
            raise Fault(_NOT_AFTER)
        if self._is_configured:
            reason = "Loading a microVM snapshot not allowed after configuring boot-specific resources."
            raise Fault(f"Load snapshot error: {reason}")
        try:
            with open(self.path(body["snapshot_path"])) as file:
                saved = json.load(file)
            size = os.stat(self.path(body["mem_backend"]["backend_path"])).st_size
        except (OSError, ValueError) as error:
            raise Fault(f"Load snapshot error: Failed to get snapshot state from file: {error}", fatal=True) from None
        if size != saved["machine"]["mem_size_mib"] << 20:
            raise Fault("Load snapshot error: Failed to load guest memory: the file is too short", fatal=True)
        self._machine, self._drives, self._vsock = saved["machine"], saved["drives"], saved["vsock"]
        uds_path = (body.get("vsock_override") or self._vsock or {})["uds_path"]
        try:
            for drive in self._drives.values():
                self._open_drive(drive["path_on_host"], drive.get("is_read_only", False))
            await self._guest.bind(self.path(uds_path))
        except OSError as error:
            raise Fault(f"{_RESTORING}{error.strerror} (os error {error.errno})", fatal=True) from None
        except Fault as fault:
            raise Fault(f"Load snapshot error: {fault}", fatal=True) from None
        self.state = "Running" if body.get("resume_vm") else "Paused"
        self._guest.restore(saved["guest"], self._disk_paths(), frozen=self.state == "Paused")
        if self.version == _LOSES_WHAT_IT_RESTORES:
            self._guest.lose_vsock()  # the real one only if something was in flight

    async def _get_config(self, _: None) -> dict[str, Any]:
        boot = self._boot or {}
        vsock = self._vsock and {"guest_cid": self._vsock["guest_cid"], "uds_path": self._vsock["uds_path"]}
        return {
            "balloon": self._full_balloon(),
            "drives": [full_drive(drive) for drive in self._drives.values()],
            "boot-source": {name: boot.get(name) for name in ("kernel_image_path", "initrd_path", "boot_args")},
            "cpu-config": None,
            "logger": self._logger if self.state == "Not started" else None,
            "machine-config": await self._get_machine(None),
            "metrics": self._metrics if self.state == "Not started" else None,
            "mmds-config": self._mmds_config,
            "network-interfaces": list(self._interfaces.values()),
            "vsock": vsock,
            "entropy": None,
        }
