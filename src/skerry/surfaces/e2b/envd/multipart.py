"""Forms of several parts, read as they come: no part is ever held whole."""

from __future__ import annotations

from collections.abc import AsyncIterator
from email.message import Message
from typing import Any

from skerry.errors import InvalidSpec

MOST_PARTS = 10_000
_LONGEST_HEAD = 16 << 10
_LONGEST_BOUNDARY = 200


class Part:
    """One part of a form. Read it to its end before the next."""

    def __init__(self, form: Form, name: str, filename: str | None) -> None:
        self.name = name
        self.filename = filename
        """As its client wrote it, with folders."""
        self._form = form

    async def read(self, _size: int = -1, /) -> bytes:
        """The next piece, of any size; empty at the end."""
        return await self._form.read_piece()


class Form:
    """A body of `multipart/form-data`, from its pieces. Raises InvalidSpec for what is none."""

    def __init__(self, content_type: str, chunks: AsyncIterator[bytes]) -> None:
        boundary = parameters(f"content-type: {content_type}").get("boundary", "")
        if not boundary or len(boundary) > _LONGEST_BOUNDARY or not boundary.isascii():
            raise InvalidSpec("the form has no boundary")
        self._delimiter = b"\r\n--" + boundary.encode()
        self._chunks = chunks
        self._buffer = bytearray(b"\r\n")  # the first delimiter has no line before it
        self._is_over = False
        self._in_part = False

    async def parts(self) -> AsyncIterator[Part]:
        """The parts, one after the other."""
        while await self.read_piece(preamble=True):
            pass
        for _ in range(MOST_PARTS):
            if not await self._next_part():
                return
            head = await self._until(b"\r\n\r\n")
            self._in_part = True
            lines = head.decode("utf-8", "replace").split("\r\n")
            line = next((line for line in lines if line.lower().startswith("content-disposition:")), "")
            known = parameters(line)
            yield Part(self, known.get("name", ""), known.get("filename"))
            while self._in_part and await self.read_piece():
                pass
        raise InvalidSpec(f"the form has more than {MOST_PARTS} parts")

    async def _next_part(self) -> bool:
        """Go over the rest of a delimiter; False after the last."""
        while len(self._buffer) < 2:
            await self._more()
        rest = bytes(self._buffer[:2])
        if rest == b"--":
            return False
        await self._until(b"\r\n")
        self._buffer[:0] = b"\r\n"  # a head may have no lines
        return True

    async def _until(self, mark: bytes) -> bytes:
        while (at := self._buffer.find(mark)) < 0:
            if len(self._buffer) > _LONGEST_HEAD:
                raise InvalidSpec("a part of the form has a head that is too long")
            await self._more()
        found = bytes(self._buffer[:at])
        del self._buffer[: at + len(mark)]
        return found

    async def read_piece(self, *, preamble: bool = False) -> bytes:
        """The next piece of the part at hand, or of what is before the first; empty at its end."""
        if not (self._in_part or preamble):
            return b""
        while True:
            at = self._buffer.find(self._delimiter)
            if at > 0:
                return self._take(at)
            if at == 0:
                del self._buffer[: len(self._delimiter)]
                self._in_part = False
                return b""
            keep = len(self._delimiter) - 1  # its end may be the beginning of a delimiter
            if len(self._buffer) > keep:
                return self._take(len(self._buffer) - keep)
            await self._more()

    def _take(self, count: int) -> bytes:
        found = bytes(self._buffer[:count])
        del self._buffer[:count]
        return found

    async def _more(self) -> None:
        async for chunk in self._chunks:
            if chunk:
                self._buffer += chunk
                return
        raise InvalidSpec("the form ends before its last part does")


def parameters(line: str) -> dict[str, str]:
    """The parameters of a header such as `content-disposition: form-data; name="file"`."""
    name, _, value = line.partition(":")
    message = Message()
    message[name or "x"] = value.strip()
    found = {}
    known: list[tuple[str, Any]] = message.get_params(failobj=[], header=name or "x", unquote=True)
    for key, text in known[1:]:
        if isinstance(text, tuple):  # as RFC 2231 has it
            charset, _, encoded = text
            try:
                text = encoded.encode("latin-1").decode(charset or "utf-8")
            except (LookupError, UnicodeError):
                raise InvalidSpec("a name in the form is not readable") from None
        found[key.lower()] = text
    return found
