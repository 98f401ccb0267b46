"""What hostile code in a box tries, run there with `python3 -c`: a JSON list of attempts is its argument, and what came
of each its output."""

import base64
import json
import selectors
import socket
import ssl
import struct
import sys
import time

PATIENCE_S = 20


def resolve(name, family="any"):
    kind = {"any": socket.AF_UNSPEC, "4": socket.AF_INET, "6": socket.AF_INET6}[family]
    found = socket.getaddrinfo(name, None, kind, socket.SOCK_STREAM)
    return sorted({entry[4][0] for entry in found})


def ask(name, kind, transport="udp"):
    """Answer code and number of answers of a DNS query by hand."""
    labels = b"".join(bytes([len(label)]) + label for label in name.encode("utf-8").split(b".") if label)
    query = struct.pack("!6H", 7, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!2H", kind, 1)
    if transport == "udp":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
            channel.settimeout(PATIENCE_S)
            channel.sendto(query, ("127.0.0.1", 53))
            answer = channel.recv(4096)
    else:
        with socket.create_connection(("127.0.0.1", 53), PATIENCE_S) as channel:
            channel.sendall(struct.pack("!H", len(query)) + query)
            answer = read(channel, 14)[2:]
    return {"code": answer[3] & 15, "answers": struct.unpack("!H", answer[6:8])[0]}


def read(channel, least=1, most=4096):
    data = b""
    while len(data) < least:
        piece = channel.recv(most)
        if not piece:
            break
        data += piece
    return data


def send(host, port, data, least=1):
    """What comes back for bytes."""
    with socket.create_connection((host, port), PATIENCE_S) as channel:
        channel.sendall(base64.b64decode(data))
        return read(channel, least).decode("latin-1")


def pour(host, port, data):
    """All that comes back for bytes after which nothing more is said."""
    with socket.create_connection((host, port), PATIENCE_S) as channel:
        channel.sendall(base64.b64decode(data))
        channel.shutdown(socket.SHUT_WR)
        return read(channel, 1 << 20).decode("latin-1")


def tls(host, port, name):
    """The version that is agreed on with a server that is told another name."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    channel = socket.create_connection((host, port), PATIENCE_S)
    with channel, context.wrap_socket(channel, server_hostname=name) as secure:
        return secure.version()


def udp(host, port):
    """Bytes that come back for a datagram in a second."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
        channel.settimeout(1)
        channel.sendto(b"hello", (host, port))
        return channel.recv(100).decode("latin-1")


def flood(host, port, count):
    """Connections that say nothing until all are there: how many of them then get an answer."""
    held = []
    for _ in range(count):
        try:
            held.append(socket.create_connection((host, port), PATIENCE_S))
        except OSError:
            continue
    answered, end = 0, time.monotonic() + PATIENCE_S
    with selectors.DefaultSelector() as waiting:
        for channel in held:
            try:
                channel.sendall(b"x\n")
                waiting.register(channel, selectors.EVENT_READ)
            except OSError:
                continue
        while waiting.get_map() and time.monotonic() < end:
            for key, _ in waiting.select(1):
                waiting.unregister(key.fileobj)
                try:
                    answered += key.fileobj.recv(1) == b"x"
                except OSError:
                    continue
    for channel in held:
        channel.close()
    return {"asked": count, "answered": answered}


def hold(host, port):
    """Keep a connection that is open until it ends, and tell when it is open."""
    with socket.create_connection((host, port), PATIENCE_S) as channel:
        channel.sendall(b"x\n")
        read(channel, 2)
        print("open", flush=True)
        channel.settimeout(60)
        return channel.recv(1).decode("latin-1")


WAYS = {each.__name__: each for each in (resolve, ask, send, pour, tls, udp, flood, hold)}


def attempt(way, *words):
    try:
        return {"got": WAYS[way](*words)}
    except OSError as error:
        return {"failed": type(error).__name__}
    except UnicodeError:
        return {"failed": "UnicodeError"}


if __name__ == "__main__":
    print(json.dumps([attempt(*words) for words in json.loads(sys.argv[1])]), flush=True)
