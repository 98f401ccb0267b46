"""Entry points without `importlib.metadata`, which takes longer to import than most commands take altogether."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator


def find(group: str, name: str) -> str | None:
    """What the first package on the path that has this entry point says it is: `module:attribute`. None if no package
    that lies in a plain folder has it."""
    for text in _declared():
        for line in _section(text, group):
            key, _, value = line.partition("=")
            if key.strip() == name:
                return value.partition("[")[0].strip()
    return None


def _declared() -> Iterator[str]:
    for folder in sys.path:
        try:
            with os.scandir(folder or ".") as entries:
                found = sorted(each.path for each in entries if each.name.endswith((".dist-info", ".egg-info")))
        except OSError:
            continue
        for path in found:
            try:
                with open(os.path.join(path, "entry_points.txt"), encoding="utf-8") as file:
                    yield file.read()
            except (OSError, UnicodeDecodeError):
                continue


def _section(text: str, group: str) -> Iterator[str]:
    is_ours = False
    for line in text.splitlines():
        if line.startswith("["):
            is_ours = line.strip() == f"[{group}]"
        elif is_ours:
            yield line
