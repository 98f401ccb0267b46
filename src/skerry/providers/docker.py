"""Docker as an engine: where its daemon is, and what to say when it is not there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from skerry.providers.dockerapi import EngineConfig, EngineProvider


class DockerConfig(EngineConfig, frozen=True):
    from_environment: ClassVar[Mapping[str, str]] = {
        "host": "DOCKER_HOST",
        "tls_verify": "DOCKER_TLS_VERIFY",
        "cert_path": "DOCKER_CERT_PATH",
    }

    host: str = "unix:///var/run/docker.sock"


class Docker(EngineProvider):
    name = "docker"
    Config = DockerConfig
    fix = "install Docker (apt-get install docker.io) and start it (systemctl start docker); be root or in its group"
