"""Folders and files of the host that a container is given."""

from __future__ import annotations

import os
import stat

from skerry.errors import InvalidSpec
from skerry.spec import Mount


def check_source(mount: Mount) -> None:
    """A socket or device of the host would be a way out: the engine's own socket above all."""
    try:
        mode = os.stat(mount.source).st_mode
    except OSError:
        return  # it may be there on the engine's host; if not, the engine says so
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        raise InvalidSpec(f"mounts: {mount.source!r} is neither a folder nor a file", field="mounts")
