"""What an image asks for beside its files."""

from __future__ import annotations

import msgspec

from skerry.errors import InvalidSpec


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """An empty user is root, and an empty folder is the root."""

    env: dict[str, str] = {}
    user: str = ""
    folder: str = ""


class _Config(msgspec.Struct, rename="pascal"):
    env: list[str] | None = None
    user: str | None = None
    working_dir: str | None = None


class _OciConfig(msgspec.Struct):
    config: _Config | None = None


def read(text: bytes) -> Asked:
    """From the configuration of an image archive or an OCI layout."""
    try:
        config = msgspec.json.decode(text, type=_OciConfig).config or _Config()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidSpec(f"the image's configuration is not one: {error}") from None
    user = config.user or ""
    return Asked(
        env=dict(each.partition("=")[::2] for each in config.env or []),
        user="" if user.partition(":")[0] in ("", "0", "root") else user,
        folder="" if config.working_dir in (None, "/") else str(config.working_dir),
    )
