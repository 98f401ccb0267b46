"""How the programs of a mock box are written down: tables of names, and the options of a command line."""

from __future__ import annotations

from collections.abc import Callable

from skerry.providers.mock.context import Context
from skerry.providers.mock.kernel import Exit, Program


class Table(dict[str, Program]):
    """Programs by name; as a decorator, it adds one."""

    def __call__(self, *names: str) -> Callable[[Program], Program]:
        def register(function: Program) -> Program:
            self.update(dict.fromkeys(names, function))
            return function

        return register


def options(context: Context, flags: str = "", valued: str = "") -> tuple[dict[str, str], list[str]]:
    """The options and the rest of a command line, as `getopt` cuts it."""
    found: dict[str, str] = {}
    words = list(context.argv[1:])
    rest: list[str] = []
    while words:
        word = words.pop(0)
        if word == "--":
            return found, rest + words
        if len(word) < 2 or word[0] != "-" or word.startswith("--"):
            rest.append(word)
            continue
        for place, flag in enumerate(word[1:], 2):
            if flag in valued:
                found[flag] = word[place:] or (words.pop(0) if words else "")
                break
            if flag not in flags:
                raise Exit(2)
            found[flag] = "yes"
    return found, rest
