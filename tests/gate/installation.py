"""Installations of skerry whose sandboxes know the little internet, and what their gates and ledgers show."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from skerry import config
from skerry.config import Config
from skerry.host import background
from skerry.host.processes import Process

from .world import World


@contextmanager
def installed(
    folder: Path, world: World, provider: str = "local", settings: Mapping[str, Any] | None = None, more: str = ""
) -> Iterator[Config]:
    """An installation below `folder`, for this process and all that it starts. In the end it has no gate."""
    file = folder / "config.toml"
    lines = [f'provider = "{provider}"', "[network]", f"hosts = {_table(world.hosts)}", more]
    if settings:
        lines += [f"[providers.{provider}]", *(f"{name} = {json.dumps(value)}" for name, value in settings.items())]
    file.write_text("\n".join(lines) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKERRY_CONFIG", str(file))
        patch.setenv("SKERRY_STATE_DIR", str(folder / "state"))
        patch.setenv("SSL_CERT_FILE", str(world.bundle))
        loaded = config.load()
        try:
            yield loaded
        finally:
            background.end(_note(loaded.state_dir), "the gate")


def gate(state_dir: str) -> Process:
    """The gate of an installation, which runs."""
    found = background.holder(_note(state_dir))
    assert found is not None
    assert found.is_alive()
    return found


def _note(state_dir: str) -> Path:
    return Path(state_dir) / "gate/note"


def host_root(path: Path) -> Path:
    """An image that has the programs of this host once its /usr is mounted."""
    with tarfile.open(path, "w") as tar:
        for name in ("usr", "etc", "tmp", "root", "home", "proc", "sys", "dev", "run", "var"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        for name in ("bin", "sbin", "lib", "lib64"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(entry)
        for name, text in (
            ("etc/passwd", "root:x:0:0:root:/root:/bin/sh\napp:x:1000:1000::/tmp:/bin/sh\n"),
            ("etc/group", "root:x:0:\napp:x:1000:\n"),
        ):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text), 0o644
            tar.addfile(entry, io.BytesIO(text.encode()))
    return path


def is_usr_merged() -> bool:
    """Whether all programs of this host are below its /usr."""
    return os.path.islink("/bin") and os.path.islink("/lib")


def _table(values: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{json.dumps(name)} = {json.dumps(value)}" for name, value in values.items()) + "}"


def lines(state_dir: str) -> list[dict[str, Any]]:
    """All lines of the ledger, the oldest first, with their facts beside the rest."""
    texts = [text for file in Path(state_dir, "ledger").glob("*.jsonl") for text in file.read_text().splitlines()]
    found = [json.loads(text) for text in texts]
    return [{**line, **line.get("facts", {})} for line in sorted(found, key=lambda line: line["seq"])]
