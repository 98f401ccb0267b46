"""The catalogue: every way out that is tried, and how it ends on each kind of box. What is published is made of this,
and the tests of each provider assert it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

COLUMNS = ("local, root", "local, user", "docker", "gVisor", "podman", "incus", "qemu")
VERDICTS = {
    "r": "refused",
    "a": "absent",
    "l": "limited",
    "o": "own",
    "k": "known",
    "n": "not tried",
}
MEANINGS = {
    "refused": "the kernel, its filter or a permission says no",
    "absent": "there is nothing of that kind in the box",
    "limited": "it ends at a limit of the box",
    "own": "it succeeds, and reaches only what is the box's own: its kernel, its copy of an image, its network",
    "known": "it succeeds; the note says what it is good for",
    "not tried": "for the reason in the note",
    "open": "it succeeds and should not",
}
NOTES = {
    "A, B, C on gVisor and qemu": "its own kernel answers, and the host's never sees the call. In a machine is no "
    "filter; what is left of the kernel's own walls is no capability over it and no user namespace",
    "B01, B09 on incus": "programs of 32 bits run, by the same list of calls; what it cannot judge there, as the "
    "multiplexer of sockets, does not exist",
    "D11 to D23 on docker, gVisor, podman and incus": "files of the image; with Incus a copy of it that is the box's",
    "D17 on docker, gVisor, podman and qemu": "by its root, in a small tmpfs",
    "D38 on incus": "the box's own console, whose log is bounded",
    "D41, D43 on incus and qemu": "on the box's own disk, which no other sees, and without effect in it "
    "(`no_new_privs`)",
    "D42 on gVisor": "it says nothing of `no_new_privs` in /proc; nobody there has a capability over the host",
    "E on gVisor and qemu": "settings and tables of its own kernel",
    "E06, E32 on incus": "of the box's own network, and a folder where its own control groups are seen",
    "F on gVisor": "its kernel does not hide the agent's descriptors, and shows no filter: it is one",
    "F18, F19": "the agent is a process of the box's user, who can starve it and loses the box with it: the host ends "
    "what no longer answers. It gives nothing that the user has not",
    "F27 on incus": "`net_admin`, in the user and network namespace of the box alone",
    "F29 on qemu": "machines have no filter, see A",
    "G on gVisor and qemu": "sockets of its own kernel: nothing of the host listens there",
    "G26, G39, G42 to G47": "in the box's own network, which has nobody else in it",
    "H08, H11, H20 on gVisor": "memory of its own kernel, which ends at the limit of memory",
    "H09 on incus, and on local, user": "the number of files is not limited: on btrfs their room is, and what a plain "
    "user's box has in memory where that has a limit",
    "J01, J02 on local, user": "not tried where the host does not let us limit memory: they would take the host's",
}
"""Why something that succeeds is no way out, and what was not tried."""

_CLOSED = {"refused", "absent"}
_MAY_BE_CLOSED = {"own", *_CLOSED}
"""Which of these it is depends on the kernel."""


class Case(NamedTuple):
    id: str
    text: str
    verdicts: Mapping[str, str]


def classes() -> dict[str, str]:
    """What each letter stands for."""
    return {line[0]: line[2:] for line in _lines() if line[1] == " "}


def cases() -> list[Case]:
    return [_case(*line.split(" ", 2)) for line in _lines() if line[1] != " "]


def _case(id: str, letters: str, text: str) -> Case:
    return Case(id, text, {column: VERDICTS[letter] for column, letter in zip(COLUMNS, letters, strict=True)})


def published(column: str) -> dict[str, str]:
    return {case.id: case.verdicts[column] for case in cases()}


def judged(column: str, found: Mapping[str, str]) -> dict[str, str]:
    """The verdict on each case: what succeeded is the box's own, or known, only where that is published."""
    verdicts = {}
    for case in cases():
        verdict = found.get(case.id, "not tried")
        excused = case.verdicts[column] if case.verdicts[column] in ("own", "known") else "open"
        verdicts[case.id] = excused if verdict == "open" else verdict
    return verdicts


def differing(column: str, verdicts: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """What was published and what was found, where that is not the same."""
    pairs = {id: (wanted, verdicts[id]) for id, wanted in published(column).items()}
    return {id: pair for id, pair in pairs.items() if not _agree(*pair)}


def _agree(wanted: str, found: str) -> bool:
    return found == wanted or (found in _CLOSED and wanted in _MAY_BE_CLOSED)


def counts(letter: str, column: str) -> Counter[str]:
    return Counter(case.verdicts[column] for case in cases() if case.id[0] == letter)


def _lines() -> Iterator[str]:
    return filter(None, _TABLE.splitlines())


_TABLE = """
A Kernel calls, each as x86_64, as ia32 (int 0x80) and as x32
A01 rrrrrrr bpf: make a map
A02 rrrrrrr bpf: load a program
A03 rrrrrrr userfaultfd
A04 rrrrrro userfaultfd, for user mode only
A05 rrrrrro io_uring_setup, which makes sockets behind a filter's back
A06 rrrrrro io_uring_enter
A07 rrrrrro io_uring_register
A08 rrrorro keyctl: the session's keyring
A09 rrrrrro add_key
A10 rrrrrro request_key
A11 rrrrrrr init_module
A12 rrrrrrr finit_module
A13 rrrrrrr delete_module
A14 rrrrrrr kexec_load
A15 rrrrrrr kexec_file_load
A16 rrrrrrr reboot
A17 rrrorrr syslog: read the kernel's log
A18 rrrrrrr syslog: clear the kernel's log
A19 rrrrrrr iopl
A20 rrrrrrr ioperm
A21 rrrrrro modify_ldt
A22 rrrrrrr sethostname
A23 rrrrrrr setdomainname
A24 rrrrrrr fanotify_init
A25 rrrrrro fanotify_mark
A26 rrrrrrr lookup_dcookie
A27 rrrrrro vmsplice
A28 rrrrrro process_vm_readv of the first process
A29 rrrrrro process_vm_writev of the first process
A30 rrrrrro kcmp
A31 rrrrrro pidfd_getfd
A32 rrrrrro process_madvise
A33 rrrrrro process_mrelease
A34 rrrorro mbind
A35 rrrorro set_mempolicy
A36 rrrrrro move_pages
A37 rrrrrro migrate_pages
A38 rrrrrro clock_settime
A39 rrrrrrr settimeofday
A40 rrrrrrr adjtimex
A41 rrrrrrr clock_adjtime
A42 rrrrrrr swapon
A43 rrrrrrr swapoff
A44 rrrrrrr acct
A45 rrrorrr perf_event_open
A46 rrrorro ptrace: be traced
A47 rrrorrr open_by_handle_at, which leaves a container (shocker)
A48 rrrorro name_to_handle_at
A49 rrrrrro quotactl
A50 rrrrrro quotactl_fd
A51 rrrrrrr memfd_secret
A52 rrrrrrr lsm_set_self_attr
A53 rrrrrrr vhangup
A54 rrrrrro uselib
A55 rrrorro ioctl TIOCSTI: type into a terminal
A56 rrrorro ioctl TIOCLINUX
A57 rrrorrr clone3 with a user namespace
A58 rrrorrr clone with a user namespace
A59 rrrrrrr statmount
A60 rrrrrrr listmount
B Ways around a filter
B01 rrrrroo any call by int 0x80
B02 rrrrrrr any call of x32
B03 rrrrrrr ptrace by its own number of x32
B04 rrrrrro socketcall: AF_VSOCK
B05 rrrrrrr socketcall: NETLINK_NETFILTER
B06 rrrrrro socketcall: NETLINK_AUDIT
B07 rrrrrrr socketcall: AF_PACKET
B08 rrrrrro the multiplexer ipc
B09 rrrrroo the old mmap, whose arguments are in memory
B10 rrrrrrr vm86 and vm86old
B11 rrrrrro stime
B12 rrrrrrr the old umount
B13 rrrrrrr calls that are younger than our table, of x86_64
B14 rrrrrrr calls that are younger than our table, of ia32
B15 rrrrrrr numbers 512 to 547 of x32
B16 rrrrrrr mount by a number with its highest bit set
B17 rrrorro TIOCSTI with high bits set (CVE-2019-10063)
B18 rrrrrro AF_VSOCK with high bits set
B19 rrrrrrr numbers that no call has
B20 rrrrrrr calls that no kernel has any more
C Mounts and namespaces
C01 rrrrrrr mount a tmpfs
C02 rrrrrrr mount a proc
C03 rrrrrrr mount a sysfs
C04 rrrrrrr mount control groups, v1 and v2
C05 rrrrrrr mount devpts, mqueue, binfmt_misc
C06 rrrrrrr mount debugfs, tracefs, securityfs, bpf
C07 rrrrrrr mount an overlay
C08 rrrrrrr mount a disk
C09 rrrrrrr bind the root of the first process
C10 rrrrrrr make / writable
C11 rrrrrrr make /usr writable
C12 rrrrrrr make /proc/sys writable
C13 rrrrrrr make /dev writable
C14 rrrrrrr make /sys writable
C15 rrrrrrr share / with whoever mounted it
C16 rrrrrrr take a mask off /proc
C17 rrrrrrr unmount /tmp
C18 rrrrrrr fsopen, fspick
C19 rrrrrro fsconfig, fsmount
C20 rrrrrrr open_tree
C21 rrrrrrr move_mount
C22 rrrrrrr mount_setattr
C23 rrrrrrr pivot_root
C24 rrrrrrr chroot
C25 rrrorrr unshare: users
C26 rrrrrrr unshare: mounts
C27 rrrrrrr unshare: network
C28 rrrrrrr unshare: processes
C29 rrrorrr unshare: IPC, names, control groups
C30 rrrorro setns into namespaces of the first process
D Files, devices, programs
D01 aaaaaaa find a file of the host anywhere below /
D02 aaaaaaa read a file of the host by its path
D03 aaaaarr the same through descriptors of the first process (CVE-2024-21626)
D04 aaaaaaa the same through our own descriptors
D05 aaaaaaa descriptors that were inherited
D06 aaararr the same through /proc/1/root
D07 aaararr the same through /proc/1/cwd
D08 rrrrrrr write over the program of the first process (CVE-2019-5736)
D09 rrrrrrr write over our own interpreter
D10 aaaaaaa sockets of engines, of dbus and of skerry
D11 aaooooa read /etc/shadow
D12 aaoooor read /root
D13 aaooooa read /var/lib
D14 rrrrror make a file in /
D15 rrrrror make a file in /usr
D16 rrrrror make a file in /etc
D17 rrooooo make a file in /dev
D18 rrrrror make a file in /home
D19 rrrrror make a file in /var
D20 rrrrror make a file beside the agent
D21 rrrrror write to /etc/passwd
D22 rrrrror write to a program of /usr
D23 rrrrrrr write to the agent
D24 rrrrrrr make and open a device: the kernel's log
D25 rrrrrrr make and open a device: memory
D26 rrrrrrr make and open a device: a SCSI disk
D27 rrrrrrr make and open a device: a virtio disk
D28 rrrorrr make and open a device: FUSE
D29 aaaaaaa open /dev/mem, kmem, port
D30 aaaaaaa open /dev/kmsg
D31 aaaaaaa open disks
D32 aaaaaaa open control devices of loops, mappers, btrfs
D33 aaaoaaa open /dev/fuse, cuse
D34 aaaaaaa open /dev/kvm, vfio
D35 aaaoara open /dev/net/tun
D36 aaaaaaa open /dev/vsock, vhost-vsock, vhost-net
D37 aaaaaaa open /dev/userfaultfd
D38 aaaaaoa open consoles
D39 aaaaaaa open the channel of a machine's first process
D40 aaaaaaa open cards, input, sound
D41 rrrrroo a program that is another user's, with setuid
D42 rrrorrr run a program of root's with setuid
D43 rrrrroo give a program capabilities
D44 rrrrrrr trusted attributes
D45 rrrrrrr a file that cannot be removed
D46 aarrrra a second name for /etc/shadow
D47 rrrrrrr a second name for the first process's program
E /proc, /sys and control groups
E01 rrrarrr write core_pattern
E02 aaaaaar write modprobe
E03 rrrarrr write panic
E04 aaaraar write sysrq-trigger
E05 rrrrrrr write hostname
E06 rrrrror write ip_forward
E07 rrrarrr write max_user_namespaces
E08 rrrrrrr write overcommit_memory
E09 rrrarrr write drop_caches
E10 rrrarrr write randomize_va_space
E11 aaaoaar write ptrace_scope
E12 rrrarrr write unprivileged_bpf_disabled
E13 aaaaaaa register a binary format
E14 rrrarrr write the limits of message queues
E15 rrrrrrr write the limits of shared memory
E16 rrrarrr write to interrupts and mtrr
E17 rrrorrr make the first process the last to be killed
E18 rrrorrr be the last to be killed ourselves
E19 rrrrrrr write our uid_map
E20 rrrrrrr write our gid_map
E21 aararrr write uevent_helper, power, module parameters
E22 aararrr write huge pages and ksm
E23 aararrr rescan the PCI bus
E24 aaaaaaa control groups: release_agent
E25 aararra control groups: notify_on_release
E26 aarorra control groups: devices.allow
E27 aarorra control groups: move a process
E28 aaaoaaa control groups: lift the limit of memory
E29 aarrrra control groups: lift the limit of processes
E30 aarorra control groups: lift the limit of processors
E31 aaaaara control groups: delegate a controller
E32 aarrroa control groups: make one
E33 rraoaro read the kernel's command line
E34 rraaaro read interrupts
E35 aaaaaro read keys
E36 aaaaaro read key-users
E37 aaaaaar read kcore
E38 rrrarrr read kmsg
E39 aaaaaao read timer_list, sched_debug, latency_stats
E40 rraaaro read slabinfo, vmallocinfo, pagetypeinfo
E41 rraaaro read kpagecount, kpageflags, kpagecgroup
E42 aaaaaaa read addresses of the kernel
E43 rrrarrr read which memory a page is
E44 aaaaaao read acpi, scsi, asound
E45 aaaaaaa read addresses of devices
E46 aaaaaao read /sys/firmware
E47 aaaaaao read serial numbers and makers (DMI)
E48 aaaaaaa read powercap, which tells what neighbours compute
E49 aaaaaao read thermal
E50 aaaaaaa debugfs, tracefs, securityfs, bpf
E51 aaaaaaa read a crashed kernel's memory
E52 aaaaaaa a folder of the host that the box has nothing of, in mountinfo
E53 aaaaarr the manager's environment in the first process's
E54 aaaaaaa the manager's secrets in the first process's arguments
F Processes, the agent, and who we are
F01 aaaoaaa see processes of others
F02 aaaaaaa look for a process of the host
F03 aaaaaaa kill a process of the host
F04 aaaraaa pidfd of a process of the host
F05 aaaaaaa open the memory of a process of the host
F06 aaaaaaa read the processors of a process of the host
F07 aaaaaaa slow a process of the host down
F08 aaaaaaa read limits of a process of the host
F09 rrrrrrr trace the agent (ATTACH)
F10 rrrrrrr trace the agent (SEIZE)
F11 rrrrrrr write the agent's memory
F12 rrrrrrr read the agent's memory
F13 rrrorrr read where the agent's descriptors lead
F14 rrrarrr list the agent's mapped files
F15 rrrorrr read the agent's auxiliary vector
F16 rrrarrr read what call the agent is in
F17 rrrrrrr read which program the agent is
F18 kkkokko change limits of the agent
F19 kkkokko change the priority of the agent
F20 rrrorrr raise our own priority
F21 rrrrrrr real-time scheduling
F22 rrrrrrr real-time I/O
F23 rrrrrrr become uid 0
F24 rrrrrrr become gid 0
F25 rrrrrrr join group 0
F26 rrrrrrr take capabilities
F27 rrrrror hold a capability over the kernel
F28 rrrorrr be without no_new_privs
F29 rrrorro be without a filter
F30 rrrrrrr take the filter off
F31 rrrrrrr change securebits
F32 rrrrrrr raise an ambient capability
F33 rrrrrrr raise the limit of descriptors
F34 rrrrrrr raise the limit of core files
F35 rrrrrrr raise the limit of locked memory
F36 rrrrrrr raise the limit of message queues
F37 rrrrrrr raise the limit of real-time priority
F38 rrrrrrr raise the limit of nice
G Network
G01 aaaaaaa an abstract socket of the host
G02 aaaaaaa a port of the host, by 127.0.0.1
G03 aaaaaaa a port of the host, by ::1
G04 aaaaaaa a port of the host, by ::ffff:127.0.0.1
G05 aaaaaaa a port of the host, by 0.0.0.0
G06 aaaaaaa the cloud's metadata address
G07 aaaaaaa the host by the address of user networks
G08 aaaaaaa the host by the address of Docker's bridge
G09 aaaaaaa 10.0.0.1
G10 aaaaaaa 192.168.0.1
G11 aaaaaaa an address anywhere
G12 aaaaaaa the cloud's metadata address, IPv6
G13 rrrrrro AF_VSOCK
G14 rrrrrra AF_VSOCK: connect to the host
G15 rrrrrro AF_VSOCK: take a port
G16 rrrrrrr NETLINK_NETFILTER
G17 rrrrrro NETLINK_AUDIT
G18 rrrorro NETLINK_KOBJECT_UEVENT
G19 rrrrrro NETLINK_GENERIC
G20 rrrrrrr NETLINK_XFRM
G21 rrrrrro NETLINK_CONNECTOR
G22 rrrrrro every other netlink
G23 rrrrrro a pair of AF_VSOCK
G24 rrrrrrr AF_PACKET
G25 rrrrrrr raw sockets
G26 rroorrr ping sockets
G27 rrrrrrr AF_ALG
G28 rrrrrrr AF_XDP
G29 rrrrrrr AF_BLUETOOTH
G30 rrrrrrr AF_TIPC
G31 rrrrrrr AF_RDS
G32 rrrrrrr AF_CAN
G33 rrrrrrr AF_KEY
G34 rrarrrr SCTP and DCCP
G35 rrrrrrr old families: AX25, IPX, X25, ATM and others
G36 rrrrrrr families 24 to 37
G37 rrrrrrr families from 39 on, and those that no kernel has
G38 rrrrrrr make a card
G39 rrrrror add a route
G40 rrrrrrr give a card an address
G41 rrrrrrr turn a card off or on
G42 rrroror mark packets
G43 rrroror pretend to be another address
G44 rrroror repair a TCP connection
G45 rrrrrrr rules of the firewall
G46 aaaoaaa another protocol on top of TCP
G47 rrooroo listen on port 80
H More than was given
H01 lllllll 100,000 descriptors
H02 lllllll 1,000 processes
H03 lllllll 1,000 zombies
H04 lllllll 1,000 threads
H05 lllllll 600 MiB in /tmp
H06 lllllll 600 MiB in /dev/shm
H07 lllllll 600 MiB in the work folder
H08 lllolll a writable place without an end
H09 lklllol 20,000 files in the work folder
H10 lllllll 64 MiB of locked memory
H11 lllolll 100 POSIX message queues
H12 lllllll 10,000 segments of shared memory
H13 lllllll 33,000 semaphores
H14 lllllll 33,000 message queues
H15 lllllll 100,000 signals that wait
H16 lllllll 100,000 timers
H17 lllllll 2,000 watchers of files
H18 lllllll 2,000 wide pipes
H19 lllllll 2,000 full sockets
H20 lllolll huge pages
H21 lllrlll 20 MB of arguments
H22 lllllll 5,000 terminals
J Memory
J01 lnlllll 2 GB of memory
J02 lnlllll 2 GB in a file without a name
"""
