"""The synchronous interface: `api.py` is generated from the asynchronous one by scripts/generate_sync.

Nothing else of skerry uses it; `loop_thread.py` runs the event loop that it needs.
"""
