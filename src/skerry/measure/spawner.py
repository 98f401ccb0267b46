"""`python spawner.py UID PROGRAM ARG...`: starts a program for each byte on stdin, as that user unless it is -1, and
prints how many nanoseconds it took to its end. What `bench/spawner.c` does, for hosts without a C compiler."""

from __future__ import annotations

import os
import sys
import time


def main() -> None:
    uid, argv = int(sys.argv[1]), sys.argv[2:]
    if uid >= 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    while os.read(0, 1):
        start = time.perf_counter_ns()
        _, status = os.waitpid(os.posix_spawn(argv[0], argv, {}), 0)
        if status:
            sys.exit(5)
        print(time.perf_counter_ns() - start, flush=True)


if __name__ == "__main__":
    main()
