"""Canned answers for code: what an interpreter of a mock box says to a given program text."""

from __future__ import annotations

from collections.abc import Callable

from skerry.providers.mock.context import Context

Matcher = str | Callable[[str], bool] | None


class Replies:
    """An interpreter that knows some programs by heart; the first answer that fits is given."""

    def __init__(self) -> None:
        self._answers: list[tuple[Matcher, str | bytes, str | bytes, int, float]] = []

    def add(self, code: Matcher, stdout: str | bytes, stderr: str | bytes, exit_code: int, takes_s: float) -> None:
        self._answers.append((code, stdout, stderr, exit_code, takes_s))

    async def __call__(self, context: Context) -> int:
        code = await _code(context)
        for wanted, stdout, stderr, exit_code, takes_s in self._answers:
            if _fits(wanted, code):
                await context.sleep(takes_s)
                await context.stdout.write(stdout)
                await context.stderr.write(stderr)
                return exit_code
        name = context.argv[0]
        await context.print(f"mock: no reply is registered with `reply` for this {name} code:\n{code}", err=True)
        return 1


def _fits(wanted: Matcher, code: str) -> bool:
    if wanted is None:
        return True
    return wanted.strip() == code.strip() if isinstance(wanted, str) else wanted(code)


async def _code(context: Context) -> str:
    """The program text, however it is given: `-c text`, a file, or standard input."""
    words = context.argv[1:]
    for flag in ("-c", "-e"):
        if flag in words[:-1]:
            return words[words.index(flag) + 1]
    if words:
        return context.read_file(words[0]).decode(errors="replace")
    return (await context.stdin.read_all()).decode(errors="replace")
