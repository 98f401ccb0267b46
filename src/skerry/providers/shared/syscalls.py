"""The system calls that a box may make: one table for every provider that hands the kernel a filter.

Refused is what reaches beyond the box or widens the kernel's attack surface: mounts, namespaces, modules, keys, bpf,
tracing, clocks, NUMA placement, io_uring (it makes sockets behind a socket filter's back). A call that is younger
than this table is answered ENOSYS, so that a new kernel never opens what nobody has judged yet.
"""

from __future__ import annotations

from collections.abc import Mapping

MACHINES = ("x86_64", "aarch64")
"""Machine names, as `os.uname` spells them, in the order of the numbers below."""

LAST_KNOWN_CALL = 462

Numbers = tuple[int | None, int | None]
"""A call's number on each of `MACHINES`; None where the machine has no such call."""

CLONE_NEW_ANY = 0x7E020000
TERMINAL_INJECTION = (0x5412, 0x541C)
"""The ioctls TIOCSTI and TIOCLINUX."""
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
SOCKET_FAMILIES = (AF_UNIX, AF_INET, AF_INET6)
"""What `socket` may make, beside AF_NETLINK for NETLINK_ROUTE."""
NETLINK_ROUTE = 0

_REFUSED = """
_sysctl:156:- acct:163:89 add_key:248:217 adjtimex:159:171 afs_syscall:183:- bpf:321:280 chroot:161:51
clock_adjtime:305:266 clock_settime:227:112 create_module:174:- delete_module:176:106 epoll_ctl_old:214:-
epoll_wait_old:215:- fanotify_init:300:262 fanotify_mark:301:263 finit_module:313:273 fsconfig:431:431
fsmount:432:432 fsopen:430:430 fspick:433:433 get_kernel_syms:177:- get_mempolicy:239:236 getpmsg:181:-
init_module:175:105 ioperm:173:- iopl:172:- kcmp:312:272 kexec_file_load:320:294 kexec_load:246:104 keyctl:250:219
listmount:458:458 lookup_dcookie:212:18 lsm_set_self_attr:460:460 mbind:237:235 memfd_secret:447:447
migrate_pages:256:238 modify_ldt:154:- mount:165:40 mount_setattr:442:442 move_mount:429:429 move_pages:279:239
name_to_handle_at:303:264 nfsservctl:180:42 open_by_handle_at:304:265 open_tree:428:428 perf_event_open:298:241
pidfd_getfd:438:438 pivot_root:155:41 process_madvise:440:440 process_mrelease:448:448 process_vm_readv:310:270
process_vm_writev:311:271 ptrace:101:117 putpmsg:182:- query_module:178:- quotactl:179:60 quotactl_fd:443:443
reboot:169:142 request_key:249:218 security:185:- set_mempolicy:238:237 set_mempolicy_home_node:450:450
setdomainname:171:162 sethostname:170:161 setns:308:268 settimeofday:164:170 statmount:457:457 swapoff:168:225
swapon:167:224 sysfs:139:- syslog:103:116 tuxcall:184:- umount2:166:39 unshare:272:97 uselib:134:-
userfaultfd:323:282 ustat:136:- vhangup:153:58 vmsplice:278:75 vserver:236:-
"""
REFUSED: Mapping[str, Numbers] = {
    name: (int(first), None if second == "-" else int(second))
    for name, first, second in (call.split(":") for call in _REFUSED.split())
}

# answered ENOSYS: libc, libuv and tokio then fall back to the older calls, whose arguments a filter can see
ABSENT: Mapping[str, Numbers] = {
    "clone3": (435, 435),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
}

# allowed or not by their arguments
JUDGED: Mapping[str, tuple[int, int]] = {
    "clone": (56, 220),
    "ioctl": (16, 29),
    "socket": (41, 198),
    "socketpair": (53, 199),
}

# all the others; by name only, as a filter by number lets through what the tables above do not stop
_ALLOWED = """
accept accept4 access alarm arch_prctl bind brk cachestat capget capset chdir chmod chown clock_getres
clock_gettime clock_nanosleep close close_range connect copy_file_range creat dup dup2 dup3 epoll_create
epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 execve execveat exit exit_group
faccessat faccessat2 fadvise64 fallocate fchdir fchmod fchmodat fchmodat2 fchown fchownat fcntl fdatasync fgetxattr
flistxattr flock fork fremovexattr fsetxattr fstat fstatfs fsync ftruncate futex futex_requeue futex_wait
futex_waitv futex_wake futimesat get_robust_list get_thread_area getcpu getcwd getdents getdents64 getegid geteuid
getgid getgroups getitimer getpeername getpgid getpgrp getpid getppid getpriority getrandom getresgid getresuid
getrlimit getrusage getsid getsockname getsockopt gettid gettimeofday getuid getxattr inotify_add_watch
inotify_init inotify_init1 inotify_rm_watch io_cancel io_destroy io_getevents io_pgetevents io_setup io_submit
ioprio_get ioprio_set kill landlock_add_rule landlock_create_ruleset landlock_restrict_self lchown lgetxattr link
linkat listen listxattr llistxattr lremovexattr lseek lsetxattr lsm_get_self_attr lsm_list_modules lstat madvise
map_shadow_stack membarrier memfd_create mincore mkdir mkdirat mknod mknodat mlock mlock2 mlockall mmap mprotect
mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedsend mq_unlink mremap mseal msgctl msgget msgrcv msgsnd
msync munlock munlockall munmap nanosleep newfstatat open openat openat2 pause personality pidfd_open
pidfd_send_signal pipe pipe2 pkey_alloc pkey_free pkey_mprotect poll ppoll prctl pread64 preadv preadv2 prlimit64
pselect6 pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv recvfrom recvmmsg recvmsg
remap_file_pages removexattr rename renameat renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending
rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max
sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval
sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield seccomp select semctl semget semop
semtimedop sendfile sendmmsg sendmsg sendto set_robust_list set_thread_area set_tid_address setfsgid setfsuid
setgid setgroups setitimer setpgid setpriority setregid setresgid setresuid setreuid setrlimit setsid setsockopt
setuid setxattr shmat shmctl shmdt shmget shutdown sigaltstack signalfd signalfd4 splice stat statfs statx symlink
symlinkat sync sync_file_range syncfs sysinfo tee tgkill time timer_create timer_delete timer_getoverrun
timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime times tkill truncate umask uname unlink
unlinkat utime utimensat utimes vfork wait4 waitid write writev
"""
ALLOWED = frozenset(_ALLOWED.split())
