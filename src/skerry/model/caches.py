"""The caches that every project has: where well-known tools are told to keep what they have fetched or built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from skerry.model.spec import Cache, Spec

FOLDER = "/.cache"


class _Tool(NamedTuple):
    """The variables that lead a tool to its cache; one without `read` cannot use a cache that it may not write to."""

    write: Mapping[str, str]
    read: Mapping[str, str] = {}


TOOLS: Mapping[str, _Tool] = {
    "pip": _Tool({"PIP_CACHE_DIR": "/.cache/pip"}),
    "uv": _Tool({"UV_CACHE_DIR": "/.cache/uv"}),
    "poetry": _Tool({"POETRY_CACHE_DIR": "/.cache/poetry"}),
    "npm": _Tool({"NPM_CONFIG_CACHE": "/.cache/npm"}),
    "yarn": _Tool({"YARN_CACHE_FOLDER": "/.cache/yarn"}),
    "pnpm": _Tool({"PNPM_CONFIG_STORE_DIR": "/.cache/pnpm"}),
    "cargo": _Tool({"CARGO_HOME": "/.cache/cargo"}),
    "go": _Tool(
        {"GOMODCACHE": "/.cache/go/mod", "GOCACHE": "/.cache/go/build"},
        {"GOPROXY": "file:///.cache/go/mod/cache/download,https://proxy.golang.org,direct"},
    ),
    "gradle": _Tool({"GRADLE_USER_HOME": "/.cache/gradle"}, {"GRADLE_RO_DEP_CACHE": "/.cache/gradle/caches"}),
    "maven": _Tool(
        {"MAVEN_OPTS": "-Dmaven.repo.local=/.cache/maven"}, {"MAVEN_OPTS": "-Dmaven.repo.local.tail=/.cache/maven"}
    ),
    "composer": _Tool(
        {"COMPOSER_CACHE_DIR": "/.cache/composer"},
        {"COMPOSER_CACHE_READ_ONLY": "1", "COMPOSER_CACHE_DIR": "/.cache/composer"},
    ),
    "ccache": _Tool(
        {"CCACHE_DIR": "/.cache/ccache"},
        {"CCACHE_DIR": "/.cache/ccache", "CCACHE_READONLY": "1", "CCACHE_TEMPDIR": "/tmp"},
    ),
}


def mounts(spec: Spec) -> list[tuple[str, str]]:
    """The name and the place of each cache that the box has; a path of the project's own goes before the table's."""
    if spec.cache is Cache.NONE:
        return []
    known = {} if spec.cache is Cache.OWN else {tool: f"{FOLDER}/{tool}" for tool in TOOLS}
    return sorted({**known, **spec.cache_paths}.items())


def kind(spec: Spec) -> str:
    """What its volumes are called: who clears the caches of a project is not to lose what is kept as data."""
    return "own" if spec.cache is Cache.OWN else "cache"


def environment(spec: Spec) -> dict[str, str]:
    """The variables by which tools in the box find their caches."""
    if spec.cache in (Cache.NONE, Cache.OWN):
        return {}
    tools = [tool for name, tool in TOOLS.items() if name not in spec.cache_paths]
    chosen = [tool.write if spec.cache is Cache.WRITE else tool.read for tool in tools]
    return {name: value for variables in chosen for name, value in variables.items()}
