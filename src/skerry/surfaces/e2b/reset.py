"""The end of a connection that no client takes for the end of an answer."""

from __future__ import annotations

import socket
import struct
from typing import Any

_AT_ONCE = struct.pack("ii", 1, 0)


def reset(transport: Any) -> None:
    """Break a connection off with a TCP reset; without one older SDKs take what came for all there was."""
    peer = transport.get_extra_info("socket")
    if peer is not None and peer.family in (socket.AF_INET, socket.AF_INET6):
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
    transport.abort()
