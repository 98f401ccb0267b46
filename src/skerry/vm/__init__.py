"""Virtual machines: a small interface, `base.Hypervisor`, and the hypervisors behind it. Knows nothing of sandboxes.

A machine is a folder (`folder`), started by `launch` with a warden beside it, cloned from `templates`, and controlled
through its first process (`guest`) and its `console`; `images` makes what it boots.
"""
