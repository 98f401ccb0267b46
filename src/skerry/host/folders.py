"""Folders that stand for one thing each."""

from __future__ import annotations

import os
from pathlib import Path

from skerry.agent.guest import trees
from skerry.errors import Conflict, CreateFailed


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
