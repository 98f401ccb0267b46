"""The mock shell's grammar: text in, a tree of commands out."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from skerry.providers.mock.words import Incomplete, Lexer, Part, SyntaxProblem, Token, Word

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_REDIRECTS = {"<", ">", ">>", "<<", "<<-", ">&", "<&", "&>"}
_CLOSERS = {"then", "elif", "else", "fi", "do", "done", "}", "esac", ")", ";;"}


@dataclass
class Redirect:
    fd: int
    operator: str
    target: Word


@dataclass
class Simple:
    assignments: list[tuple[str, Word]] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)
    redirects: list[Redirect] = field(default_factory=list)


@dataclass
class Pipeline:
    stages: list[Command]
    negated: bool = False


@dataclass
class Sequence:
    """Pipelines, each with what joins it to the one before (`;`, `&&`, `||`); a group may run in the background."""

    items: list[tuple[list[tuple[str, Pipeline]], bool]] = field(default_factory=list)


@dataclass
class If:
    branches: list[tuple[Sequence, Sequence]]
    otherwise: Sequence | None


@dataclass
class Loop:
    condition: Sequence
    body: Sequence
    until: bool


@dataclass
class For:
    name: str
    words: list[Word] | None
    body: Sequence


@dataclass
class Case:
    subject: Word
    choices: list[tuple[list[Word], Sequence]]


@dataclass
class Group:
    body: Sequence | If | Loop | For | Case
    subshell: bool = False
    redirects: list[Redirect] = field(default_factory=list)


@dataclass
class Function:
    name: str
    body: Command
    redirects: list[Redirect] = field(default_factory=list)


Command = Simple | Group | Function


def parse(text: str) -> Sequence:
    parser = _Parser(Lexer(text).tokens())
    program = parser.sequence()
    if parser.peek() is not None:
        raise SyntaxProblem(f"unexpected {parser.describe()}")
    return program


class _Parser:
    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._at = 0

    def peek(self) -> Token | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def describe(self) -> str:
        token = self.peek()
        return "end" if token is None else repr(token.operator or token.plain or "word")

    def _accept(self, *texts: str) -> str:
        token = self.peek()
        if token is not None and (token.operator or token.plain) in texts:
            self._at += 1
            return token.operator or token.plain
        return ""

    def _expect(self, text: str) -> None:
        if not self._accept(text):
            if self.peek() is None:
                raise Incomplete(f"{text!r} is missing")
            raise SyntaxProblem(f"unexpected {self.describe()}, expecting {text!r}")

    def _newlines(self) -> None:
        while self._accept("\n"):
            pass

    def sequence(self) -> Sequence:
        found = Sequence()
        while True:
            while self._accept("\n", ";"):
                pass
            token = self.peek()
            if token is None or (token.operator or token.plain) in _CLOSERS:
                return found
            chain = [("", self._pipeline())]
            while joint := self._accept("&&", "||"):
                self._newlines()
                chain.append((joint, self._pipeline()))
            found.items.append((chain, bool(self._accept("&"))))

    def _pipeline(self) -> Pipeline:
        negated = bool(self._accept("!"))
        stages = [self._command()]
        while self._accept("|"):
            self._newlines()
            stages.append(self._command())
        return Pipeline(stages, negated)

    def _command(self) -> Command:
        token = self.peek()
        if token is None:
            raise Incomplete("a command is missing")
        if token.plain and self._follows("(", ")"):
            self._at += 3
            self._newlines()
            return Function(token.plain, self._command())
        group = self._compound()
        if group is None:
            return self._simple()
        while (redirect := self._redirect()) is not None:
            group.redirects.append(redirect)
        return group

    def _follows(self, *operators: str) -> bool:
        ahead = self._tokens[self._at + 1 : self._at + 1 + len(operators)]
        return [token.operator for token in ahead] == list(operators)

    def _compound(self) -> Group | None:
        match self._accept("(", "{", "if", "while", "until", "for", "case"):
            case "(":
                return self._closed(Group(self.sequence(), subshell=True), ")")
            case "{":
                return self._closed(Group(self.sequence()), "}")
            case "if":
                return self._closed(Group(self._if()), "fi")
            case "while":
                return self._closed(Group(self._loop(until=False)), "done")
            case "until":
                return self._closed(Group(self._loop(until=True)), "done")
            case "for":
                return self._closed(Group(self._for()), "done")
            case "case":
                return self._closed(Group(self._case()), "esac")
        return None

    def _closed(self, group: Group, closer: str) -> Group:
        self._expect(closer)
        return group

    def _if(self) -> If:
        branches = []
        while True:
            condition = self.sequence()
            self._expect("then")
            branches.append((condition, self.sequence()))
            if not self._accept("elif"):
                break
        return If(branches, self.sequence() if self._accept("else") else None)

    def _loop(self, *, until: bool) -> Loop:
        condition = self.sequence()
        self._expect("do")
        return Loop(condition, self.sequence(), until)

    def _for(self) -> For:
        token = self.peek()
        if token is None or not token.plain:
            raise SyntaxProblem("a variable's name is missing after for")
        self._at += 1
        self._newlines()
        words = self._words() if self._accept("in") else None
        while self._accept(";", "\n"):
            pass
        self._expect("do")
        return For(token.plain, words, self.sequence())

    def _words(self) -> list[Word]:
        words = []
        while (token := self.peek()) is not None and not token.operator:
            words.append(token.word)
            self._at += 1
        return words

    def _case(self) -> Case:
        subject = self._words_before("in")
        choices = []
        self._newlines()
        while (token := self.peek()) is not None and token.plain != "esac":
            self._accept("(")
            patterns = [self._one_word()]
            while self._accept("|"):
                patterns.append(self._one_word())
            self._expect(")")
            choices.append((patterns, self.sequence()))
            self._accept(";;")
            self._newlines()
        return Case(subject, choices)

    def _words_before(self, keyword: str) -> Word:
        word = self._one_word()
        self._newlines()
        self._expect(keyword)
        return word

    def _one_word(self) -> Word:
        token = self.peek()
        if token is None or token.operator:
            raise SyntaxProblem(f"unexpected {self.describe()}")
        self._at += 1
        return token.word

    def _redirect(self) -> Redirect | None:
        token = self.peek()
        if token is None or token.operator not in _REDIRECTS:
            return None
        self._at += 1
        fd = token.fd if token.fd is not None else (0 if token.operator.startswith("<") else 1)
        return Redirect(fd, token.operator, self._one_word())

    def _simple(self) -> Simple:
        command = Simple()
        while (token := self.peek()) is not None:
            if (redirect := self._redirect()) is not None:
                command.redirects.append(redirect)
                continue
            if token.operator:
                break
            self._at += 1
            first = token.word[0] if token.word else None
            match = _ASSIGNMENT.match(first.value) if first and first.kind == "text" and not first.quoted else None
            if match is not None and first is not None and not command.words:
                rest = Part("text", first.value[match.end() :], False)
                command.assignments.append((match[0][:-1], [rest, *token.word[1:]]))
            else:
                command.words.append(token.word)
        if not (command.words or command.assignments or command.redirects):
            raise SyntaxProblem(f"unexpected {self.describe()}")
        return command
