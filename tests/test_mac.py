"""What a Mac tells by programs, as far as Linux has the same."""

from __future__ import annotations

import os
import subprocess
import time

from skerry import mac


def test_a_process_is_known_by_when_it_was_started() -> None:
    began = mac.start_time(os.getpid())
    assert began is not None
    assert began == mac.start_time(os.getpid())
    assert 0 < began <= time.time() + 1


def test_a_process_that_has_ended_is_none_whether_or_not_somebody_waited_for_it() -> None:
    with subprocess.Popen(["true"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert mac.start_time(child.pid) is None
    assert mac.start_time(child.pid) is None


def test_a_boot_that_nobody_names_is_unknown() -> None:
    assert mac.boot_id() == "unknown"
