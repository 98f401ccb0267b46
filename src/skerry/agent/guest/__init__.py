"""The agent that runs in the box. Standard library only, Python 3.8 or later; nothing here imports skerry."""
