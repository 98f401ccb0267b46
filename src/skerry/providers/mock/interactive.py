"""The mock shell at a terminal: a prompt, a line, an answer."""

from __future__ import annotations

import signal

from skerry.providers.mock import syntax
from skerry.providers.mock.kernel import Exit
from skerry.providers.mock.shell import Shell
from skerry.providers.mock.words import Incomplete, SyntaxProblem


async def run_interactive(shell: Shell) -> int:
    """Read and run lines until the input ends or `exit`."""
    context = shell.context
    shell.process.handlers[signal.SIGINT] = lambda: None
    text = ""
    while True:
        await context.stderr.write("> " if text else shell.variables.get("PS1", "$ "))
        line = await context.stdin.readline()
        if not line:
            return shell.status
        text += line.decode(errors="surrogateescape")
        try:
            program = syntax.parse(text)
        except Incomplete:
            continue
        except SyntaxProblem as problem:
            await shell.complain(f"syntax error: {problem}")
            text = ""
            continue
        text = ""
        try:
            await shell.run(program, shell.process.fds)
        except Exit as end:
            return end.code
