"""Ways to reach the manager from outside Python, each in a file of its own."""
