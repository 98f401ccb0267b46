"""What E2B's own agent answers in a sandbox, answered here: files and processes over HTTP and the Connect protocol.

Each call is translated into those of our sandbox handle, and nothing of it runs in the box. `routes` is for whoever
routes requests to sandboxes, who puts an `Envd` into each request's scope.
"""

from __future__ import annotations

from starlette.routing import BaseRoute


def routes() -> list[BaseRoute]:
    """All calls."""
    from starlette.routing import Route

    from skerry.surfaces.e2b.envd import compose, files, filesystem, process, system, watch

    composing = Route("/files/compose", compose.compose, methods=["POST"])
    parts = (system, files, process, filesystem, watch)
    return [composing, *(route for part in parts for route in part.routes())]
