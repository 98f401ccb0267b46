from __future__ import annotations

import errno
import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines.api import ask, ask_json
from escape import bpf

from skerry.providers.local import seccomp
from skerry.providers.shared import syscalls
from skerry.providers.shared.seccomp import oci_profile

KILLS = {0, 0x80000000}
UNKNOWN = {0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS}
HEADER = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")


def test_every_call_has_one_place_in_the_table() -> None:
    tables = [syscalls.ALLOWED, syscalls.REFUSED.keys(), syscalls.ABSENT.keys(), syscalls.JUDGED.keys()]
    assert sum(map(len, tables)) == len(frozenset[str]().union(*tables))


@pytest.mark.skipif(not HEADER.exists(), reason="no headers of x86_64 here")
def test_the_table_knows_the_calls_of_the_kernels_headers() -> None:
    known = {name: int(number) for name, number in re.findall(r"#define __NR_(\w+) (\d+)", HEADER.read_text())}
    numbered = {**syscalls.REFUSED, **syscalls.ABSENT, **syscalls.JUDGED}
    young = {name for name, number in known.items() if number > syscalls.LAST_KNOWN_CALL}
    assert set(known) - young <= syscalls.ALLOWED | set(numbered)
    assert {name: known[name] for name in numbered if name in known} == {
        name: numbers[0] for name, numbers in numbered.items() if name in known
    }


@pytest.mark.parametrize("call", list(syscalls.JUDGED))
def test_each_call_that_is_judged_meets_exactly_one_answer(call: str) -> None:
    rules = [rule for rule in json.loads(oci_profile())["syscalls"] if rule["names"] == [call]]
    for values in arguments(200):
        answers = {rule.get("errnoRet", 0) for rule in rules if all(holds(each, values) for each in rule["args"])}
        assert len(answers) == 1, values


def holds(condition: dict[str, int], values: tuple[int, ...]) -> bool:
    return values[condition["index"]] & condition["value"] == condition["valueTwo"]


def arguments(count: int) -> Iterator[tuple[int, int, int]]:
    chosen = random.Random(1)
    special = [0, 1, 2, 3, 9, 10, 16, 17, 40, 0x5411, 0x5412, 0x541C, 0x100005412, 1 << 32 | 1, 1 << 32 | 40, 2**64 - 1]
    special += [1 << bit for bit in range(64)]
    values = special + [chosen.getrandbits(bits) for bits in (5, 33, 64) for _ in range(count)]
    for value in values:
        for other in (0, 9, 1 << 32, chosen.choice(special)):
            yield value, value, other
            yield syscalls.AF_NETLINK, other, value


@pytest.fixture(params=["docker", "podman"])
def pid(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    """The first process of a container under the profile, which Podman wants in a file."""
    address: str = request.getfixturevalue(f"{request.param}_daemon").address
    image: str = request.getfixturevalue(f"{request.param}_images")["busybox"]
    file = tmp_path / "seccomp.json"
    file.write_text(oci_profile())
    option = f"seccomp={oci_profile() if request.param == 'docker' else file}"
    host = {"NetworkMode": "none", "CapDrop": ["ALL"], "SecurityOpt": ["no-new-privileges", option]}
    wanted = {"Image": image, "Cmd": ["/bin/sleep", "60"], "User": "65532", "HostConfig": host}
    container = ask_json(address, "POST", "/containers/create", json_body=wanted)["Id"]
    try:
        ask(address, "POST", f"/containers/{container}/start")
        yield ask_json(address, "GET", f"/containers/{container}/json")["State"]["Pid"]
    finally:
        ask(address, "DELETE", f"/containers/{container}", {"force": "1"})


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers below are those of x86_64")
def test_the_kernel_got_the_same_filter_as_for_the_boxes_of_bubblewrap(pid: int) -> None:
    arch = seccomp.ARCHITECTURES["x86_64"]
    try:
        theirs, ours = bpf.installed(pid), bpf.parse(seccomp.program("x86_64"))
    except OSError as error:
        pytest.skip(f"this kernel does not show a filter: {error}")
    differing = {n for n in range(1024) if bpf.judge(theirs, arch, n, 1) != bpf.judge(ours, arch, n, 1)}
    # Numbers that no call has, and calls that are younger than the engine's libseccomp: never allowed.
    assert differing <= {*range(335, 424), *range(451, syscalls.LAST_KNOWN_CALL + 1)}
    assert {bpf.judge(theirs, arch, number) for number in differing} <= UNKNOWN
    for number, _ in syscalls.JUDGED.values():
        for values in arguments(50):
            assert bpf.judge(theirs, arch, number, *values) == bpf.judge(ours, arch, number, *values), (number, values)
    for foreign, number in ((0x40000003, 20), (seccomp.ARCHITECTURES["aarch64"], 172), (arch, 0x40000000 | 39)):
        assert bpf.judge(theirs, foreign, number) in {*KILLS, *UNKNOWN}
