"""What the host tells the first process of a machine, beside the calls of every agent."""

from __future__ import annotations

import posix
import sys
import time
from fcntl import ioctl

from . import groups, mounts, network, syscalls, user_agent
from .channel import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .channel import Call
    from .first_process import Machine

_FIRST_FREE_PORT = 60000
_ADD_ENTROPY, _RESEED = 0x40085203, 0x5207
_FREEZE, _THAW = 0xC0045877, 0xC0045878
_BUSY, _INVALID = 16, 22
_FROZEN_AT_MOST_S = 60
_MACHINE_ID_DIGITS = 32


def reseed(machine: Machine, call: Call) -> None:
    """Make this machine itself: a clone has the random numbers, the clock and the names of what it was cloned from."""
    params = call.params
    entropy, hostname, machine_id = (_text(params, name) for name in ("entropy", "hostname", "machine_id"))
    if len(machine_id) != _MACHINE_ID_DIGITS or not all(digit in "0123456789abcdef" for digit in machine_id):
        raise Failure("invalid", "machine_id is 32 hexadecimal digits")
    try:
        seed = bytes.fromhex(entropy)
    except ValueError:
        raise Failure("invalid", "entropy is bytes in hexadecimal digits") from None
    fd = posix.open("/dev/urandom", posix.O_WRONLY | posix.O_CLOEXEC)
    try:
        head = (8 * len(seed)).to_bytes(4, sys.byteorder) + len(seed).to_bytes(4, sys.byteorder)
        ioctl(fd, _ADD_ENTROPY, head + seed)
        ioctl(fd, _RESEED, 0)
    finally:
        posix.close(fd)
    if params.get("time") is not None:
        time.clock_settime(time.CLOCK_REALTIME, params["time"])
    name_machine(hostname, machine_id)
    call.answer({})


def name_machine(hostname: str, machine_id: str) -> None:
    from _socket import sethostname

    sethostname(hostname)
    mounts.write_file("hostname", hostname + "\n")
    mounts.write_file("machine-id", machine_id + "\n")
    mounts.write_file("hosts", f"127.0.0.1 localhost {hostname}\n::1 localhost\n")


def prepare(machine: Machine, call: Call) -> None:
    """Make this machine what it is to be, once, and start the agent of its user; the answer says that it listens."""
    params = call.params
    if machine.box:
        raise Failure("exists", "this machine is prepared already")
    for name in ("home", "cwd"):
        if not _text(params, name).startswith("/"):
            raise Failure("invalid", f"{name} is an absolute path")
    params = machine.box = {
        **params,
        "user": params.get("user"),
        "mount_disk": bool(params.get("mount_disk")) and machine.has_drives,
        "mount_data": bool(params.get("mount_data")) and machine.has_drives,
        "writable_root": bool(params.get("writable_root")) or not machine.has_drives,
    }
    _set_up(machine, params)

    def on_done(failure: Failure | None) -> None:
        if failure is not None:
            call.fail(failure)
        else:
            groups.limit_processor(params.get("cpus"))  # not before: its start would be as slow
            machine.on_user_start()
            call.answer({})

    machine.user.begin(params, on_done)


def _set_up(machine: Machine, params: dict[str, Any]) -> None:
    card = params.get("network")
    if card:
        network.set_up(card["address"], card["gateway"])
        mounts.write_file("resolv.conf", f"nameserver {card['nameserver']}\n")
    groups.limit(params)
    for port, path in (params.get("forwards") or {}).items():
        machine.ports.forward(int(port), path)
    services = params.get("services") or []
    if machine.has_drives and not services:  # else the kernel is not the box's alone
        groups.bar_namespaces()
    if services:
        mounts.put_files("")
        if params["mount_data"]:
            mounts.mount_data()
    for argv in services:
        machine.start_service(argv)


def agent_as(machine: Machine, call: Call) -> None:
    """One more agent, of another user, for one stream to a port of its own."""
    if not machine.is_prepared:
        raise Failure("invalid", "this machine is not prepared yet")
    params = {**machine.box, "lifetime_s": None, "idle_s": None, "user": _text(call.params, "user")}
    port = machine.next_port = max(_FIRST_FREE_PORT, machine.next_port + 1)

    def on_done(failure: Failure | None) -> None:
        if failure is not None:
            call.fail(failure)
        else:
            call.answer({"port": port})

    listener = machine.ports.listener(port)
    pid = user_agent.start_beside(machine.loop, machine.user.pid, listener, params, on_done)
    listener.close()
    machine.loop.on_exit(pid, lambda _status: machine.ports.release(port))


def freeze(machine: Machine, call: Call) -> None:
    """Bring all that was written onto the drives, and let nothing more be written, so that they can be copied. It does
    not last: a host that goes away must not leave the machine frozen."""
    if machine.box.get("mount_disk") and mounts.DISK not in mounts.mounted():
        mounts.mount_disk()
    if machine.box.get("mount_data") and mounts.DATA not in mounts.mounted():
        mounts.mount_data()
    _tell_drives(_FREEZE, _BUSY)
    machine.thaw_later(_FROZEN_AT_MOST_S)
    call.answer({})


def thaw(machine: Machine, call: Call) -> None:
    thaw_drives()
    machine.thaw_later(None)
    call.answer({})


def thaw_drives() -> None:
    _tell_drives(_THAW, _INVALID)


def _tell_drives(what: int, is_so_already: int) -> None:
    for place in mounts.mounted():
        fd = posix.open(place, posix.O_RDONLY | posix.O_DIRECTORY | posix.O_CLOEXEC)
        try:
            ioctl(fd, what - (1 << 32), 0)
        except OSError as error:
            if error.errno != is_so_already:
                raise
        finally:
            posix.close(fd)


def end_machine(poweroff: bool) -> None:
    """Everything has ended: leave the drives whole, and the hypervisor ends with the machine."""
    thaw_drives()
    posix.sync()
    for place in mounts.mounted():
        syscalls.unmount(place)
    posix.sync()
    syscalls.end_machine(syscalls.POWER_OFF if poweroff else syscalls.RESTART)


def _text(params: dict[str, Any], name: str) -> str:
    value = params.get(name)
    if type(value) is not str or not value or "\0" in value or "\n" in value:
        raise Failure("invalid", f"{name} is a text of one line")
    return value
