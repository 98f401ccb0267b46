"""Bundles that a box mounts: the agent and, for a box without Python, an interpreter. Read-only folders, made once."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from skerry.agent import collect
from skerry.errors import ProviderError
from skerry.version import __version__

_log = logging.getLogger("skerry.agent")

GUEST = Path(__file__).parent / "guest"
COLLECT = Path(collect.__file__)
"""Script that makes a portable interpreter of the one that runs it."""
_CONTEXT = (GUEST / "interpreter/context.py", GUEST / "interpreter/runs.py")
_TIMEOUT_S = 120
_parsing = threading.Lock()
"""Python 3.11 cannot parse sources in several threads at once."""


class Portable(msgspec.Struct, frozen=True):
    """A self-contained interpreter: its libraries, its loader, and the standard modules that the agent needs."""

    folder: Path
    python: str
    """The host's interpreter that it is a copy of; the agent is to be compiled for this one."""

    def argv(self, mount: str) -> list[str]:
        """The command that runs it, up to the script, where the box sees `folder` at `mount`."""
        return portable_argv(mount)


def portable_argv(mount: str) -> list[str]:
    """The command that runs any portable interpreter, up to the script."""
    library = f"{mount}/lib"
    return [f"{library}/ld.so", "--library-path", library, f"{mount}/bin/python3", "-I", "-S", "-B"]


def agent_folder(cache: Path, python: str) -> Path:
    """A world-readable folder with the agent (`start.py`), compiled for that interpreter. Raises ProviderError."""
    folder = cache / f"agent-{_key(python)}"
    if not folder.is_dir():
        make_folder(folder, lambda aside: _fill_with_agent(aside, python))
    return folder


def portable(cache: Path) -> Portable:
    """The portable interpreter of this host: a copy of the one that runs us. Raises ProviderError."""
    python = os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]
    folder = cache / f"python-{_key(python)}"
    if not folder.is_dir():
        make_folder(folder, lambda aside: fill_with_interpreter(aside, Path(python)))
    return Portable(folder, python)


def make_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Build a folder aside and put it in place whole; whoever builds it at the same time builds the same. Raises
    ProviderError."""
    import subprocess
    import tempfile

    try:
        folder.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent) as parent:
            aside = Path(parent, folder.name)
            aside.mkdir()
            fill(aside)
            for path in [aside, *aside.rglob("*")]:
                if not path.is_symlink():
                    path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
            try:
                aside.rename(folder)
            except OSError:
                if not folder.is_dir():
                    raise
                _log.debug("%s was built by another process meanwhile", folder)
            else:
                _log.info("built %s", folder)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ProviderError(f"cannot build {folder}: {error}") from error


def _guest_files() -> list[Path]:
    """All that a box gets: also kernels, which run in interpreters of its own."""
    kernels = [path for path in GUEST.glob("interpreter/*") if path.suffix in (".py", ".sh", ".js")]
    return sorted({*_guest_sources(), *kernels})


def _guest_sources() -> list[Path]:
    return sorted((*GUEST.glob("*.py"), *GUEST.glob("vm/*.py"), *_CONTEXT))


def _key(python: str) -> str:
    """A name for this version, the agent's sources, what collects an interpreter, and that one, found without running
    it."""
    try:
        binary = os.path.realpath(python)
        seen = os.stat(binary)
    except OSError as error:
        raise ProviderError(f"the interpreter {python!r} cannot be used: {error.strerror}") from error
    digest = hashlib.sha256(f"{__version__}\0{binary}\0{seen.st_mtime_ns}\0{seen.st_size}".encode())
    for source in (COLLECT, *_guest_files()):
        digest.update(f"\0{source.parent.name}/{source.name}\0".encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _fill_with_agent(folder: Path, python: str) -> None:
    for source in _guest_files():
        target = folder / source.relative_to(GUEST)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(source.read_bytes())
    # Unchecked hashes: the compiled files stay good whatever a copy or a mount does to times.
    compile_all = ("-m", "compileall", "-q", "-d", "agent", "--invalidation-mode", "unchecked-hash")
    _run(python, "-I", "-S", *compile_all, folder)


def fill_with_interpreter(folder: Path, python: Path) -> None:
    """Copy an interpreter with all that it loads. Raises ValueError if it is no program that can be carried."""
    collect.loader_of(python)
    _run(python, "-I", "-S", COLLECT, folder, *imports_of_the_agent())


def imports_of_the_agent() -> list[str]:
    """The standard modules that the agent names anywhere, also those that it imports only when needed."""
    import ast

    with _parsing:
        trees = [ast.parse(source.read_bytes()) for source in _guest_sources()]
    names: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return sorted(name for name in names if name.partition(".")[0] in sys.stdlib_module_names)


def _run(*argv: str | Path) -> str:
    import subprocess

    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode:
        raise ValueError(f"{os.fspath(argv[0])} failed with code {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout
