"""Where a server listens, and where it refuses to."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import pytest
from manager.world import config_of

from skerry.config import ServerSettings
from skerry.errors import ConfigError
from skerry.surfaces.server.listen import run
from skerry.surfaces.server.server import Server


async def refusal_of(folder: Path, **settings: object) -> str:
    """Why a server with these settings does not begin."""
    config = msgspec.structs.replace(config_of(folder), server=msgspec.convert(settings, ServerSettings))
    async with Server.open(config) as server:
        with pytest.raises(ConfigError) as error:
            await run(server)
    return str(error.value)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"listen": ["127.0.0.1:99999"]}, "is not ADDRESS:PORT"),
        ({"listen": ["127.0.0.1"]}, "is not ADDRESS:PORT"),
        ({"listen": [":7357"]}, "is not ADDRESS:PORT"),
        ({"listen": ["0.0.0.0:0"]}, "--expose"),
        ({"listen": ["[::]:0"]}, "--expose"),
        ({"listen": ["0.0.0.0:0"], "expose": True}, "needs TLS"),
        ({"listen": ["127.0.0.1:0"], "tls_cert": "/nowhere.pem", "tls_key": "/nowhere.pem"}, "cannot be used"),
        ({"listen": [], "socket": "/" + "x" * 200}, "server.socket"),
    ],
)
async def test_what_is_not_to_be_listened_on_is_refused(
    tmp_path: Path, own_registry: None, settings: dict[str, object], why: str
) -> None:
    assert why in await refusal_of(tmp_path, **settings)


async def test_a_socket_of_a_server_that_lives_is_not_taken_from_it(tmp_path: Path, own_registry: None) -> None:
    path = tmp_path / "other.sock"
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as waiting:
        busy.bind(str(path))
        busy.listen(0)
        waiting.connect(str(path))  # there is no room for one more
        assert "another server listens" in await refusal_of(tmp_path, listen=[], socket=str(path))
    assert path.exists()
