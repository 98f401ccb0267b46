"""The built files of the page are those of its sources, and small; seen without Node."""

from __future__ import annotations

import gzip
import hashlib
import re
from pathlib import Path

import pytest
from surfaces.server.world import Served

from skerry.surfaces.page.assets import STATIC

SOURCES = Path(__file__).parents[3] / "page"
OTHERS = (".npmrc", "build.mjs", "package-lock.json", "package.json", "tsconfig.json")
MOST = 250_000


def _fingerprint() -> str:
    """The twin of the function of this name in page/build.mjs."""
    below = [path.relative_to(SOURCES).as_posix() for path in (SOURCES / "src").rglob("*") if path.is_file()]
    hash = hashlib.sha256()
    for name in sorted((*OTHERS, *below)):
        content = (SOURCES / name).read_bytes()
        hash.update(f"{name}\0{len(content)}\0".encode())
        hash.update(content)
    return hash.hexdigest()


def test_the_built_files_are_those_of_the_sources() -> None:
    recorded = (STATIC / "sources.sha256").read_text().strip()
    assert recorded == _fingerprint(), "page/ has changed since it was built: run `make page`"


def test_what_a_browser_loads_is_small() -> None:
    loaded = [path for path in STATIC.iterdir() if path.suffix in (".js", ".css")]
    assert sum(len(gzip.compress(path.read_bytes())) for path in loaded) < MOST


def test_the_lock_file_names_versions_and_no_other_registry_than_the_usual() -> None:
    lock = (SOURCES / "package-lock.json").read_text()
    hosts = set(re.findall(r'"resolved": "https?://([^/"]+)', lock))
    assert hosts <= {"registry.npmjs.org"}
    pinned = re.findall(r'^    "[^"]+": "([^"]+)"', (SOURCES / "package.json").read_text(), re.MULTILINE)
    assert [each for each in pinned if re.match(r"[\^~*]", each)] == []


def test_no_source_of_the_page_makes_html_of_text() -> None:
    forbidden = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc")
    for path in (SOURCES / "src").glob("*.ts*"):
        assert forbidden.search(path.read_text()) is None, path.name


async def test_the_page_has_a_strict_policy_and_is_asked_for_anew(served: Served) -> None:
    client = await served.anonymous()
    answer = await client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "<script>" not in answer.text
    assert "style=" not in answer.text


async def test_files_of_the_page_are_kept_for_ever_under_the_hash_in_their_names(served: Served) -> None:
    client = await served.anonymous()
    names = re.findall(r'"(/assets/[^"]+)"', (await client.get("/")).text)
    assert len(names) == 3
    for name in names:
        answer = await client.get(name)
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
        assert answer.content == (STATIC / Path(name).name).read_bytes()
        plain = await client.get(name, headers={"accept-encoding": "identity"})
        assert plain.content == answer.content
        assert "content-encoding" not in plain.headers


@pytest.mark.parametrize("path", ["index.html", "sources.sha256", "..%2Fassets.py", "%2e%2e/assets.py", "", "no.js"])
async def test_nothing_but_built_files_is_answered(served: Served, path: str) -> None:
    client = await served.anonymous()
    answer = await client.get(f"/assets/{path}")
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"


async def test_the_page_of_a_name_that_is_not_the_servers_is_refused(served: Served) -> None:
    client = await served.anonymous()
    assert (await client.get("/", headers={"host": "evil.example"})).status_code == 421
