"""Names of images: one small file each, so that to change one touches no other."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from urllib.parse import quote, unquote

from skerry.errors import InvalidSpec

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,127}")
_ASIDE = ".new-"


class Names:
    """Which image each name means."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def check(self, name: str) -> None:
        if not _NAME.fullmatch(name) or name.startswith("sha256:"):
            raise InvalidSpec(
                f"{name[:140]!r} cannot be an image's name: letters, digits and . _ / : - can", field="name"
            )

    def by_id(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for path in self._folder.glob("[!.]*"):
            try:
                found.setdefault(path.read_text().strip(), []).append(unquote(path.name))
            except (OSError, UnicodeDecodeError):
                continue  # it was removed this moment, or is damaged and means nothing
        return found

    def put(self, name: str, id: str) -> None:
        """It means this image from now on, and no other."""
        self._folder.mkdir(parents=True, exist_ok=True)
        fd, aside = tempfile.mkstemp(prefix=_ASIDE, dir=self._folder)
        try:
            with os.fdopen(fd, "w") as file:
                file.write(id)
            os.chmod(aside, 0o644)
            os.rename(aside, self._place(name))
        except BaseException:
            os.unlink(aside)
            raise

    def remove(self, name: str) -> None:
        self._place(name).unlink(missing_ok=True)

    def _place(self, name: str) -> Path:
        return self._folder / quote(name, safe="")
