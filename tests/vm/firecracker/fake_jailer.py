"""A stand-in for `jailer`: it does all that the real one does with folders, users and processes, but does not lock the
stand-in for Firecracker up, which needs an interpreter. What it was told is left beside it."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import shutil
import stat
import sys
import time

_CLONE_NEWPID = 0x20000000
_DEVICES = {"kvm": (10, 232), "net/tun": (10, 200), "urandom": (1, 9)}


def _refuse(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
    sys.exit(1)


def main(home: str) -> None:
    own, _, rest = _split(sys.argv[1:])
    parser = argparse.ArgumentParser(prog="jailer", allow_abbrev=False)
    for name in ("--id", "--exec-file", "--uid", "--gid"):
        parser.add_argument(name, required=True)
    parser.add_argument("--chroot-base-dir", default="/srv/jailer")
    parser.add_argument("--cgroup-version", choices=("1", "2"), default="1")
    parser.add_argument("--cgroup", action="append")
    parser.add_argument("--parent-cgroup")
    parser.add_argument("--new-pid-ns", action="store_true")
    options = parser.parse_args(own)
    if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", options.id):
        _refuse(f"Invalid instance ID: {options.id}")
    name = os.path.basename(os.path.realpath(options.exec_file))
    if "firecracker" not in name:
        _refuse(f'Invalid filename. The filename of `--exec-file` option must contain "firecracker": {name}')
    root = os.path.join(os.path.realpath(options.chroot_base_dir), name, options.id, "root")
    uid, gid = int(options.uid), int(options.gid)
    os.makedirs(root, exist_ok=True)
    shutil.copyfile(options.exec_file, os.path.join(root, name))
    os.chmod(os.path.join(root, name), 0o755)
    with open(os.path.join(home, "jailed"), "a") as file:
        file.write(json.dumps(sys.argv[1:]) + "\n")
    if options.cgroup_version == "2" and not options.cgroup:
        _join_parent_group(home, options.parent_cgroup or name)
    os.closerange(3, 1024)
    os.chdir(root)
    os.chown(".", uid, gid)
    _make_devices(uid, gid)
    # By its descriptor: who is not locked up in the jail may not walk to it.
    program = os.open(name, os.O_RDONLY)
    os.set_inheritable(program, True)
    argv = [
        sys.executable,
        "-B",
        f"/proc/self/fd/{program}",
        "--id",
        options.id,
        "--start-time-us",
        str(time.monotonic_ns() // 1000),
        *rest,
    ]
    if options.new_pid_ns:
        _fork(f"{name}.pid")
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    if os.statvfs(".").f_flag & os.ST_NOEXEC:
        _refuse("Failed to exec into Firecracker: Permission denied (os error 13)")
    os.execve(argv[0], argv, {"FAKE_JAIL": "1"})


def _split(words: list[str]) -> tuple[list[str], str, list[str]]:
    at = words.index("--") if "--" in words else len(words)
    return words[:at], "--", words[at + 1 :]


def _join_parent_group(home: str, name: str) -> None:
    """Without groups of its own, and only with the second version, it moves itself to the parent if there is one."""
    with contextlib.suppress(FileNotFoundError), open(os.path.join(home, "faults.json")) as file:
        root = json.load(file).get("cgroup_root")
        if root is not None and os.path.isdir(os.path.join(root, name)):
            with open(os.path.join(root, name, "cgroup.procs"), "w") as procs:
                procs.write(str(os.getpid()))


def _make_devices(uid: int, gid: int) -> None:
    for folder in ("dev/net", "run"):
        os.makedirs(folder, exist_ok=True)
        os.chown(folder, uid, gid)
    for name, (major, minor) in _DEVICES.items():
        os.mknod(f"dev/{name}", stat.S_IFCHR | 0o600, os.makedev(major, minor))
        os.chown(f"dev/{name}", uid, gid)


def _fork(pid_file: str) -> None:
    """The child goes on, in a PID namespace of its own; we say who it is and end. By that, and by the change of its
    uid, it has lost the signal that was to kill it with its parent."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWPID):
        _refuse(f"Failed to create a PID namespace: {os.strerror(ctypes.get_errno())}")
    pid = os.fork()
    if pid:
        with open(pid_file, "w") as file:
            file.write(str(pid))
        os._exit(0)
