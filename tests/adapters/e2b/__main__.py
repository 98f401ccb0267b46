"""`python -m tests.adapters.e2b`: the suites of E2B's own Python SDKs against `skerry serve`, unmodified.

The SDK comes from PyPI, into an environment of its own. Its tests are not published there: `--tests` or E2B_TESTS names
`packages/python-sdk` of a checkout of https://github.com/e2b-dev/E2B, from which they are copied, since the package in
that folder would stand before the published one; with `--interpreter` it is `python` of one of
https://github.com/e2b-dev/code-interpreter. What passes against a port that nobody listens on is a test of the SDK
alone, and is not counted.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tests.adapters.e2b.node import smoke
from tests.adapters.e2b.server import Server, closed_port
from tests.adapters.e2b.suite import INTERPRETER, VERSIONS, Suite


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.adapters.e2b", description=__doc__)
    parser.add_argument("--tests", default=os.environ.get("E2B_TESTS"), help="packages/python-sdk of a checkout of E2B")
    parser.add_argument("--sdk", choices=[*VERSIONS], action="append", help="Which SDK; all if none is named.")
    parser.add_argument("--provider", choices=["docker", "local"], default="docker")
    parser.add_argument("--interpreter", action="store_true", help="The SDK of the code interpreter.")
    parser.add_argument("--domain", action="store_true", help="Domain mode, in a network namespace; needs root.")
    parser.add_argument("--node", action="store_true", help="A smoke of the newest package for Node, and no suite.")
    parser.add_argument("--least", type=int, default=0, help="Fail if fewer live tests than this pass.")
    parser.add_argument("rest", nargs="*", help="Arguments of pytest, in the place of all live tests.")
    chosen = parser.parse_args()
    if chosen.node:
        with Server(chosen.provider, domain=False) as server:
            return smoke(server.variables)
    if not chosen.tests or not Path(chosen.tests, "tests").is_dir():
        print(
            "the tests of E2B's SDK are not here: git clone https://github.com/e2b-dev/E2B, and give", file=sys.stderr
        )
        print("E2B_TESTS=.../E2B/packages/python-sdk", file=sys.stderr)
        return 2
    is_enough = True
    versions = [*INTERPRETER] if chosen.interpreter else chosen.sdk or [*VERSIONS]
    for version in versions:
        suite = Suite(version, Path(chosen.tests))
        suite.install()
        control = suite.control(closed_port())
        with Server(chosen.provider, domain=chosen.domain, interpreter=chosen.interpreter) as server:
            results = suite.run(server.variables, chosen.rest, inside=server.namespace)
        live = {name: passed for name, passed in results.items() if name not in control}
        passed = sum(live.values())
        print(
            f"{suite.name} {suite.installed}: {passed} of {len(live)} live tests passed; {len(control)} need no server"
        )
        for name in sorted(name for name, is_good in live.items() if not is_good):
            print(f"  failed: {name}")
        is_enough = is_enough and passed >= chosen.least
    return 0 if is_enough else 1


if __name__ == "__main__":
    sys.exit(main())
