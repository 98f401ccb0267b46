from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skerry.store import Store

from .server import Server, running

_schemas = itertools.count()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    with running() as server:
        yield server


@pytest.fixture
def new_postgres_url(postgres: Server) -> Iterator[Callable[[], str]]:
    import psycopg

    made: list[str] = []

    def new() -> str:
        made.append(f"s{next(_schemas)}")
        with psycopg.connect(postgres.url(made[-1])) as connection:
            connection.execute(f"CREATE SCHEMA {made[-1]}")
        return postgres.url(made[-1])

    yield new
    for schema in made:
        with psycopg.connect(postgres.url(schema)) as connection:
            connection.execute(f"DROP SCHEMA {schema} CASCADE")


@pytest.fixture
def new_sqlite_url(tmp_path: Path) -> Callable[[], str]:
    numbers = itertools.count()
    return lambda: str(tmp_path / str(next(numbers)) / "registry.db")


@pytest.fixture(params=["sqlite", "postgres"])
def new_url(request: pytest.FixtureRequest) -> Callable[[], str]:
    """Makes the URL of a registry that does not exist yet; every test that uses it runs on both databases."""
    made: Callable[[], str] = request.getfixturevalue(f"new_{request.param}_url")
    return made


@pytest.fixture
def url(new_url: Callable[[], str]) -> str:
    return new_url()


@pytest.fixture
async def store(url: str) -> AsyncIterator[Store]:
    opened = await Store.open(url)
    yield opened
    await opened.aclose()


class Racers:
    """Processes that wait for one another, and then all do the same to one registry."""

    def __init__(self, url: str, action: str, *, processes: int, **options: Any) -> None:
        command = [sys.executable, str(Path(__file__).with_name("racer.py")), url, action, json.dumps(options)]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(processes)
        ]
        for process in self._processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"

    def go(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()

    def results(self) -> list[Any]:
        return [json.loads(process.communicate(timeout=50)[0]) for process in self._processes]

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


@pytest.fixture
def race() -> Iterator[Callable[..., Racers]]:
    made: list[Racers] = []

    def start(url: str, action: str, *, processes: int = 20, **options: Any) -> Racers:
        made.append(Racers(url, action, processes=processes, **options))
        return made[-1]

    yield start
    for racers in made:
        racers.kill()
