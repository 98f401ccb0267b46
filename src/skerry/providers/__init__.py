"""Providers, each behind the seam of `base`, found by name in `registry`.

Nobody imports a provider: an entry point names it. `shared` is for providers only.
"""

from skerry.providers.registry import GROUP, load, names, provider_class

__all__ = ["GROUP", "load", "names", "provider_class"]
