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
from skerry.errors import all_errors

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/skerry"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROVIDERS = sorted(PYPROJECT["project"]["entry-points"]["skerry.providers"])
FILES = sorted(SOURCE.rglob("*.py"))
GUEST = sorted((SOURCE / "agent/guest").rglob("*.py"))

LONG_FILES = {
    "sync/api.py": "generated",
}
MAX_LINES = 450

PUBLIC = {
    "aconnect", "connect", "AsyncRemoteManager",
    "AsyncFleet", "AsyncSandbox", "AsyncSandboxManager", "AsyncSandboxPool", "Cache", "Cause", "ExecResult",
    "FileEvent", "FileInfo", "FileType", "Filter", "Fleet", "FleetSpec", "Metrics", "Mount", "Network", "Port",
    "ProcessInfo", "Record", "Restart", "Sandbox", "SandboxId", "SandboxManager", "SandboxPool", "Secret",
    "ServiceStatus", "Spec", "State", "Workspace", "__version__",
    "load_fleet", *(error.__name__ for error in all_errors()),
}  # fmt: skip
"""A change here is a change of the public interface: it belongs into CHANGELOG.md."""

NAMED_ELSEWHERE = {
    "model/spec.py": {"local"},
    "config.py": {"local"},
    "testing/plugin.py": {"mock"},
    "cli/port.py": {"vmdocker"},
    "vm/images/recipes.py": {"docker"},
    "providers/vmdocker/machines.py": {"docker", "firecracker"},
    "providers/vmdocker/engine.py": {"firecracker", "qemu", "vfkit"},
}
"""Defaults, the fixture that is there for tests, the name of an image, and of hypervisors."""


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
    passed_on_whole = ("start.py", "cli/forkserver.py")
    found = []
    for path, tree in trees():
        if path in GUEST or relative(path) in ("config.py", *passed_on_whole):
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
    assert own.is_dir() or own.with_suffix(".py").is_file()
    found = set()
    for path, tree in trees():
        places = (own, SOURCE / "vm" / provider)  # a hypervisor is called as its provider
        if {*places} & {*path.parents} or path in [place.with_suffix(".py") for place in places]:
            continue
        named = provider in set(strings(tree))
        imported = any(
            isinstance(node, ast.ImportFrom) and f"{node.module or ''}.".startswith(f"skerry.providers.{provider}.")
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


WALK = re.compile(r"^\d+\. `([\w/]+\.py):([\w.]+)`", re.MULTILINE)


def walks() -> dict[str, list[tuple[str, str]]]:
    """The walks of the architecture's page by their titles: files and functions, in order."""
    text = (ROOT / "docs/explanation/architecture.md").read_text().partition("\n## Walks\n")[2].partition("\n## ")[0]
    titles = re.split(r"^\*\*(.+)\*\*$", text, flags=re.MULTILINE)[1:]
    return {title: WALK.findall(steps) for title, steps in zip(titles[::2], titles[1::2], strict=True)}


def defined_in(path: Path) -> set[str]:
    """Functions and classes of a module, those in classes by `Class.function`."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
            found.update(f"{node.name}.{each.name}" for each in inner)
    return found


@pytest.mark.parametrize("title", walks())
def test_a_walk_goes_from_function_to_function_and_never_back_to_a_file(title: str) -> None:
    steps = walks()[title]
    assert len(steps) > 5
    missing = [f"{file}:{name}" for file, name in steps if name not in defined_in(SOURCE / file)]
    assert not missing
    files = [file for number, (file, _) in enumerate(steps) if not number or steps[number - 1][0] != file]
    assert len(files) == len(set(files)), "it goes back and forth between files"


def test_there_are_walks() -> None:
    assert len(walks()) >= 2
