"""python -m tests.escape [--provider NAME ...] [--json]: try the whole catalogue in boxes of every kind that this host
has, and print how each case ended. It fails where that is not what is published.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from .catalogue import COLUMNS, cases, differing

_TESTS = Path(__file__).parents[1]
_WHERE = dict(
    zip(
        COLUMNS,
        (
            "local/test_escape.py::TestLocal",
            "local/test_escape.py::TestLocalAsUser",
            "dockerapi/test_engine_escape.py::TestDocker",
            "dockerapi/test_engine_escape.py::TestGvisor",
            "dockerapi/test_engine_escape.py::TestPodman",
            "incus/test_incus_escape.py::TestIncus",
            "qemu/test_qemu_escape.py::TestQemu",
        ),
        strict=True,
    )
)
_TEST = "test_every_case_of_the_catalogue_ends_as_published"


class Heard:
    """What the tests found, and why others did not run."""

    def __init__(self) -> None:
        self.verdicts: dict[str, dict[str, str]] = {}
        self.reasons: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.verdicts |= {name: found for name, found in report.user_properties if isinstance(found, dict)}
        column = next((each for each, where in _WHERE.items() if f"{where}::" in report.nodeid), None)
        if column and not report.passed:
            told = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.reasons[column] = told.removeprefix("Skipped: ")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.escape", description=__doc__)
    parser.add_argument(
        "--provider", action="append", metavar="NAME", help="a column, or how one begins: local, docker"
    )
    parser.add_argument("--json", action="store_true", help="verdicts by column and case, and reasons, for programs")
    chosen = parser.parse_args()
    wanted = [each for each in COLUMNS if each.lower().startswith(tuple(map(str.lower, chosen.provider or [""])))]
    if not wanted:
        parser.error(f"there is no such column; there are: {'; '.join(COLUMNS)}")
    heard = Heard()
    with redirect_stdout(sys.stderr):
        where = [f"{_TESTS}/providers/{_WHERE[each]}::{_TEST}" for each in wanted]
        pytest.main(["-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", *where], plugins=[heard])
    if chosen.json:
        print(json.dumps({"verdicts": heard.verdicts, "reasons": heard.reasons}, indent=1))
    else:
        _print(wanted, heard)
    return int(any(differing(column, found) for column, found in heard.verdicts.items()) or not heard.verdicts)


def _print(wanted: list[str], heard: Heard) -> None:
    there = [each for each in wanted if each in heard.verdicts]
    print("     " + " ".join(f"{each:11}" for each in there))
    for case in cases():
        ends = " ".join(f"{heard.verdicts[column][case.id]:11}" for column in there)
        print(f"{case.id}  {ends} {case.text}")
    for column in wanted:
        if column not in there:
            print(f"{column}: {heard.reasons.get(column, 'its test did not run')}")
        elif wrong := differing(column, heard.verdicts[column]):
            print(f"{column}: {len(wrong)} not as published: {', '.join(wrong)}")


if __name__ == "__main__":
    sys.exit(main())
