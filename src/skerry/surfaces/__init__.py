"""Servers on the manager for other programs. Each package is one protocol; the command line starts them."""
