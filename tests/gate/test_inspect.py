"""First bytes of clients: real greetings of TLS, whole and in pieces, and what is or is not a request."""

from __future__ import annotations

import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.gate.base import Refused
from skerry.gate.inspect import MOST, Found, Kind, check_server_name, look


def greeting(name: str | None) -> bytes:
    """What Python's own client begins with."""
    context = ssl.create_default_context()
    context.check_hostname = False
    out = ssl.MemoryBIO()
    tls = context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return out.read()


def records(hello: bytes, *sizes: int) -> bytes:
    """A greeting in records of other sizes."""
    message, found = hello[5:], b""
    for size in (*sizes, len(message)):
        piece, message = message[:size], message[size:]
        if piece:
            found += b"\x16\x03\x01" + len(piece).to_bytes(2, "big") + piece
    return found


HELLO = greeting("pypi.org")


def test_a_greeting_in_the_form_of_ssl_2_is_refused_where_the_web_is() -> None:
    old = b"\x80\x2e\x01\x03\x03\x00\x15\x00\x00\x00\x10"
    assert look(old[:2], 443) is None
    with pytest.raises(Refused, match="names no host"):
        look(old, 443)
    assert look(old, 5432) == Found(Kind.OTHER)


def test_the_host_of_a_greeting_is_found() -> None:
    assert look(HELLO, 443) == Found(Kind.TLS, "pypi.org")
    assert look(greeting(None), 443) == Found(Kind.TLS, None)


def test_a_greeting_that_comes_byte_by_byte_is_found_with_its_last() -> None:
    for count in range(len(HELLO)):
        assert look(HELLO[:count], 443) is None
    assert look(HELLO + b"more", 443) == Found(Kind.TLS, "pypi.org")


@given(st.lists(st.integers(1, 200), max_size=20))
def test_a_greeting_may_lie_in_several_records(sizes: list[int]) -> None:
    assert look(records(HELLO, *sizes), 443) == Found(Kind.TLS, "pypi.org")


def test_a_greeting_that_does_not_end_is_refused() -> None:
    endless = b"\x16\x03\x01\x40\x00\x01\x00\x7f\xff" + bytes(1 << 15)
    assert look(endless[: MOST - 1], 443) is None
    with pytest.raises(Refused, match="do not say"):
        look(endless[:MOST], 443)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x00\x00",  # an empty record
        b"\x16\x03\x01\x00\x05\x02\x00\x00\x01\x00",  # a greeting of servers
        b"\x16\x03\x01\x00\x02\x01\x00\x17\x03\x03\x00\x01x",  # another record in the middle
        b"\x14\x03\x03\x00\x01\x01",  # before any greeting
        b"\x16\x03\x01\x00\x06\x01\x00\x00\x02\x03\x03",  # cut short within
    ],
)
def test_what_begins_as_tls_and_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(Refused, match="begins as TLS"):
        look(data, 443)


def with_names(*names: bytes) -> bytes:
    """A greeting with so many extensions of one name each."""
    extensions = b""
    for name in names:
        entry = b"\x00" + len(name).to_bytes(2, "big") + name
        content = len(entry).to_bytes(2, "big") + entry
        extensions += b"\x00\x00" + len(content).to_bytes(2, "big") + content
    hello = b"\x03\x03" + bytes(32) + b"\x00" + b"\x00\x02\x13\x01" + b"\x01\x00"
    hello += len(extensions).to_bytes(2, "big") + extensions
    message = b"\x01" + len(hello).to_bytes(3, "big") + hello
    return b"\x16\x03\x01" + len(message).to_bytes(2, "big") + message


@pytest.mark.parametrize("port", [443, 8443])
@pytest.mark.parametrize("major", [0, 2, 4, 15])
def test_a_greeting_of_a_version_that_lenient_servers_take_is_refused(major: int, port: int) -> None:
    with pytest.raises(Refused, match="begins as TLS"):
        look(HELLO[:1] + bytes([major]) + HELLO[2:], port)


@pytest.mark.parametrize("port", [443, 8443])
@pytest.mark.parametrize("major", [2, 3])
def test_a_greeting_behind_a_warning_which_lenient_servers_skip_is_refused(major: int, port: int) -> None:
    with pytest.raises(Refused, match="begins as TLS"):
        look(bytes([21, major, 1, 0, 2, 1, 90]) + HELLO, port)


def test_records_that_are_none_pass_where_the_web_is_not() -> None:
    assert look(b"\x16\x00\x00\x00\x05hello", 27017) == Found(Kind.OTHER)
    assert look(b"\x15\x00\x00\x00\x00\x07", 27017) == Found(Kind.OTHER)
    assert look(b"\x14\x03", 27017) == Found(Kind.OTHER)


def test_a_greeting_with_two_names_is_refused() -> None:
    assert look(with_names(b"pypi.org"), 443) == Found(Kind.TLS, "pypi.org")
    with pytest.raises(Refused, match="more than one"):
        look(with_names(b"pypi.org", b"evil.test"), 443)


@pytest.mark.parametrize("name", ["pypi.org", "PyPI.ORG", "pypi.org."])
def test_a_greeting_may_spell_the_host_as_it_likes(name: str) -> None:
    check_server_name(Found(Kind.TLS, name), "pypi.org", 443)


@pytest.mark.parametrize(
    "name",
    [
        "evil.test",
        "www.pypi.org",
        "pypi.org.evil.test",
        "pypi.org\0.evil.test",
        "",
        "pypi.org:443",
        "pypi.orgé",
        "pypi.ºrg",
    ],
)
def test_a_greeting_of_another_host_is_refused(name: str) -> None:
    with pytest.raises(Refused, match="names"):
        check_server_name(Found(Kind.TLS, name), "pypi.org", 443)


def test_a_greeting_without_a_host_is_refused_where_the_web_is_and_for_addresses_it_is_not() -> None:
    with pytest.raises(Refused, match="names no host"):
        check_server_name(Found(Kind.TLS), "pypi.org", 443)
    check_server_name(Found(Kind.TLS), "db.internal", 5432)
    check_server_name(Found(Kind.TLS), "10.1.0.5", 443)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\n",
        b"\r\n\r\nGET / HTTP/1.1\r\n",
        b"get / http/1.0\n",
        b"GET\t/\tHTTP/1.1\r\n",
        b"FROB  /x y  HTTP/1.1\r\n",
        b"GET HTTP/1.1\r\n",
        b"CONNECT a:443 HTTP/1.1\r\n",
        b" \t\x0cGET / HTTP/1.1\r\n",
        b"GET /\x01 HTTP/1.1\r\n",
        b"POST /?\x00\x7f HTTP/1.1\r\n",
    ],
)
def test_what_a_lenient_server_takes_for_a_request_is_one(data: bytes) -> None:
    for port in (80, 443, 8080):
        assert look(data, port) == Found(Kind.HTTP)


def test_a_line_takes_a_time_that_grows_with_its_length_alone() -> None:
    assert look(b"A" + b" \t" * (1 << 19) + b"\n", 80) == Found(Kind.OTHER)


def test_a_request_without_a_version_is_one_where_the_web_is() -> None:
    assert look(b"GET /\r\n", 80) == Found(Kind.HTTP)
    assert look(b"get key\r\n", 11211) == Found(Kind.OTHER)


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.6p1 Debian-3\r\n",
        b"\x00\x00\x00\x08\x04\xd2\x16\x2f",  # PostgreSQL asks for TLS
        b"*1\r\n$4\r\nPING\r\n",
        b"EHLO a.test\r\n",
        b"\x20\x00\x00\x01\x85\xa6",
        b"NICK x\r\n",
    ],
)
def test_other_protocols_are_known_at_once(data: bytes) -> None:
    assert look(data, 443) == Found(Kind.OTHER)
    assert look(data, 9999) == Found(Kind.OTHER)


def test_http_2_without_tls_is_refused_where_the_web_is() -> None:
    with pytest.raises(Refused, match="HTTP/2"):
        look(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 80)
    assert look(b"PRI * HTTP/2.0\r\n", 50051) == Found(Kind.OTHER)


@pytest.mark.parametrize("data", [b"x", b"hello", b"get", b"\r\n", b"FROB / HTTP/1", b"GE T"])
def test_text_that_does_not_begin_as_requests_do_is_not_held_back_but_where_the_web_is(data: bytes) -> None:
    assert look(data, 7) == Found(Kind.LINE)
    assert look(data, 80) is None


@pytest.mark.parametrize("data", [b"G", b"GET", b"GET ", b"POST /x HTTP/1.1", b"\r\nPUT"])
def test_text_that_begins_as_requests_do_is_waited_for(data: bytes) -> None:
    assert look(data, 7) is None


def test_text_without_an_end_is_no_request() -> None:
    assert look(b"x" * MOST, 7) == Found(Kind.OTHER)


def test_a_line_that_does_not_end_is_waited_for_and_then_refused() -> None:
    assert look(b"GET /" + b"x" * 1000, 80) is None
    with pytest.raises(Refused):
        look(b"GET /" + b"x" * MOST, 80)


@given(st.binary(max_size=300), st.sampled_from([80, 443, 5432]))
def test_no_bytes_break_it(data: bytes, port: int) -> None:
    for prefix in (b"", b"\x16\x03\x01", b"GET "):
        try:
            found = look(prefix + data, port)
        except Refused:
            continue
        assert found is None or found.kind in Kind


@given(st.data())
def test_a_changed_greeting_never_breaks_it(data: st.DataObject) -> None:
    changed = bytearray(HELLO)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = look(bytes(changed), 443)
    except Refused:
        return
    assert found is None or found.kind in Kind
