"""A `vfkit` for tests: it takes vfkit's arguments, and QEMU runs the machine that they describe, with the same kernel
and the same drives. What is missing is Apple's framework, and with it vsock: a channel of virtio-serial takes its
place, of which the guest is told on its command line.
"""

from __future__ import annotations

import _socket
import ctypes
import http.server
import json
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from skerry.agent.guest.loop import READ, Loop
from skerry.vm.warden.mux import HostMux
from skerry.vm.warden.sockets import Published

_PR_SET_PDEATHSIG = 1
_STATES = {"Pause": "stop", "Resume": "cont", "HardStop": "quit"}


class Device:
    """`kind,flag,name=value` of one --device."""

    def __init__(self, text: str) -> None:
        self.kind, *words = text.split(",")
        self.values = dict(word.partition("=")[::2] for word in words)

    def __contains__(self, flag: str) -> bool:
        return flag in self.values


class Monitor:
    """QEMU's control channel."""

    def __init__(self, end: socket.socket) -> None:
        self._file = end.makefile("rwb")
        self._lock = threading.Lock()
        self._file.readline()
        self.execute("qmp_capabilities")

    def execute(self, command: str) -> Any:
        with self._lock:
            self._file.write(json.dumps({"execute": command}).encode() + b"\n")
            self._file.flush()
            while True:
                answer = json.loads(self._file.readline())
                if "event" not in answer:
                    return answer["return"]


def serve_api(path: str, monitor: Monitor) -> None:
    """The part of vfkit's API that is about the state."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def address_string(self) -> str:
            return ""

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            is_running = monitor.execute("query-status")["running"]
            state = f"VirtualMachineState{'Running' if is_running else 'Paused'}"
            self._answer(200, json.dumps({"state": state, "canStop": True}).encode())

        def do_POST(self) -> None:
            wanted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["state"]
            monitor.execute(_STATES[wanted])
            self._answer(202, b"")

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = socketserver.UnixStreamServer(path, Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def command(options: dict[str, str], devices: list[Device], channel: int, monitor: int) -> list[str]:
    words = options["--kernel-cmdline"].replace("skerry.channel=vsock", "skerry.channel=port:agent.0")
    argv = [
        *("qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-machine", "pc,usb=off,hpet=off,graphics=off", "-cpu", "max", "-accel", "tcg,thread=single,tb-size=128"),
        *("-smp", options["--cpus"], "-m", options["--memory"]),
        *("-kernel", _bootable(options["--kernel"]), "-initrd", options["--initrd"]),
        *("-append", f"{words} tsc=reliable no_timer_check mitigations=off"),
        *("-chardev", f"socket,id=monitor,fd={monitor}", "-mon", "chardev=monitor,mode=control"),
        *("-device", "virtio-serial-pci", "-chardev", f"socket,id=agent,fd={channel}"),
        *("-device", "virtserialport,chardev=agent,name=agent.0"),
    ]
    for number, device in enumerate(devices):
        match device.kind:
            case "virtio-blk":
                drive = f"if=none,id=drive{number},format=raw,file={device.values['path']}"
                argv += ["-drive", f"{drive},readonly={'on' if 'readonly' in device else 'off'}"]
                argv += ["-device", f"virtio-blk-pci,drive=drive{number}"]
            case "virtio-rng":
                argv += ["-device", "virtio-rng-pci"]
            case "virtio-serial":
                argv += ["-chardev", f"file,id=console,path={device.values['logFilePath']}"]
                argv += ["-device", "virtconsole,chardev=console"]
            case "virtio-vsock":
                pass
            case kind:
                sys.exit(f"unknown device type: {kind}")
    return argv


def _bootable(kernel: str) -> str:
    """The same kernel in the form that QEMU boots: it takes no bare one for x86."""
    packed = Path(kernel).with_name("vmlinuz")
    return str(packed if packed.exists() else kernel)


def _listen(path: str) -> _socket.socket:
    listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(128)
    return listener


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main(arguments: list[str]) -> None:
    if arguments == ["--version"]:
        print("vfkit version: v0.6.1")
        return
    pairs = list(zip(arguments[::2], arguments[1::2], strict=True))
    options = {name: value for name, value in pairs if name != "--device"}
    devices = [Device(value) for name, value in pairs if name == "--device"]
    Path(options["--pidfile"]).write_text(str(os.getpid()))
    api = options["--restful-uri"].removeprefix("unix://")
    ports = [device for device in devices if device.kind == "virtio-vsock"]
    ready = next(device.values["socketURL"] for device in ports if "listen" in device)
    published = {
        int(device.values["port"]): _listen(device.values["socketURL"]) for device in ports if "connect" in device
    }
    channel = str(Path(api).with_name("stand-in"))
    Path(channel).unlink(missing_ok=True)
    listener = _listen(channel)
    ours, theirs = socket.socketpair()
    our_monitor, their_monitor = socket.socketpair()
    argv = command(options, devices, theirs.fileno(), their_monitor.fileno())
    with subprocess.Popen(
        argv, pass_fds=(theirs.fileno(), their_monitor.fileno()), preexec_fn=_die_with_parent
    ) as qemu:
        theirs.close()
        their_monitor.close()
        loop = Loop()
        loop.watch(os.pidfd_open(qemu.pid), READ, lambda _events: os._exit(qemu.wait()))
        HostMux(loop, ours.detach(), listener, ready)
        for port, socket_of_port in published.items():
            Published(loop, socket_of_port, channel, port)
        serve_api(api, Monitor(our_monitor))
        loop.run()


if __name__ == "__main__":
    main(sys.argv[1:])
