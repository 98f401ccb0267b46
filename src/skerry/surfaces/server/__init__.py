"""The process behind `skerry serve`: who calls, what is let in, where it listens, and how it ends.

`Server` in `server.py` is for use from outside, and `run` in `listen.py`.
"""
