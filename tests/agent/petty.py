"""An agent and a client as the documents describe them, written without a line of ours: JSON-RPC lines, no greeting."""

from __future__ import annotations

import itertools
import json
import os
import socket
import socketserver
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

LANGUAGES = {"python": "python3", "bash": "bash", "sh": "sh"}


def run(*argv: str) -> dict[str, Any]:
    done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return {"exit_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}


def write(path: str, content: str) -> dict[str, Any]:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(content)
    return {"success": True}


def entry(found: os.DirEntry[str]) -> dict[str, Any]:
    return {"name": found.name, "is_dir": found.is_dir(), "size": found.stat().st_size}


METHODS: dict[str, Callable[..., dict[str, Any]]] = {
    "ping": lambda: {"pong": True},
    "exec": lambda cmd: run("sh", "-c", cmd),
    "exec_code": lambda lang, code: run(LANGUAGES[lang], "-c", code),
    "read_file": lambda path: {"content": Path(path).read_text()},
    "write_file": write,
    "list_dir": lambda path: {"entries": [entry(each) for each in os.scandir(path)]},
}


class _Connection(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        for line in self.rfile:
            request = json.loads(line)
            answer: dict[str, Any] = {"jsonrpc": "2.0", "id": request["id"]}
            try:
                answer["result"] = METHODS[request["method"]](**request["params"])
            except Exception as error:
                code = -32601 if request["method"] not in METHODS else -32603
                answer["error"] = {"code": code, "message": str(error), "data": None}
            self.wfile.write(json.dumps(answer).encode() + b"\n")


class PettyAgent(socketserver.ThreadingUnixStreamServer):
    """An agent that knows six methods, and serves them one after the other on each stream."""

    daemon_threads = True

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        super().__init__(self.path, _Connection)

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class RpcError(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class PettyClient:
    """A client that asks, reads a line, and believes it."""

    def __init__(self, connection: socket.socket) -> None:
        self._lines = connection.makefile("rwb")
        self._socket = connection
        self._ids = itertools.count(1)

    def call(self, method: str, **params: str) -> Any:
        request = {"jsonrpc": "2.0", "id": next(self._ids), "method": method, "params": params}
        self._lines.write(json.dumps(request).encode() + b"\n")
        self._lines.flush()
        line = self._lines.readline()
        if not line:
            raise ConnectionResetError("the agent closed the stream")
        answer = json.loads(line)
        assert (answer["jsonrpc"], answer["id"]) == ("2.0", request["id"])
        if "error" in answer:
            raise RpcError(answer["error"]["code"], answer["error"]["message"])
        return answer["result"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        self._socket.close()
