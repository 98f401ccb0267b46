"""The manager: creates, finds, repairs and destroys sandboxes. `manager.py` is its face, the other files its parts.

From outside use `AsyncSandboxManager` and its public methods; pool and fleet also `handles`, `repair` and `destroy`.
"""
