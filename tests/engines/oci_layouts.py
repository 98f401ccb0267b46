"""OCI layouts and root file systems for tests, right ones and such that mean harm."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def layer(files: Mapping[str, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            tar.addfile(entry, io.BytesIO(content))
    return made.getvalue()


class Layout:
    """A layout that can be made wrong in every place before it is written."""

    def __init__(self, *layers: bytes, zipped: bool = True) -> None:
        self.blobs: dict[str, bytes] = {}
        sent = [gzip.compress(each, mtime=0) if zipped else each for each in layers]
        kind = "application/vnd.oci.image.layer.v1.tar" + ("+gzip" if zipped else "")
        self.config: dict[str, Any] = {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Env": ["FROM_LAYOUT=yes"], "WorkingDir": "/srv"},
            "rootfs": {"type": "layers", "diff_ids": [digest(each) for each in layers]},
        }
        self.manifest: dict[str, Any] = {
            "schemaVersion": 2,
            "config": self.add(json.dumps(self.config).encode(), "application/vnd.oci.image.config.v1+json"),
            "layers": [self.add(each, kind) for each in sent],
        }
        self.index: dict[str, Any] = {"schemaVersion": 2, "manifests": []}
        self.refer()

    def add(self, content: bytes, kind: str) -> dict[str, Any]:
        self.blobs[digest(content)] = content
        return {"mediaType": kind, "digest": digest(content), "size": len(content)}

    def refer(self, **fields: Any) -> None:
        """Let the index name the manifest as it is now, and nothing else."""
        found = self.add(json.dumps(self.manifest).encode(), "application/vnd.oci.image.manifest.v1+json")
        self.index["manifests"] = [found | fields]

    def write(self, folder: Path) -> Path:
        (folder / "blobs/sha256").mkdir(parents=True)
        (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        (folder / "index.json").write_text(json.dumps(self.index))
        for name, content in self.blobs.items():
            (folder / "blobs" / name.replace(":", "/")).write_bytes(content)
        return folder

    def write_tar(self, folder: Path, mode: str = "w") -> Path:
        path = folder.with_suffix(".tar")
        self.write(folder)
        with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
            for name in sorted(os.listdir(folder), reverse=True):
                tar.add(folder / name, name)
        return path


def digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
