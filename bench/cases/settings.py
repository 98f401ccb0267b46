"""How thoroughly to measure."""

from __future__ import annotations

from typing import NamedTuple


class Settings(NamedTuple):
    quick: bool = False

    def rounds(self, count: int) -> int:
        return max(3, count // 8) if self.quick else count
