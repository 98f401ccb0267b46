"""`skerry image` against a real engine."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engines.api import ask, ask_json
from engines.daemons import Daemon
from engines.images import load

from .conftest import PROGRAM, Run

Call = Callable[..., tuple[int, str, str]]
NAME = "skerry-test/from-cli"
BUSYBOX = "skerry-test/busybox"


@pytest.fixture(params=["docker", "podman"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Daemon]:
    """An engine that is the configured provider; images that a test makes go with it."""
    daemon: Daemon = request.getfixturevalue(f"{request.param}_daemon")
    load(daemon.address, "busybox")
    monkeypatch.setenv("SKERRY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("SKERRY_PROVIDER", daemon.name)
    monkeypatch.setenv(f"SKERRY_PROVIDERS__{daemon.name.upper()}__HOST", daemon.address)
    yield daemon
    for image in ask_json(daemon.address, "GET", "/images/json"):
        for name in image["RepoTags"] or ():
            if NAME in name:
                ask(daemon.address, "DELETE", f"/images/{name}")


@pytest.fixture
def context(tmp_path: Path) -> Path:
    folder = tmp_path / "context"
    folder.mkdir()
    (folder / "Dockerfile").write_text(f"FROM {BUSYBOX}\nARG WHO\nCOPY file /copied\nRUN echo built for $WHO\n")
    (folder / "file").write_text("content")
    return folder


def test_an_image_is_built_listed_inspected_and_removed(call: Call, engine: Daemon, context: Path) -> None:
    code, out, err = call("image", "build", "-t", NAME, "--build-arg", "WHO=me", str(context))
    assert code == 0, err
    id = out.strip()
    assert id.startswith("sha256:")
    assert "built for me" in err.splitlines()

    code, out, _ = call("image", "ls")
    header, *rows = [line.split() for line in out.splitlines()]
    assert header == ["NAME", "ID", "SIZE", "CREATED", "USED", "BY"]
    assert [f"{NAME}:latest", id.removeprefix("sha256:")[:12]] in [row[:2] for row in rows]
    assert id in call("image", "ls", "-q")[1].split()

    listed = {image["id"]: image for image in json.loads(call("image", "ls", "--json")[1])}
    assert listed[id]["names"] == [f"{NAME}:latest"]
    for reference in (NAME, f"{NAME}:latest", id, id.removeprefix("sha256:")[:12]):
        assert json.loads(call("image", "inspect", reference)[1]) == [listed[id]]

    assert call("image", "rm", NAME) == (0, f"{NAME}\n", "")
    code, out, err = call("image", "rm", NAME, "--json")
    assert code == 125
    assert json.loads(out)[0]["error"]["code"] == "image_not_found"
    code, out, err = call("image", "inspect", NAME)
    assert (code, json.loads(out)) == (125, [])
    assert "skerry image ls" in err


def test_the_dockerfile_may_be_another_file_or_standard_input(
    skerry: Run, call: Call, engine: Daemon, context: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = context.parent / "Other"
    other.write_text(f"FROM {BUSYBOX}\nCOPY file /here\n")
    monkeypatch.chdir(context)
    code, out, err = call("image", "build", "-f", str(other), "-t", NAME, "--json")
    assert (code, err) == (0, ""), out
    assert json.loads(out)["names"] == [f"{NAME}:latest"]
    done = skerry("image", "build", "-f", "-", "-t", f"{NAME}:piped", str(context), input=other.read_bytes())
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().startswith("sha256:")


def test_a_build_has_a_network_only_if_one_is_asked_for(call: Call, engine: Daemon, context: Path) -> None:
    (context / "Dockerfile").write_text(f"FROM {BUSYBOX}\nRUN echo has $(ls /sys/class/net)\n")
    for options, found in (([], "has lo"), (["--network", "bridge", "--no-cache", "--memory", "1G"], "has eth0 lo")):
        code, _, err = call("image", "build", "-t", NAME, *options, str(context))
        assert code == 0, err
        assert found in err.splitlines()
    code, _, err = call("image", "build", "-t", NAME, "--network", "host", str(context))
    assert code == 125
    assert "bridge" in err


def test_a_build_that_fails_is_one_error_with_its_last_words(call: Call, engine: Daemon, context: Path) -> None:
    (context / "Dockerfile").write_text(f"FROM {BUSYBOX}\nRUN echo my last words; exit 9\n")
    code, out, err = call("image", "build", "-t", NAME, str(context))
    assert (code, out) == (125, "")
    assert "2/2" in err
    assert "  my last words" in err.splitlines()
    code, out, err = call("image", "build", "-t", NAME, str(context), "--json")
    assert (code, err) == (125, "")
    assert json.loads(out)["error"]["code"] == "provider_error"


def test_a_root_file_system_is_imported(call: Call, engine: Daemon, context: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "root.tar.gz", "w:gz") as tar:
        tar.add(context / "file", "etc/file")
    code, out, err = call("image", "import", str(tmp_path / "root.tar.gz"), NAME)
    assert code == 0, err
    assert out.strip() in call("image", "ls", "-q")[1].split()
    code, _, err = call("image", "import", str(context / "file"), NAME)
    assert code == 125
    assert "is no tar" in err


def test_an_image_that_no_registry_gives_says_what_else_can_be_done(call: Call, engine: Daemon) -> None:
    code, _, err = call("image", "pull", "localhost:1/none")
    assert code == 125
    assert "skerry image import" in err


def test_what_a_sandbox_is_made_of_stays_and_the_sandbox_is_named(call: Call, engine: Daemon, context: Path) -> None:
    assert call("image", "build", "-t", NAME, str(context))[0] == 0
    labels = {"skerry": engine.name, "skerry.sandbox": "the-id"}
    body = {"Image": NAME, "Cmd": ["x"], "Labels": labels}
    id = ask_json(engine.address, "POST", "/containers/create", json_body=body)["Id"]
    try:
        (image,) = [each for each in json.loads(call("image", "ls", "--json")[1]) if f"{NAME}:latest" in each["names"]]
        assert image["used_by"] == 1
        code, _, err = call("image", "rm", NAME)
        assert code == 125
        assert "the-id" in err
    finally:
        ask(engine.address, "DELETE", f"/containers/{id}", {"force": "1"})


def test_on_a_terminal_a_build_shows_a_bar_and_what_it_prints(engine: Daemon, context: Path) -> None:
    main, side = pty.openpty()
    with subprocess.Popen(
        [*PROGRAM, "image", "build", "-t", NAME, "--no-cache", "--build-arg", "WHO=all", str(context)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=side, env={**os.environ, "TERM": "xterm"},
    ) as process:  # fmt: skip
        os.close(side)
        shown = b""
        while select.select([main], [], [], 30)[0]:
            try:
                shown += os.read(main, 65536)
            except OSError:  # the other side is closed
                break
        out, _ = process.communicate(timeout=30)
    os.close(main)
    assert process.returncode == 0, shown
    assert out.startswith(b"sha256:")
    assert b"built for all" in shown
    assert b"4/4" in shown


def test_ctrl_c_ends_a_build_and_leaves_no_container(engine: Daemon, context: Path) -> None:
    (context / "Dockerfile").write_text(f"FROM {BUSYBOX}\nRUN echo under way; sleep 50\n")
    with subprocess.Popen(
        [*PROGRAM, "image", "build", "-t", NAME, "--no-cache", str(context)], stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        assert b"under way\n" in process.stderr
        process.send_signal(signal.SIGINT)
        assert process.stderr.read().strip() == b""
        assert process.wait(timeout=30) == 130
    deadline = time.monotonic() + 20
    while ask_json(engine.address, "GET", "/containers/json", {"all": "1"}):
        assert time.monotonic() < deadline, "the step still runs"
        time.sleep(0.05)


def test_images_open_no_registry(call: Call, engine: Daemon, tmp_path: Path) -> None:
    assert call("image", "ls")[0] == 0
    assert not (tmp_path / "state/registry.db").exists()


def test_a_shell_completes_the_names_of_images(skerry: Run, engine: Daemon) -> None:
    words = {"_SKERRY_COMPLETE": "bash_complete", "COMP_WORDS": "skerry image rm skerry-test/b", "COMP_CWORD": "3"}
    assert f"plain,{BUSYBOX}:latest" in skerry(env=words).stdout.decode().splitlines()


def test_a_provider_without_images_says_which_ones_have_them(call: Call) -> None:
    for args in (("ls",), ("pull", "x"), ("rm", "x")):
        code, out, err = call("image", *args, "--provider", "mock", "--json")
        assert code == 125
        text = out + err
        assert "unsupported" in text
        assert "--provider" in text
        assert "docker" in text


def test_a_dockerfile_that_is_not_there_is_an_error_and_not_a_bug(call: Call, tmp_path: Path) -> None:
    code, _, err = call("image", "build", "--provider", "docker", str(tmp_path))
    assert code == 125
    assert "Dockerfile cannot be read: No such file" in err
