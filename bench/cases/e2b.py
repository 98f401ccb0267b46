"""Create and first command with E2B's SDK, unmodified, on our server, beside the same over REST; and many at once."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
from install_peers import python_of

from skerry.measure.figures import Figure, ms, not_run, p50, ratio

from .server import bearer, execute, free_port, made, remove, seconds_of, served
from .settings import Settings

_CASE = "e2b"
_CLIENT = str(Path(__file__).parents[1] / "e2b_client.py")
_AT_ONCE = 100


async def e2b(settings: Settings) -> list[Figure]:
    python = python_of("E2B")
    if not python.exists():
        return [not_run(_CASE, "E2B's SDK", "not installed; bench/install_peers.py does that")]
    port = free_port()
    variables = {"SKERRY_SERVER__E2B_LISTEN": f"127.0.0.1:{port}", "SKERRY_MAX_SANDBOXES": "0"}
    with (
        TemporaryDirectory(prefix="skb-", dir="/tmp") as folder,
        served(folder, variables) as (url, token, _),
        httpx.Client(headers=bearer(token), timeout=30, trust_env=False) as client,
        _sdk(python, port, token) as sdk,
    ):
        theirs, rest = [], []
        for round in range(settings.rounds(30) + 1):
            times = _told(sdk, "one"), _over_rest(client, url)
            if round:  # the first imports, and opens connections
                theirs.append(times[0])
                rest.append(times[1])
        many = [_told(sdk, f"many {_AT_ONCE}") for _ in range(settings.rounds(3))]
    what = "create and first command with E2B's SDK"
    return [
        ratio(_CASE, what, theirs, rest, against="the same over REST", at_most=2),
        Figure(case=_CASE, what=f"{_AT_ONCE} at once, each with a command", measured=ms(p50(many)), value=None),
    ]


def _sdk(python: Path, port: int, token: str) -> subprocess.Popen[str]:
    url = f"http://127.0.0.1:{port}"
    env = {**os.environ, "E2B_API_URL": url, "E2B_SANDBOX_URL": url, "E2B_API_KEY": token}
    pipe = subprocess.PIPE
    return subprocess.Popen([python, _CLIENT], env=env, stdin=pipe, stdout=pipe, text=True)


def _told(sdk: subprocess.Popen[str], line: str) -> float:
    assert sdk.stdin is not None
    assert sdk.stdout is not None
    sdk.stdin.write(f"{line}\n")
    sdk.stdin.flush()
    return float(sdk.stdout.readline())


def _over_rest(client: httpx.Client, url: str) -> float:
    id, took = seconds_of(lambda: _first(client, url))
    remove(client, url, id)
    return took


def _first(client: httpx.Client, url: str) -> str:
    id = made(client, url)
    execute(client, url, id)
    return id
