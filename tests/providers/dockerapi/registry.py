"""A registry of images that an engine can pull from, on this machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from engines.oci_layouts import Layout

_UNKNOWN = b'{"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]}'


@contextmanager
def serving(layout: Layout) -> Iterator[str]:
    """The address of a registry that has one image, under any name but with the tag `latest` only."""
    manifest = layout.index["manifests"][0]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kind, digest = "application/octet-stream", self.path.rpartition("/")[2]
            if "/manifests/" in self.path:
                kind = manifest["mediaType"]
                digest = manifest["digest"] if digest == "latest" else digest
            content = b"{}" if self.path == "/v2/" else layout.blobs.get(digest, _UNKNOWN)
            self.send_response(404 if content is _UNKNOWN else 200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Docker-Content-Digest", digest)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
