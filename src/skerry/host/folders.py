"""Folders that stand for one thing each."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from skerry.agent.guest import trees
from skerry.errors import Conflict, CreateFailed
from skerry.host import locks


def make_new(path: Path, what: str, mode: int = 0o700) -> None:
    """One that was not there before; `what` is what there is already if it was."""
    try:
        path.parent.mkdir(mode=mode, parents=True, exist_ok=True)
        path.mkdir(mode=mode)
    except FileExistsError:
        raise Conflict(f"there is already {what}") from None
    except OSError as error:
        raise CreateFailed(f"the folder for {what} cannot be made: {error}") from error


def remove(path: Path) -> None:
    """With all that is in it, however deep a machine or a box has made that; quiet if there is none."""
    for _ in trees.remove_tree(os.fsencode(path)):
        pass


def remove_abandoned(parent: Path, prefix: str, is_old: Callable[[float], bool]) -> None:
    """What programs left there that died: it is old, by the time of its last change, and nobody holds it."""
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError):  # it is in use, or gone, or another user's
            if is_old(folder.lstat().st_mtime) and not folder.is_symlink():
                with locks.holding(folder):
                    shutil.rmtree(folder)
