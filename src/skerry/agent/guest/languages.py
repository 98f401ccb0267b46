"""Which interpreter runs which language, in one table."""

from __future__ import annotations

import os

from .channel import Failure

_PYTHON = (
    "import sys\n"
    "path = sys.argv.pop(1)\n"
    "sys.argv[0] = path\n"
    "sys.path[0] = ''\n"  # as in a script of its own folder: modules beside the code can be imported
    "with open(path, 'rb') as file: code = compile(file.read(), path, 'exec')\n"
    "del sys, path, file\n"
    "exec(code)"
)

LANGUAGES: dict[str, tuple[str, list[list[str]]]] = {
    # name: (suffix of the file, commands to try; the file's path comes last)
    "python": (".py", [["python3", "-c", _PYTHON], ["python", "-c", _PYTHON]]),
    "bash": (".sh", [["bash"]]),
    "sh": (".sh", [["sh"]]),
    "node": (".js", [["node"], ["nodejs"]]),
    "ruby": (".rb", [["ruby"]]),
    "perl": (".pl", [["perl"]]),
    "php": (".php", [["php"]]),
    "lua": (".lua", [["lua"], ["lua5.4"], ["lua5.3"]]),
    "r": (".R", [["Rscript"]]),
    "go": (".go", [["go", "run"]]),
    "java": (".java", [["java"]]),
    "deno": (".ts", [["deno", "run", "--quiet"]]),
}

ALIASES = {
    "python3": "python", "py": "python", "javascript": "node", "js": "node", "shell": "sh", "typescript": "deno",
    "ts": "deno", "rscript": "r", "golang": "go",
}  # fmt: skip


def command(language: object, path: str) -> tuple[str, list[str]]:
    """The suffix of the code's file and the command that runs it, for the interpreter that the box has."""
    name = language.lower() if type(language) is str else ""
    name = ALIASES.get(name, name)
    if name not in LANGUAGES:
        raise Failure("invalid", f"no language is called {language!r}; there are: {', '.join(sorted(LANGUAGES))}")
    suffix, commands = LANGUAGES[name]
    for argv in commands:
        if any(os.access(os.path.join(folder or ".", argv[0]), os.X_OK) for folder in path.split(":")):
            return suffix, argv
    tried = " or ".join(argv[0] for argv in commands)
    raise Failure("no_interpreter", f"the box has no interpreter for {name}: {tried} is not on its PATH")
