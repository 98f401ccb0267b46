"""Contexts of code interpreters. `context.py` is a process of the box for each; it starts a kernel, which runs the
code, and stands between it and the host. `context.py` runs in the agent's interpreter, kernels in the box's own."""
