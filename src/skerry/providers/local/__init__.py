"""The provider `local`: boxes of bubblewrap on this host."""

from skerry.providers.local.provider import Local, LocalConfig

__all__ = ["Local", "LocalConfig"]
