"""Builds the folders that `runtime` gives out: the agent, and an interpreter with all that it needs to run anywhere."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from skerry.errors import ProviderError

from .elf import Elf
from .runtime import guest_sources

_COLLECT = Path(__file__).parent / "collect.py"
_TIMEOUT_S = 120
_LIBRARY = re.compile(r"^\s*(\S+) => (.+?)(?: \(0x[0-9a-f]+\))?$", re.MULTILINE)


def make(folder: Path, fill: Callable[[Path], None]) -> None:
    """Build aside and put in place whole; whoever builds the same folder at the same time builds the same."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent) as parent:
            aside = Path(parent, folder.name)
            aside.mkdir()
            fill(aside)
            _make_readable(aside)
            try:
                aside.rename(folder)
            except OSError:
                if not folder.is_dir():
                    raise
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ProviderError(f"cannot build {folder}: {error}") from error


def fill_with_agent(folder: Path, python: str) -> None:
    for source in guest_sources():
        shutil.copyfile(source, folder / source.name)
    # Unchecked hashes: the compiled files stay good whatever a copy or a mount does to times.
    compile_all = ("-m", "compileall", "-q", "-d", "agent", "--invalidation-mode", "unchecked-hash")
    _run(python, "-I", "-S", *compile_all, folder)


def fill_with_interpreter(folder: Path, python: Path) -> None:
    binary = Elf(python)
    if binary.loader is None:
        raise ValueError(f"{python} is statically linked, so it has no loader to bring along")
    extensions = _run(python, "-I", "-S", _COLLECT, folder, *_imports_of_the_agent()).splitlines()
    library = folder / "lib"
    library.mkdir(exist_ok=True)
    for name, path in _needed_libraries(binary.loader, [str(python), *extensions]).items():
        (library / name).write_bytes(Elf(path).stripped())
    for extension in map(Path, extensions):
        extension.write_bytes(Elf(extension).stripped())
    (folder / "bin").mkdir()
    for source, program in ((python, folder / "bin/python3"), (Path(binary.loader), library / "ld.so")):
        program.write_bytes(Elf(source).stripped())
        program.chmod(0o755)


def _imports_of_the_agent() -> list[str]:
    """The standard modules that the agent names anywhere, also those that it imports only when needed."""
    names: set[str] = set()
    for source in guest_sources():
        for node in ast.walk(ast.parse(source.read_bytes())):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module)
    return sorted(name for name in names if name.partition(".")[0] in sys.stdlib_module_names)


def _needed_libraries(loader: str, programs: Iterable[str]) -> dict[str, Path]:
    """Every shared library that the programs load, by the name they ask for."""
    found: dict[str, Path] = {}
    for program in programs:
        for name, path in _LIBRARY.findall(_run(loader, "--list", program)):
            if not path.startswith("/"):
                raise ValueError(f"{program} needs {name}: {path}")
            found[name] = Path(path)
    return found


def _make_readable(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)


def _run(*argv: str | Path) -> str:
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode:
        raise ValueError(f"{os.fspath(argv[0])} failed with code {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout
