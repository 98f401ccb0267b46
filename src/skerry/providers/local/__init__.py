"""The provider `local`: boxes of bubblewrap on this host.

`provider` is the seam, `creation` makes a box, `boxes` are their folders, `profile` and `seccomp` the boundary.
"""

from skerry.providers.local.provider import Local, LocalConfig

__all__ = ["Local", "LocalConfig"]
