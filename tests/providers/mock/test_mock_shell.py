"""The mock's shell does what a shell does, as far as it goes."""

from __future__ import annotations

import pytest

from skerry.sandbox import AsyncSandbox

SCRIPTS = [
    ("echo a; echo b", "a\nb\n"),
    ("echo a\necho b # not this", "a\nb\n"),
    ("true && echo yes || echo no", "yes\n"),
    ("false && echo yes || echo no", "no\n"),
    ("! false && echo negated", "negated\n"),
    ("echo 'a  $HOME'  \"b  $HOME\"", "a  $HOME b  /home/user\n"),
    ('X="a b"; for w in $X "$X"; do echo [$w]; done', "[a]\n[b]\n[a b]\n"),
    ("echo \\$HOME a\\ b", "$HOME a b\n"),
    ("X=1 sh -c 'echo $X'; echo \"-$X-\"", "1\n--\n"),
    ("export Y=2; sh -c 'echo $Y'", "2\n"),
    ("false; echo $?; echo ${NOPE:-default} ${HOME:+set}", "1\ndefault set\n"),
    ("f=a.tar.gz; echo ${f%.gz} ${f%%.*} ${f#*.} ${#f}", "a.tar a tar.gz 8\n"),
    ("echo $(echo $(echo deep)) `echo old`", "deep old\n"),
    ("echo $((2 + 3 * 4)) $((10 / 3)) $((1 < 2))", "14 3 1\n"),
    ("seq 5 | grep -v 3 | tail -n 2 | tr '45' 'ab'", "a\nb\n"),
    ("yes | head -n 2", "y\ny\n"),
    ("echo one > f; echo two >> f; cat < f; wc -l < f", "one\ntwo\n2\n"),
    ("ls /nope 2> e; cat e", "ls: cannot access '/nope': No such file or directory\n"),
    ("(echo out; echo err >&2) 2>&1 | sort", "err\nout\n"),
    ("cat <<EOF\nhome: $HOME\nEOF\ncat <<'EOF'\n$HOME\nEOF", "home: /home/user\n$HOME\n"),
    ("i=0; while [ $i -lt 3 ]; do i=$((i + 1)); [ $i = 2 ] && continue; echo $i; done", "1\n3\n"),
    ("for i in 1 2 3; do if test $i -eq 2; then break; fi; echo $i; done", "1\n"),
    ("until false; do echo once; break; done", "once\n"),
    ("if false; then echo a; elif true; then echo b; else echo c; fi", "b\n"),
    ("case x.py in *.txt) echo text;; *.py|*.pyi) echo python;; esac", "python\n"),
    ("cd /tmp; pwd; (cd /; pwd); pwd", "/tmp\n/\n/tmp\n"),
    ("touch b a .h; echo *; echo [ab] '*'", "a b\na b *\n"),
    ("printf '%s-%d\\n' a 1 b 2", "a-1\nb-2\n"),
    ("echo 'x y z' | { read a b; echo $b; }", "y z\n"),
    ("set -- p q; echo $# $1 $2; shift; echo $@", "2 p q\nq\n"),
    ("trap 'echo bye' EXIT; echo hi", "hi\nbye\n"),
    ("trap '' TERM; kill $$; echo alive", "alive\n"),
    ("trap 'echo caught' USR1; kill -USR1 $$; echo on", "caught\non\n"),
    ("(sleep 5; echo late) & echo early; wait; echo end", "early\nlate\nend\n"),
    ("sleep 9 & kill $!; wait $!; echo $?", "143\n"),
    ("exec echo replaced; echo never", "replaced\n"),
    ("eval 'echo $((1+1))'; command -v sh", "2\n/usr/bin/sh\n"),
    ("printf 'b\\na\\n' | sort | tee copy; sha256sum < /dev/null | head -c 8", "a\nb\ne3b0c442"),
    ("mkdir -p d/e; echo x > d/e/f; cp -r d g; mv g h; ln -s h/e/f l; cat l; readlink l", "x\nh/e/f\n"),
    ("echo '#!/bin/sh' > s; echo 'echo script $1' >> s; chmod +x s; ./s now", "script now\n"),
    ("timeout 1 sleep 5; echo $?", "124\n"),
    ("f() { local x=$1; echo f $x; return 3; echo no; }; f a b; echo $?", "f a\n3\n"),
    ("date +%Y; id -u; whoami; hostname", "2026\n1000\nuser\nskerry\n"),
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
        ("touch f; ./f", 126, "Permission denied"),
        ("cat nope", 1, "nope: No such file or directory"),
        ("echo 'unclosed", 2, "is not closed"),
        ("if true", 2, "syntax error"),
        ("echo x > /etc/passwd", 2, "Permission denied"),
        ("set -e; false; echo never", 1, ""),
        ("kill -TERM $$", 143, ""),
        ("echo ${X?is missing}", 2, "X: is missing"),
    ],
)
async def test_what_goes_wrong_has_the_shells_exit_code(
    async_sandbox: AsyncSandbox, script: str, code: int, complaint: str
) -> None:
    result = await async_sandbox.exec(script)
    assert result.exit_code == code
    assert complaint in result.error_text
    assert result.text == ""
