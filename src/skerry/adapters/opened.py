"""The manager that adapters use: a server's, if the settings name one, else one of this machine."""

from __future__ import annotations

from skerry.config import load
from skerry.manager.manager import AsyncSandboxManager


def open_manager() -> AsyncSandboxManager:
    """The manager of the settings, to be entered."""
    config = load()
    if config.url:
        from skerry.remote.manager import AsyncRemoteManager

        return AsyncRemoteManager(config.url, config.token or None, ca=config.ca or None, config=config)
    return AsyncSandboxManager(config)
