from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from skerry.agent import bundle, collect
from skerry.agent.client import AgentClient
from skerry.errors import ProviderError
from skerry.net import dial

PYTHONS = {"ours": sys.executable, "Debian's": "/usr/bin/python3"}


@pytest.fixture(scope="module")
def cache() -> Iterator[Path]:
    """Where any user can read, as pytest's own folders are not."""
    with tempfile.TemporaryDirectory(prefix="skerry-test-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.fixture(params=PYTHONS)
def portable(request: pytest.FixtureRequest, cache: Path) -> bundle.Portable:
    if request.param == "ours":
        return bundle.portable(cache)
    python = os.path.realpath(PYTHONS[request.param])
    if not os.path.exists(python):
        pytest.skip(f"there is no {python}")
    folder = cache / "debian"
    if not folder.is_dir():
        bundle.make_folder(folder, lambda aside: bundle.fill_with_interpreter(aside, Path(python)))
    return bundle.Portable(folder, python)


@pytest.fixture
def busybox_root() -> Iterator[Path]:
    """A root without Python or any library."""
    busybox = shutil.which("busybox")
    if not busybox or collect.Elf(busybox).loader:
        pytest.skip("no static busybox; install the package busybox-static")
    with tempfile.TemporaryDirectory(prefix="skerry-test-") as folder:
        root = Path(folder)
        root.chmod(0o755)
        for name in ("bin", "proc", "dev", "tmp", "python", "agent"):
            (root / name).mkdir()
        shutil.copy(busybox, root / "bin/busybox")
        for applet in ("sh", "cat", "echo", "ls", "true"):
            (root / "bin" / applet).symlink_to("busybox")
        yield root


def boxed(root: Path, *binds: tuple[Path, str]) -> list[str]:
    """The command that runs what follows in a box on `root`, as a user without rights."""
    if not shutil.which("bwrap"):
        pytest.skip("no bwrap; install the package bubblewrap")
    unprivileged = ["setpriv", "--reuid=60123", "--regid=60123", "--clear-groups"] if os.getuid() == 0 else []
    mounts = [word for source, target in ((root, "/"), *binds) for word in ("--ro-bind", str(source), target)]
    special = ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    return [*unprivileged, "bwrap", "--unshare-all", "--clearenv", "--setenv", "HOME", "/tmp", *mounts, *special, "--"]


async def test_portable_python_runs_the_agent_in_a_root_of_busybox_alone(
    cache: Path, portable: bundle.Portable, busybox_root: Path
) -> None:
    agent = bundle.agent_folder(cache, portable.python)
    box = boxed(busybox_root, (portable.folder, "/python"), (agent, "/agent"))
    stream = await dial.process([*box, *portable.argv("/python"), "/agent/start.py", "test"])
    client = await AgentClient.greet(stream)
    try:
        chunks = client.open("exec", {"argv": ["/bin/sh", "-c", "echo from $0; ls /bin"]}).chunks()
        output = b"".join([data async for fd, data in chunks])
        assert output == b"from /bin/sh\nbusybox\ncat\necho\nls\nsh\ntrue\n"
        metrics = await client.call("metrics", type=dict)
        assert metrics["processes"] > 0
        tree = client.open("tree_download", {"path": "/bin"}).chunks()
        assert b"busybox" in b"".join([data async for _, data in tree])
    finally:
        client.close()


def test_portable_python_has_every_module_that_the_agent_names(portable: bundle.Portable) -> None:
    names = bundle.imports_of_the_agent()
    script = "import sys, importlib\nfor name in sys.argv[1:]: importlib.import_module(name)"
    done = subprocess.run(
        [*portable.argv(str(portable.folder)), "-c", script, *names], capture_output=True, text=True, env={}
    )
    assert done.stderr == ""


def test_portable_python_is_small_readable_and_needs_nothing_of_the_host(portable: bundle.Portable) -> None:
    files = [path for path in portable.folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 20 << 20
    assert all(stat.S_IMODE(path.stat().st_mode) in (0o644, 0o755) for path in files)
    script = "print(open('/proc/self/maps').read())"
    argv = [*portable.argv(str(portable.folder)), "-c", script]
    maps = subprocess.run(argv, capture_output=True, text=True, check=True, env={"LC_ALL": "C"}).stdout
    mapped = {line.split()[5] for line in maps.splitlines() if len(line.split()) > 5}
    assert {path for path in mapped if path.startswith("/") and not path.startswith(str(portable.folder))} == set()


def test_an_agent_folder_is_made_once_and_found_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = bundle.agent_folder(cache, sys.executable)
    names = {path.name for path in folder.iterdir()}
    assert {"start.py", "relay.py", "wire.py", "vm", "__pycache__"} <= names
    for each in (folder, folder / "vm"):
        assert len(list((each / "__pycache__").iterdir())) == len(list(each.glob("*.py"))) > 0
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o644 for path in folder.rglob("*.py*") if path.is_file())
    made: list[Path] = []
    monkeypatch.setattr(bundle, "make_folder", lambda folder, _fill: made.append(folder))
    assert bundle.agent_folder(cache, sys.executable) == folder
    assert made == []


def test_compiled_files_are_used_whatever_the_times_of_the_sources(cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(bundle.agent_folder(cache, sys.executable), folder)
    for source in folder.glob("*.py"):
        os.utime(source, (1, 1))
    script = f"import sys; sys.path.insert(0, {str(folder)!r}); import relay"
    done = subprocess.run([sys.executable, "-I", "-S", "-v", "-c", script], capture_output=True, text=True, check=True)
    assert f"# code object from '{folder}/__pycache__/relay." in done.stderr
    assert "# wrote" not in done.stderr


def test_builders_at_the_same_time_agree_and_leave_nothing_else(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        made = set(threads.map(lambda _: bundle.agent_folder(tmp_path, sys.executable), range(4)))
    assert len(made) == 1
    assert list(tmp_path.iterdir()) == list(made)


def test_what_cannot_be_built_is_a_clear_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ProviderError, match="'/no/python' cannot be used: No such file"):
        bundle.agent_folder(tmp_path, "/no/python")
    with pytest.raises(ProviderError, match="/bin/false failed with code 1"):
        bundle.agent_folder(tmp_path, "/bin/false")
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\n")
    with pytest.raises(ProviderError, match="is not a 64-bit little-endian ELF file"):
        bundle.make_folder(tmp_path / "none", lambda aside: bundle.fill_with_interpreter(aside, script))
    assert list(tmp_path.iterdir()) == [script]


def test_the_agents_imports_are_found_in_several_threads_at_once() -> None:
    """Python 3.11 fails now and then if two threads parse sources at once."""
    with ThreadPoolExecutor(4) as threads:
        made = set(threads.map(lambda _: tuple(bundle.imports_of_the_agent()), range(24)))
    assert len(made) == 1
