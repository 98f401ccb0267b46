"""Byte streams of the host: dialling, TLS, HTTP, WebSocket.

All of it may be used from outside; it knows nothing of sandboxes.
"""
