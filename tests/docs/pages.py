"""The pages of the documentation, and the blocks of code in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- (not run|file): (.+?) -->\s*\Z")
_NEEDS = re.compile(r"^<!-- needs: (.+?) -->$", re.MULTILINE)
_RUN = ("sh", "console", "python")


class Block(NamedTuple):
    """A block that does something: run it, or write it to `file` for those that come after."""

    language: str
    code: str
    line: int
    file: str | None
    output: str | None
    """What it prints, where the page shows that; `...` stands for anything."""


def blocks(page: Path) -> list[Block]:
    """The blocks of a page that are to be run, in order. `<!-- not run: REASON -->` before one leaves it out."""
    text = page.read_text()
    fences = list(_FENCE.finditer(text))
    found = []
    for index, fence in enumerate(fences):
        mark = _MARK.search(text, 0, fence.start())
        is_file = mark is not None and mark[1] == "file"
        if not is_file and (mark or fence[1] not in _RUN):
            continue
        following = fences[index + 1] if index + 1 < len(fences) else None
        shown = following and following[1] == "text" and not text[fence.end() : following.start()].strip()
        found.append(
            Block(
                language=fence[1],
                code=fence[2],
                line=text.count("\n", 0, fence.start()) + 1,
                file=mark[2] if mark and is_file else None,
                output=following[2] if following and shown else None,
            )
        )
    return found


def needs(page: Path) -> str | None:
    """What a reader of the page has besides skerry: `<!-- needs: WHAT -->`."""
    found = _NEEDS.search(page.read_text())
    return found[1] if found else None


def matches(shown: str, printed: str) -> bool:
    """Whether the output is as the page shows it, blanks at the ends of lines and the width of columns aside."""
    wanted = _stripped(shown)
    pattern = ".*".join(re.escape(part) for part in wanted.removesuffix("\n...").split("..."))
    rest = r"(\n.*)?" if wanted.endswith("\n...") else ""
    return re.fullmatch(pattern + rest, _stripped(printed), re.DOTALL) is not None


def _stripped(text: str) -> str:
    return "\n".join(re.sub(" {2,}", "  ", line.rstrip()) for line in text.strip().splitlines())
