"""E2B's wire: its SDKs work against this server unchanged. A thin translation onto the manager and the sandbox handle:
`app.py` (what a request is for), `sandboxes.py` (the calls of its control plane), `box.py` (what E2B knows of a sandbox
and the registry keeps), `envd/` (files and processes in a box)."""
