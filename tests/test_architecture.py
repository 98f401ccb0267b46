"""What keeps the code in its shape: public names, one place for each thing, imports that point one way."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import skerry

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/skerry"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROVIDERS = sorted(PYPROJECT["project"]["entry-points"]["skerry.providers"])
FILES = sorted(SOURCE.rglob("*.py"))
GUEST = sorted((SOURCE / "agent/guest").glob("*.py"))

LONG_FILES = {
    "sync.py": "generated",
}
MAX_LINES = 400

PUBLIC = {
    "AgentError", "AgentUnreachable", "AsyncFleet", "AsyncSandbox", "AsyncSandboxManager", "AsyncSandboxPool", "Cache",
    "CallTimeout", "Cause", "ConfigError", "CreateFailed", "ExecResult", "FileError", "FileEvent", "FileInfo",
    "FileType", "Filter", "Fleet", "FleetSpec", "InterpreterNotFound", "InvalidSpec", "LimitReached", "Metrics",
    "Mount", "Network", "NotFound", "PathNotFound", "ProcessInfo", "ProviderError", "ProviderUnavailable", "Record",
    "Sandbox", "SandboxId", "SandboxManager", "SandboxPool", "SkerryError", "Spec", "State", "Unsupported", "Workspace",
    "WrongState", "__version__", "load_fleet",
}  # fmt: skip
"""A change here is a change of the public interface: it belongs into CHANGELOG.md."""

NAMED_ELSEWHERE = {
    "spec.py": {"local"},
    "config.py": {"local"},
    "testing/plugin.py": {"mock"},
    "providers/mock/builtins.py": {"local"},
    "cli/docker_env.py": {"vmdocker"},
    "vm/images/recipes.py": {"docker"},
    "providers/vmdocker/hosting.py": {"docker", "firecracker"},
    "providers/vmdocker/settings.py": {"firecracker", "qemu"},
}
"""Defaults, the fixture that is there for tests, a word of the shell, the name of an image, and of hypervisors."""


def relative(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in FILES:
        yield path, ast.parse(path.read_text())


def test_the_public_names_are_these() -> None:
    assert set(skerry.__all__) == PUBLIC
    assert set(dir(skerry)) == PUBLIC
    for name in PUBLIC:
        assert getattr(skerry, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        skerry.nonsense  # type: ignore[attr-defined]  # noqa: B018


def test_only_the_configuration_reads_the_environment() -> None:
    found = []
    for path, tree in trees():
        if path in GUEST or relative(path) == "config.py":
            continue
        for node in ast.walk(tree):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if name in ("environ", "environb", "getenv", "getenvb"):
                found.append(f"{relative(path)}:{node.lineno}")  # type: ignore[attr-defined]
    assert not found


def strings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_provider_is_named_only_in_its_own_package(provider: str) -> None:
    own = SOURCE / "providers" / provider
    assert own.is_dir()
    found = set()
    for path, tree in trees():
        if {own, SOURCE / "vm" / provider} & set(path.parents):  # a hypervisor is called as its provider
            continue
        named = provider in set(strings(tree))
        imported = any(
            isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"skerry.providers.{provider}")
            for node in ast.walk(tree)
        )
        if (named or imported) and provider not in NAMED_ELSEWHERE.get(relative(path), set()):
            found.add(relative(path))
    assert not found


@pytest.mark.parametrize("path", GUEST, ids=lambda path: path.name)
def test_the_agent_imports_only_the_standard_library_and_itself(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        for name in names:
            top = name.partition(".")[0]
            assert top in sys.stdlib_module_names or top == "skerry_agent", f"{path.name}:{node.lineno}"


@pytest.mark.parametrize("path", GUEST, ids=lambda path: path.name)
def test_the_agent_is_written_in_the_python_of_old_boxes(path: Path) -> None:
    ast.parse(path.read_text(), feature_version=(3, 8))
    for node in ast.walk(ast.parse(path.read_text())):
        assert not isinstance(node, ast.Match), f"{path.name}:{node.lineno}"


def test_no_file_is_long_but_for_a_reason() -> None:
    long = {relative(path) for path in FILES if len(path.read_text().splitlines()) > MAX_LINES}
    assert long <= set(LONG_FILES), "split it by subject, or give the reason here"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_a_module_says_in_its_first_line_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


def loaded_by(statement: str) -> set[str]:
    argv = [sys.executable, "-I", "-X", "importtime", "-c", statement]
    report = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30).stderr
    return {line.rpartition("|")[2].strip() for line in report.splitlines() if line.startswith("import time:")}


def test_importing_skerry_does_no_work() -> None:
    loaded = loaded_by("import skerry")
    assert "skerry" in loaded
    assert not loaded & {"asyncio", "msgspec", "click", "rich", "subprocess", "socket", "tempfile", "typing_extensions"}
    assert not {name for name in loaded if name.startswith("skerry.")} - {"skerry.version"}


def test_importing_a_sandbox_loads_no_provider() -> None:
    loaded = loaded_by("import skerry; skerry.Sandbox")
    assert "asyncio" in loaded
    assert not {name for name in loaded if re.match(rf"skerry\.providers\.({'|'.join(PROVIDERS)})", name)}
    assert not loaded & {"click", "rich", "sqlite3"}


def test_imports_point_one_way() -> None:
    if not PYPROJECT["tool"]["importlinter"].get("contracts"):
        pytest.skip("pyproject.toml holds no import contracts yet")
    linter = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
