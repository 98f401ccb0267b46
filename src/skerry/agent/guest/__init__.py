"""The agent that runs in every box; `vm` is what only machines need. In a box this package is called `skerry_agent`.

Standard library only, Python 3.8 or later; nothing here imports skerry. `start`, `init`, `machine`, `relay` and `trees`
are run as scripts, at paths that images and boxes name. The host uses `trees`, `wire`, `loop` and `users`
as well.
"""
