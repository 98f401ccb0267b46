"""Container engines for tests and benches: daemons with folders of their own, and images made without a registry."""
