"""Virtual machines: one small interface, and what stands behind it. Knows nothing of sandboxes."""
