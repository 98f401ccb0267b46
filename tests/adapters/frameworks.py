"""Frameworks of agents, each in an environment of its own: `python -m tests.adapters.frameworks NAME` makes one.

They need more than the project itself, and not all of them agree on versions. An environment has the framework and this
checkout, as a user's has; a suite runs there as a process of its own.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, NoReturn
from xml.etree import ElementTree

import pytest

from skerry.config import variable

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = Path(__file__).parent / ".venv"
SUITES = Path(__file__).parent / "suites"
INSTALL_S = 600.0


class Framework(NamedTuple):
    packages: Sequence[str]
    source: str = ""
    """A source distribution, whose own tests are unpacked beside the environment."""
    pythons: Sequence[str] = ()
    """The versions of Python that it takes, the best first, where any will not do; or the path of one."""


FRAMEWORKS = {
    "harbor": Framework(["harbor==0.24.0", "ruamel.yaml>=0.18", "pytest==9.1.1"], pythons=("3.13", "3.12", "3.14")),
    "e2b": Framework(["e2b==2.63.0"]),
    "inspect": Framework(["inspect_ai==0.3.285", "ruamel.yaml>=0.18", "pytest==9.1.1", "anyio>=4.6"]),
    "langchain": Framework(["deepagents==0.7.32", "langchain-tests==1.1.9"]),
    # The last one whose contract is that of the suite; it overtook the newest suite.
    "langchain-0.6": Framework(["deepagents==0.6.9", "langchain-tests==1.1.9"]),
    "openai-agents": Framework(
        ["openai-agents==0.24.0", "pytest==9.1.1", "pytest-asyncio==1.4.0", "inline-snapshot==0.34.0"],
        source="openai-agents==0.24.0",
    ),
    "smolagents": Framework(["smolagents==1.26.0", "docker==7.2.0", "pytest==9.1.1"], source="smolagents==1.26.0"),
    # What its tests import within a box, whose Python is that of the system.
    "smolagents-box": Framework(["numpy==2.4.6", "pillow==12.3.0"], pythons=("/usr/bin/python3",)),
}


class NotInstallable(Exception):
    """An environment cannot be made here."""


class NoPython(NotInstallable):
    """None of the versions of Python that a framework takes is here, and we install none."""


def environment(name: str) -> Path:
    """The folder of a framework's environment, made if it is not there as it should be. Raises NotInstallable."""
    folder = ENVIRONMENTS / name
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        if not _is_ready(folder, name):
            _make(folder, name)
    return folder


def python_of(name: str) -> Path:
    return environment(name) / "bin/python"


def sources_of(name: str) -> Path:
    """The framework's own sources, with its tests."""
    (folder,) = (environment(name) / "source").iterdir()
    return folder


def required(name: str) -> Path:
    """The same as `environment`; where it cannot be made the test is skipped, but not if SKERRY_REQUIRE has it."""
    try:
        return environment(name)
    except NoPython as error:
        pytest.skip(f"{name}: {error}")
    except NotInstallable as error:
        _refuse(str(error))


def run(name: str, *arguments: str | Path, env: Mapping[str, str], cwd: Path, timeout_s: float) -> str:
    """Run Python of an environment to its end: what it printed. Raises AssertionError if it fails."""
    code, printed = _run(name, arguments, env, cwd, timeout_s)
    assert code == 0, printed
    return printed


def suite(
    name: str, *arguments: str | Path, env: Mapping[str, str], cwd: Path, timeout_s: float, options: Sequence[str] = ()
) -> dict[str, str]:
    """Run pytest of an environment: for each of its tests `passed`, `skipped`, or why it failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        # Not the settings and fixtures of this project, whose tests these are not.
        apart = ("-c", "/dev/null", f"--rootdir={cwd}", f"--confcutdir={cwd}", "-p", "no:cacheprovider")
        quiet = ("-q", "--tb=short", "-W", "ignore", f"--junit-xml={report}")
        code, printed = _run(name, ("-m", "pytest", *apart, *quiet, *options, *arguments), env, cwd, timeout_s)
        assert code in (0, 1), printed
        results = [_result(case) for case in ElementTree.parse(report).iter("testcase")]
    outcome = dict(results)
    assert len(outcome) == len(results), "two tests of one name"
    return outcome


def type_errors(name: str, adapter: str) -> str:
    """What mypy, as strict as for the rest of the project, has against an adapter where its framework is installed."""
    mypy = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--config-file=", "--cache-dir"]
    environment = [ENVIRONMENTS / name / "mypy", "--python-executable", python_of(name)]
    return subprocess.run(
        [*mypy, *environment, f"src/skerry/adapters/{adapter}"],
        env={"MYPYPATH": "src", "PATH": os.environ["PATH"]},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=240,
    ).stdout


def _result(case: ElementTree.Element) -> tuple[str, str]:
    test = f"{case.get('classname')}::{case.get('name')}"
    if (skip := case.find("skipped")) is not None:
        return test, "skipped" if skip.get("type") == "pytest.skip" else "xfailed"
    bad = [each for kind in ("failure", "error") for each in case.iter(kind)]
    return test, bad[0].text or bad[0].get("message", "") if bad else "passed"


def _run(
    name: str, arguments: Sequence[str | Path], env: Mapping[str, str], cwd: Path, timeout_s: float
) -> tuple[int, str]:
    kept = {key: os.environ[key] for key in ("PATH", "HOME", "TMPDIR", "LANG") if key in os.environ}
    settings = {
        key: value for key, value in os.environ.items() if key.startswith("SKERRY_") and key != "SKERRY_REQUIRE"
    }
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        done = subprocess.run(
            [python_of(name), *arguments],
            env={**kept, **settings, "PYTHONDONTWRITEBYTECODE": "1", **env},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
        )
        output.seek(0)
        return done.returncode, output.read()


def _stamp(name: str) -> str:
    framework = FRAMEWORKS[name]
    return "\n".join([str(ROOT), *framework.pythons, *framework.packages, framework.source])


def _is_ready(folder: Path, name: str) -> bool:
    """Whether it is of this checkout and these packages, and knows the entry points of pyproject.toml as they are."""
    stamp = folder / "ready"
    if not stamp.exists() or stamp.read_text() != _stamp(name):
        return False
    return stamp.stat().st_mtime > (ROOT / "pyproject.toml").stat().st_mtime


def _make(folder: Path, name: str) -> None:
    framework = FRAMEWORKS[name]
    uv = shutil.which("uv", path=f"{sys.prefix}/bin:{os.environ['PATH']}") or "uv"
    _call(uv, "venv", "--quiet", "--allow-existing", "--python", _interpreter(framework.pythons), folder)
    _call(uv, "pip", "install", "--quiet", "--python", folder / "bin/python", "-e", ROOT, *framework.packages)
    source = folder / "source"
    if framework.source and not source.exists():
        with tempfile.TemporaryDirectory(dir=folder) as downloads:
            _download(framework.source, Path(downloads))
            (archive,) = Path(downloads).glob("*.tar.gz")
            with tarfile.open(archive) as tar:
                tar.extractall(Path(downloads, "source"), filter="data")
            Path(downloads, "source").rename(source)
    (folder / "ready").write_text(_stamp(name))


def _interpreter(versions: Sequence[str]) -> Path:
    """Raises NoPython where none of these versions is on PATH or was made by pyenv."""
    if not versions:
        return Path(sys.executable)
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
    for version in versions:
        if os.path.isabs(version):
            return Path(version)
        found = shutil.which(f"python{version}")
        for each in [*pyenv.glob(f"{version}.*/bin/python"), *([Path(found)] if found else [])]:
            with suppress(OSError, subprocess.SubprocessError):
                subprocess.run([each, "-c", ""], check=True, capture_output=True, timeout=60)
                return each
    raise NoPython(f"it needs Python {' or '.join(versions)}, and there is none here")


def _download(requirement: str, folder: Path) -> None:
    _call(
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-binary",
        ":all:", "--dest", folder, requirement,
    )  # fmt: skip


def _call(*command: str | Path) -> None:
    """Raises NotInstallable."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=INSTALL_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstallable(str(error)) from None
    if done.returncode:
        raise NotInstallable(f"{' '.join(map(str, command))}: {done.stdout.decode(errors='replace').strip()[-2000:]}")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _refuse(why: str) -> NoReturn:
    if "frameworks" in (variable("SKERRY_REQUIRE") or "").split(","):
        pytest.fail(f"SKERRY_REQUIRE names frameworks, and {why}")
    pytest.skip(why)


if __name__ == "__main__":
    for each in sys.argv[1:] or FRAMEWORKS:
        print(environment(each))
