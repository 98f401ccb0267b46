"""The mock shell's words: text in, tokens out."""

from __future__ import annotations

import re
from dataclasses import dataclass

_OPERATOR = re.compile(r"&&|\|\||;;|<<-|<<|>>|>&|<&|&>|[;&|()<>\n]")
_NUMBERED = re.compile(r"(\d+)(<<-|<<|>>|>&|<&|[<>])")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9?$#!@*]")
_ENDS_WORD = " \t\n;&|<>()"


class SyntaxProblem(Exception):
    """The text is not a program."""


class Incomplete(SyntaxProblem):
    """The text ends in the middle of a program: a terminal asks for more."""


@dataclass
class Part:
    """A piece of a word: `text`, `name` (a variable), `command` (`$(...)`) or `sum` (`$((...))`)."""

    kind: str
    value: str
    quoted: bool
    default: Word | None = None
    rule: str = ""


Word = list[Part]


@dataclass
class Token:
    operator: str
    word: Word
    fd: int | None = None

    @property
    def plain(self) -> str:
        """The word as it stands, if nothing of it is quoted or expanded; else empty."""
        if len(self.word) == 1 and self.word[0].kind == "text" and not self.word[0].quoted:
            return self.word[0].value
        return ""


def parse_word(text: str, *, quoted: bool) -> Word:
    """A word of its own, spaces included: a default value, the text of a here-document."""
    lexer = Lexer(text)
    parts: Word = []
    while lexer.at < len(text):
        lexer.piece(parts, quoted, ends="")
    return parts


class Lexer:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self._documents: list[tuple[Token, bool]] = []

    def tokens(self) -> list[Token]:
        tokens: list[Token] = []
        while self._skip_blanks():
            match = _OPERATOR.match(self.text, self.at)
            if match is None:
                tokens.append(self._word_or_number())
                self._expect_document(tokens)
                continue
            self.at = match.end()
            tokens.append(Token(match[0], []))
            if match[0] == "\n" and self._documents:
                self._read_documents()
        if self._documents:
            self._read_documents()
        return tokens

    def _skip_blanks(self) -> bool:
        text = self.text
        while self.at < len(text):
            if text[self.at] in " \t" or text.startswith("\\\n", self.at):
                self.at += 1 if text[self.at] != "\\" else 2
            elif text[self.at] == "#":
                end = text.find("\n", self.at)
                self.at = len(text) if end < 0 else end
            else:
                return True
        return False

    def _word_or_number(self) -> Token:
        number = _NUMBERED.match(self.text, self.at)
        if number is not None:
            self.at = number.end()
            return Token(number[2], [], int(number[1]))
        return Token("", self.word())

    def _expect_document(self, tokens: list[Token]) -> None:
        if len(tokens) > 1 and tokens[-2].operator in ("<<", "<<-"):
            self._documents.append((tokens[-1], tokens[-2].operator == "<<-"))

    def _read_documents(self) -> None:
        for token, stripped in self._documents:
            mark = "".join(part.value for part in token.word)
            literal = any(part.quoted for part in token.word)
            lines = []
            while True:
                if self.at >= len(self.text):
                    raise Incomplete(f"a here-document does not end with {mark!r}")
                line, _, _ = self.text[self.at :].partition("\n")
                self.at += len(line) + 1
                line = line.lstrip("\t") if stripped else line
                if line == mark:
                    break
                lines.append(line + "\n")
            body = "".join(lines)
            token.word[:] = [Part("text", body, True)] if literal else parse_word(body, quoted=True)
        self._documents.clear()

    def word(self) -> Word:
        parts: Word = []
        while self.at < len(self.text) and self.text[self.at] not in _ENDS_WORD:
            char = self.text[self.at]
            if char == "'":
                parts.append(Part("text", self._until("'"), True))
            elif char == '"':
                self._double_quoted(parts)
            else:
                self.piece(parts, False, _ENDS_WORD + "'\"")
        return parts

    def _until(self, closer: str) -> str:
        end = self.text.find(closer, self.at + 1)
        if end < 0:
            raise Incomplete(f"a {closer} is not closed")
        inside, self.at = self.text[self.at + 1 : end], end + 1
        return inside

    def _double_quoted(self, parts: Word) -> None:
        self.at += 1
        parts.append(Part("text", "", True))
        while True:
            if self.at >= len(self.text):
                raise Incomplete('a " is not closed')
            if self.text[self.at] == '"':
                self.at += 1
                return
            self.piece(parts, True, '"')

    def piece(self, parts: Word, quoted: bool, ends: str) -> None:
        """One expansion, escape, or run of plain text."""
        text, char = self.text, self.text[self.at]
        if char == "\\" and self.at + 1 < len(text):
            escaped = text[self.at + 1]
            self.at += 2
            if escaped != "\n":
                keep = quoted and escaped not in '$`"\\'
                parts.append(Part("text", "\\" + escaped if keep else escaped, True))
        elif char == "$" and self.at + 1 < len(text) and (expansion := self._expansion(quoted)) is not None:
            parts.append(expansion)
        elif char == "`":
            parts.append(Part("command", self._until("`"), quoted))
        else:
            start = self.at
            self.at += 1
            while self.at < len(text) and text[self.at] not in ends + "\\$`":
                self.at += 1
            parts.append(Part("text", text[start : self.at], quoted))

    def _expansion(self, quoted: bool) -> Part | None:
        text = self.text
        if text.startswith("$((", self.at):
            end = text.find("))", self.at)
            if end < 0:
                raise Incomplete("a $(( is not closed")
            inside, self.at = text[self.at + 3 : end], end + 2
            return Part("sum", inside, quoted)
        if text.startswith("$(", self.at):
            return Part("command", self._balanced(), quoted)
        if text.startswith("${", self.at):
            self.at += 1
            match = re.fullmatch(r"(#?\w+|[?$#!@*])(:?[-+=?]|%%?|##?)?(.*)", self._until("}"), re.DOTALL)
            if match is None:
                raise SyntaxProblem("Bad substitution")
            rule = match[2] or ""
            return Part("name", match[1], quoted, parse_word(match[3], quoted=quoted) if rule else None, rule)
        name = _NAME.match(text, self.at + 1)
        if name is None:
            return None
        self.at = name.end()
        return Part("name", name[0], quoted)

    def _balanced(self) -> str:
        """The text of `$(...)`, with its inner parentheses and quotes."""
        start = self.at = self.at + 2
        depth = 1
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in "'\"":
                self._until(char)
                continue
            depth += (char == "(") - (char == ")")
            self.at += 2 if char == "\\" else 1
            if depth == 0:
                return self.text[start : self.at - 1]
        raise Incomplete("a $( is not closed")
