from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]


def write_program(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout that is set up, whose programs only tell that they were called."""
    root = tmp_path / "a checkout"
    root.mkdir()
    for name in ("pyproject.toml", "uv.lock"):
        (root / name).touch()
        os.utime(root / name, (1, 1))
    shutil.copy(CHECKOUT / "skerry", root)
    write_program(root / "scripts/bootstrap", 'echo "bootstrap $*" >&2')
    os.utime(root / "scripts/bootstrap", (1, 1))
    write_program(root / ".venv/bin/skerry", 'printf "%s\\n" "$@"')
    (root / ".venv/.ready").write_text(f"{root}\n")
    return root


def start(program: Path | str, *args: str, cwd: Path | str = "/") -> tuple[str, str]:
    done = subprocess.run([program, *args], cwd=cwd, capture_output=True, text=True, check=True, timeout=50)
    return done.stdout, done.stderr


def test_a_later_use_only_starts_the_program_with_its_arguments(checkout: Path) -> None:
    assert start(checkout / "skerry", "run", "a b", "") == ("run\na b\n\n", "")


def test_it_is_found_through_symlinks_and_from_any_folder(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/first").symlink_to("../a checkout/skerry")
    (tmp_path / "second").symlink_to(tmp_path / "elsewhere/first")
    assert start(tmp_path / "second", "x") == ("x\n", "")
    assert start("./skerry", "x", cwd=checkout) == ("x\n", "")


@pytest.mark.parametrize("changed", ["uv.lock", "pyproject.toml", "scripts/bootstrap"])
def test_a_changed_lock_is_installed(checkout: Path, changed: str) -> None:
    os.utime(checkout / changed, (2**32, 2**32))
    assert start(checkout / "skerry", "x") == ("x\n", "bootstrap --no-dev\n")


def test_a_moved_checkout_is_set_up_again(checkout: Path, tmp_path: Path) -> None:
    moved = checkout.rename(tmp_path / "moved")
    assert start(moved / "skerry", "x") == ("x\n", "bootstrap --no-dev\n")


def test_without_a_python_it_says_what_it_needs(checkout: Path, tmp_path: Path) -> None:
    shutil.copy(CHECKOUT / "scripts/bootstrap", checkout / "scripts")
    shutil.rmtree(checkout / ".venv")
    programs = tmp_path / "bin"
    for name in ("dirname", "id", "sh"):
        programs.mkdir(exist_ok=True)
        (programs / name).symlink_to(str(shutil.which(name)))
    write_program(programs / "bwrap", "")
    write_program(programs / "python3", "exit 1")
    done = subprocess.run([checkout / "skerry"], env={"PATH": str(programs)}, capture_output=True, text=True)
    assert done.returncode == 125
    assert "needs Python 3.11" in done.stderr


def test_packages_that_cannot_be_installed_are_our_failure(checkout: Path, tmp_path: Path) -> None:
    shutil.copy(CHECKOUT / "scripts/bootstrap", checkout / "scripts")
    shutil.rmtree(checkout / ".venv")
    write_program(tmp_path / "bin/bwrap", "")
    write_program(tmp_path / "bin/uv", '[ "$1" = --version ] || { echo no route >&2; exit 2; }')
    env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    done = subprocess.run([checkout / "skerry"], env=env, capture_output=True, text=True)
    assert done.returncode == 125
    assert "no route\nskerry: cannot set up" in done.stderr


@pytest.mark.timeout(240)
def test_a_clone_works_from_nothing_even_when_two_start_at_once(tmp_path: Path) -> None:
    for name in ("skerry", "pyproject.toml", "uv.lock", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, tmp_path)
    for name in ("scripts", "src"):
        shutil.copytree(CHECKOUT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [tmp_path / "skerry", "--version"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    results = [(one.communicate(timeout=180), one.returncode) for one in both]
    if any("error sending request" in err or "Failed to establish" in err for (_, err), _ in results):
        pytest.skip("the package index cannot be reached")
    assert [code for _, code in results] == [0, 0], results
    assert sum("making" in err for (_, err), _ in results) == 1
    assert start(command[0], "--version")[1] == ""
    optional = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    told = re.search(r"for extra in ([\w ]+);", (CHECKOUT / "scripts/bootstrap").read_text())
    assert told is not None
    wanted = [re.split(r"[^\w.-]", need)[0] for extra in told[1].split() for need in optional[extra]]
    there = f"from importlib.metadata import version; print(*map(bool, map(version, {wanted})))"
    assert set(start(tmp_path / ".venv/bin/python", "-c", there)[0].split()) == {"True"}
    served = subprocess.run(
        [command[0], "mcp"], env={**os.environ, "SKERRY_STATE_DIR": str(tmp_path / "state")},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=50,
    )  # fmt: skip
    assert (served.returncode, served.stdout, served.stderr) == (0, "", "")
