"""Images as Incus lists them, and what each asks for."""

from __future__ import annotations

from datetime import datetime

import msgspec

CONFIG = "skerry.config"
"""The property of an image that we imported with what it asked for where it came from."""

_UNPACKED = 4
"""How much larger than its file an image may become of which nothing is said: most are compressed."""


class ImageConfig(msgspec.Struct, frozen=True):
    """What an image asks for. The policy of boxes decides what of it is granted."""

    id: str = ""
    env: dict[str, str] = {}
    user: str = ""
    """Another than root, or empty."""
    folder: str = ""
    size: int = 0
    """About what it takes when it is unpacked."""


class Alias(msgspec.Struct):
    name: str
    target: str = ""


class Found(msgspec.Struct):
    fingerprint: str
    size: int = 0
    type: str = "container"
    created_at: str = ""
    uploaded_at: str = ""
    properties: dict[str, str] | None = None
    aliases: list[Alias] | None = None

    @property
    def names(self) -> list[str]:
        return [alias.name for alias in self.aliases or []]

    @property
    def made_at(self) -> float | None:
        text = self.uploaded_at or self.created_at
        return datetime.fromisoformat(text).timestamp() if text else None


def config_of(image: Found) -> ImageConfig:
    try:
        asked = msgspec.json.decode((image.properties or {}).get(CONFIG, "{}"), type=ImageConfig)
    except msgspec.DecodeError:
        asked = ImageConfig()
    return msgspec.structs.replace(asked, id=image.fingerprint, size=asked.size or _UNPACKED * image.size)
