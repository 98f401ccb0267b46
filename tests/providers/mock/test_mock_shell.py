"""The mock's shell does what a shell does, as far as it goes."""

from __future__ import annotations

import pytest

from skerry.sandbox.sandbox import AsyncSandbox

SCRIPTS = [
    ("echo a; echo b", "a\nb\n"),
    ("echo a\necho b # not this", "a\nb\n"),
    ("true && echo yes || echo no", "yes\n"),
    ("false && echo yes || echo no", "no\n"),
    ("echo 'a  $HOME'  \"b  $HOME\"", "a  $HOME b  /home/user\n"),
    ("X='a b'; printf '[%s]' $X \"$X\" '' ${X}c", "[a][b][a b][][a][bc]"),
    ("echo \\$HOME a\\ b", "$HOME a b\n"),
    ("X=1 sh -c 'echo $X'; echo \"-$X-\"", "1\n--\n"),
    ("export Y=2; sh -c 'echo $Y'", "2\n"),
    ("false; echo $?; sh -c 'echo $1-$2' name a", "1\na-\n"),
    ("seq 5 | sort -r | head -n 2", "5\n4\n"),
    ("yes | head -n 2", "y\ny\n"),
    ("echo one > f; echo two >> f; cat < f; cat f | head -n 1", "one\ntwo\none\n"),
    ("cat /nope 2> e; cat e", "cat: /nope: No such file or directory\n"),
    ("sh -c 'echo out; echo err >&2' 2>&1 | sort", "err\nout\n"),
    ("cd /tmp; pwd; sh -c 'cd /; pwd'; pwd", "/tmp\n/\n/tmp\n"),
    ("echo 'x y' | sh -c 'read a; echo got $a'", "got x y\n"),
    ("sleep 5 & echo early", "early\n"),
    ("mkdir -p d/e; echo x > d/e/f; cat d/e/f; rm -r d; cat ~/d 2> /dev/null || echo gone", "x\ngone\n"),
]


@pytest.mark.parametrize(("script", "output"), SCRIPTS, ids=[script[:40] for script, _ in SCRIPTS])
async def test_a_script_says_what_a_shell_would(async_sandbox: AsyncSandbox, script: str, output: str) -> None:
    result = await async_sandbox.exec(script, timeout_s=60)
    assert (result.text, result.error_text) == (output, "")


@pytest.mark.parametrize(
    ("script", "code", "complaint"),
    [
        ("exit 7", 7, ""),
        ("false", 1, ""),
        ("nosuch", 127, "nosuch: not found"),
        ("echo > f; ./f", 126, "Permission denied"),
        ("cat nope", 1, "nope: No such file or directory"),
        ("echo 'unclosed", 2, "cannot read"),
        ("if true", 2, "syntax error"),
        ("echo $(true)", 2, "syntax error"),
        ("echo x > /etc/passwd", 2, "Permission denied"),
        ("kill -15 $$", 143, ""),
    ],
)
async def test_what_goes_wrong_has_the_shells_exit_code(
    async_sandbox: AsyncSandbox, script: str, code: int, complaint: str
) -> None:
    result = await async_sandbox.exec(script)
    assert result.exit_code == code
    assert complaint in result.error_text
    assert result.text == ""
