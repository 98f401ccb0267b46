"""What looks like a secret is not in the ledger, whatever the command around it."""

from __future__ import annotations

import shlex
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.ledger.facts import of_spec
from skerry.ledger.redact import HIDDEN, Redactor
from skerry.model.spec import Spec

SECRET = "Zq7xSecretValue9yK"
redactor = Redactor()


def shown(command: list[str] | str) -> str:
    return repr(redactor.command(command))


ARGVS = [
    ["env", f"PASSWORD={SECRET}", "true"],
    ["env", f"GITHUB_TOKEN={SECRET}"],
    ["env", f"AWS_SECRET_ACCESS_KEY={SECRET}"],
    ["env", f"PGPASSWORD={SECRET}", "psql"],
    ["env", f"MYSQL_PWD={SECRET}"],
    ["env", f"OPENAI_API_KEY={SECRET}"],
    ["env", f"SIGNING_KEY={SECRET}"],
    ["tool", "--password", SECRET],
    ["tool", f"--password={SECRET}"],
    ["tool", "--token", SECRET],
    ["tool", f"--api-key={SECRET}"],
    ["tool", "--access-token", SECRET],
    ["tool", "--client-secret", SECRET],
    ["tool", "-password", SECRET],
    ["docker", "login", "-u", "me", "-p", SECRET],
    ["sshpass", "-p", SECRET, "ssh", "host"],
    ["sshpass", f"-p{SECRET}", "ssh", "host"],
    ["mysql", f"-p{SECRET}", "db"],
    ["/usr/bin/mysqldump", "-u", "root", f"-p{SECRET}"],
    ["redis-cli", "-a", SECRET],
    ["ldapsearch", "-w", SECRET],
    ["curl", "-u", f"me:{SECRET}", "https://host"],
    ["curl", "--user", f"me:{SECRET}"],
    ["curl", "-H", f"Authorization: Bearer {SECRET}"],
    ["curl", "-H", f"authorization: token {SECRET}"],
    ["curl", "-H", f"X-Api-Key: {SECRET}"],
    ["curl", "-H", f"PRIVATE-TOKEN: {SECRET}"],
    ["curl", "-H", f"Cookie: a=b; sid={SECRET}"],
    ["curl", f"https://me:{SECRET}@host/path"],
    ["git", "clone", f"https://oauth2:{SECRET}@host/repository.git"],
    ["psql", f"postgresql://me:{SECRET}@host/db"],
    ["curl", f"https://host/path?access_token={SECRET}&x=1"],
    ["curl", "-d", f'{{"user": "me", "password": "{SECRET}"}}'],
    ["bash", "-c", f"export TOKEN={SECRET}; run"],
    ["bash", "-c", f"curl --token '{SECRET} and more' host"],
    ["bash", "-lc", f"mysql -p{SECRET} db | grep x"],
    ["sh", "-c", f'bash -c "sshpass -p {SECRET} ssh host"'],
    ["python", "-c", f"connect(password='{SECRET}')"],
    ["ssh-add", f"-----BEGIN OPENSSH PRIVATE KEY-----\n{SECRET}\n-----END OPENSSH PRIVATE KEY-----"],
    ["echo", f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}"],
]
TOKENS = [
    "ghp_" + "a1B2" * 9,
    "github_pat_" + "a1B2" * 10,
    "glpat-" + "a1B2" * 5,
    "sk-" + "a1B2" * 10,
    "sk-proj-" + "a1_B" * 10,
    "sk_live_" + "a1B2" * 6,
    "AKIA" + "ABCD" * 4,
    "ASIA" + "ABCD" * 4,
    "AIza" + "a1B2" * 8,
    "xoxb-" + "1234-" * 5,
    "hf_" + "aBcD" * 8,
    "npm_" + "aBcD" * 9,
    "pypi-AgE" + "aBcD" * 9,
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U",
]


@pytest.mark.parametrize("argv", ARGVS, ids=lambda argv: " ".join(argv)[:40])
def test_a_secret_in_argv_is_hidden_and_in_the_same_line_for_a_shell_too(argv: list[str]) -> None:
    for command in (argv, shlex.join(argv), ["bash", "-c", shlex.join(argv)]):
        assert SECRET not in shown(command), command
        assert HIDDEN in shown(command)


@pytest.mark.parametrize("token", TOKENS, ids=lambda token: token[:8])
def test_a_token_of_a_known_shape_is_hidden_wherever_it_is(token: str) -> None:
    for command in (
        ["echo", token],
        f"echo {token}",
        f"cat <<< '{token}' | tool",
        ["tool", f"--x={token}"],
        ["git", "clone", f"https://{token}@host/r.git"],
        ["python", "-c", f"print('{token}')"],
    ):
        assert token not in shown(command), command
        assert token[8:] not in shown(command), command


@pytest.mark.parametrize(
    "argv",
    [
        ["git", "status"],
        ["mkdir", "-p", "a/b"],
        ["docker", "run", "-p", "8080:80", "image"],
        ["ls", "-la", "/home/user"],
        ["python", "-m", "pytest", "-k", "test_tokens", "tests/test_password.py"],
        ["git", "log", "--author", "somebody"],
        ["pip", "install", "requests==2.0", "--index-url", "https://pypi.org/simple"],
        ["grep", "-rn", "x = 1", "src"],
        ["curl", "-u", "me", "https://host/p?page=2"],
        ["tar", "-xzf", "a.tgz"],
    ],
    ids=" ".join,
)
def test_what_is_no_secret_stays_readable(argv: list[str]) -> None:
    assert redactor.command(argv) == {"argv": argv}
    assert redactor.command(shlex.join(argv)) == {"shell": shlex.join(argv)}


_VALUES = st.text(string.ascii_letters + string.digits + "!#%+,-./:=?@^_~", min_size=8, max_size=60).filter(
    lambda text: text.strip("!#%+,-./:=?@^_~")
)
_WORDS = st.lists(st.text(string.ascii_letters + "-=./ ", max_size=12), max_size=4)


@given(value=_VALUES.map(lambda text: f"Zq{text}Kz"), before=_WORDS, after=_WORDS, data=st.data())
def test_values_after_secret_names_never_appear(
    value: str, before: list[str], after: list[str], data: st.DataObject
) -> None:
    hide = data.draw(
        st.sampled_from(
            [
                [f"DB_PASSWORD={value}"],
                ["--password", value],
                [f"--token={value}"],
                ["--secret-key", value],
                [f"Authorization: Basic {value}"],
            ]
        )
    )
    argv = ["program", *before, *hide, *after]
    assert value not in shown(argv)
    assert value not in shown(shlex.join(argv))


def test_patterns_of_the_user_hide_more() -> None:
    own = Redactor("redacted", [r"acct-\d+", "(?i)zebra"])
    assert own.command(["pay", "acct-123", "ZEBRA"]) == {"argv": ["pay", HIDDEN, HIDDEN]}
    assert own.command("pay acct-123 | grep Zebra") == {"shell": f"pay {HIDDEN} | grep {HIDDEN}"}


def test_names_alone_tell_the_program_and_nothing_else() -> None:
    names = Redactor("names")
    assert names.command(["/usr/bin/curl", SECRET]) == {"program": "curl"}
    assert names.command(f"TOKEN={SECRET} curl") == {"program": "a shell"}
    assert Redactor("off").is_off


def test_a_long_command_is_cut_and_a_secret_at_the_cut_is_hidden() -> None:
    for size in range(2030, 2060):
        argv = ["echo", "x" * size + f" PASSWORD={SECRET}"]
        for command in (argv, shlex.join(argv), ["a", "b" * size, f"--password={SECRET}"]):
            assert SECRET[:4] not in shown(command)
    assert len(shown(["echo", *["word"] * 100_000])) < 4000
    assert len(shown("word " * 100_000)) < 4000


@pytest.mark.parametrize(
    "text",
    [
        "token" * 20_000,
        "a" * 100_000,
        "password " * 12_000,
        "-p " * 30_000,
        "://a:" * 20_000,
        "'" * 100_000,
        '"' * 99_999,
        "\\" * 99_999,
        "key" * 30_000 + "=",
        "eyJaaaa." * 12_000,
        "-----BEGIN " * 9_000,
        " " * 100_000,
        "bearer" + " " * 100_000,
        "a=b " * 25_000,
        "token:" * 20_000,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_no_command_takes_long_whoever_wrote_it(text: str) -> None:
    """What grows with the square of the length would take longer than any test may."""
    for command in (text, ["program", text, "--password", text], ["bash", "-c", text]):
        assert len(shown(command)) < 20_000


def test_a_spec_is_told_by_names_and_without_values() -> None:
    spec = Spec.of(
        provider="mock",
        image="image",
        env={"B": SECRET, "A": SECRET},
        command=["serve", "--password", SECRET],
        labels={"url": f"https://me:{SECRET}@host"},
        name="box",
    )
    facts = of_spec(spec, redactor)
    assert SECRET not in repr(facts)
    assert facts["env"] == ["A", "B"]
    assert (facts["provider"], facts["image"], facts["name"]) == ("mock", "image", "box")
    assert facts["command"] == {"argv": ["serve", "--password", HIDDEN], "restart": "on-failure"}
    assert "command" not in of_spec(spec, Redactor("off"))
