"""A server elsewhere, used as if its manager were here.

`connect` and `aconnect` are the ways in; the stream to an agent goes through the server, so sandboxes, files, processes
and ports are the same code as at home. Nothing else is for use from outside.
"""
