"""Where E2B's clients are served, what of it is said, and what `skerry e2b env` prints."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from loopback import free_port
from manager.world import config_of
from surfaces.server.world import serving

from skerry.config import Config, ServerSettings
from skerry.errors import ConfigError
from skerry.providers.mock import Mock
from skerry.surfaces.server import listen


def skerry(*args: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """The command line, with settings by variables alone."""
    program = str(Path(sys.executable).with_name("skerry"))
    whole = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "SKERRY_CONFIG": os.devnull, **env}
    return subprocess.run([program, *args], env=whole, capture_output=True, text=True, timeout=60, check=False)


async def test_an_address_that_was_asked_for_and_is_taken_is_an_error(
    tmp_path: Path, own_registry: None, mock_provider: Mock
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"server\.e2b_listen.*in use"):
            async with serving(tmp_path, mock_provider, e2b=True, e2b_listen=(address,)):
                pass


async def test_the_usual_address_that_is_taken_is_told_and_all_else_is_served(
    tmp_path: Path, own_registry: None, mock_provider: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen, "_is_free", lambda address: False)
    async with serving(tmp_path, mock_provider, e2b=True) as served:
        assert served.server.e2b_refused == "127.0.0.1:7358 is taken"
        assert served.server.e2b_addresses == []
        assert (await (await served.client()).get("/v1/sandboxes")).status_code == 200


async def test_templates_of_the_settings_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(text: str) -> Config:
        path = tmp_path / "config.toml"
        path.write_text(text)
        monkeypatch.setenv("SKERRY_CONFIG", str(path))
        from skerry.config import load

        return load()

    found = load('[e2b.templates.big]\nprovider = "docker"\nimage = "x"\nmemory = "1G"\nallow = ["python"]').templates
    assert found["big"].options() == {
        "provider": "docker", "image": "x", "memory": "1G", "allow": ("python",), "user": "user",
    }  # fmt: skip
    for wrong in ("[e2b.templates.big]\nimages = 1", "[e2b.other]\nx = 1", "[e2b]\ntemplates = 1"):
        with pytest.raises(ConfigError, match="e2b"):
            load(wrong)


async def test_the_settings_have_the_usual_address() -> None:
    assert ServerSettings().e2b_listen == ("127.0.0.1:7358",)
    assert msgspec.structs.replace(config_of(Path("/tmp"))).server.e2b


def test_the_variables_are_those_of_the_sdk(tmp_path: Path) -> None:
    env = {"SKERRY_STATE_DIR": str(tmp_path), "SKERRY_SERVER__E2B_LISTEN": f"127.0.0.1:{free_port()}"}
    told = json.loads(skerry("e2b", "env", "--key", "e2b_0", "--json", env=env).stdout)
    url = f"http://{env['SKERRY_SERVER__E2B_LISTEN']}"
    assert told == {
        "E2B_API_URL": url, "E2B_SANDBOX_URL": url, "E2B_VOLUME_API_URL": url, "E2B_API_KEY": "e2b_0",
    }  # fmt: skip
    assert skerry("e2b", "env", "--domain", env=env).returncode == 125
    env["SKERRY_SERVER__E2B_DOMAIN"] = "e2b.test"
    told = json.loads(skerry("e2b", "env", "--domain", "--key", "e2b_0", "--json", env=env).stdout)
    assert told["E2B_DOMAIN"].startswith("e2b.test:")
    for name in ("SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS"):
        text = Path(told[name]).read_text()
        assert "BEGIN CERTIFICATE" in text
        assert "PRIVATE KEY" not in text
    made = skerry("e2b", "env", env=env).stdout
    assert "export E2B_API_KEY=e2b_" in made
