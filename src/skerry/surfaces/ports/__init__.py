"""Ports of sandboxes in a browser: each on a name, and so on an origin, of its own."""
