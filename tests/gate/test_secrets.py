"""Values of secrets: where they come from, where they go in requests, and that nothing shows them."""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.errors import InvalidSpec
from skerry.gate import secrets as module
from skerry.gate.secrets import (
    NoValue,
    Value,
    Vault,
    covering,
    environment,
    from_environment,
    placeholder,
    seed_of,
)
from skerry.gate.substitute import Substitution, Unfit
from skerry.model.secrets import Secret
from skerry.model.spec import new_id

HOSTS = ("api.example.org",)
FROM_ENV = Secret(hosts=HOSTS)
SEED = bytes(32)


@pytest.fixture
def vault(tmp_path: Path) -> Vault:
    return Vault(tmp_path / "gate")


def test_a_value_shows_itself_to_nobody_who_does_not_ask() -> None:
    value = Value("the-value")
    assert value.reveal() == "the-value"
    for shown in (repr(value), str(value), f"{value}", f"{[value]}"):
        assert "the-value" not in shown
    with pytest.raises(TypeError):
        pickle.dumps(value)
    with pytest.raises(TypeError):
        msgspec.json.encode(value)


def test_a_placeholder_has_the_name_and_nothing_of_the_value() -> None:
    assert re.fullmatch(r"skerry-secret-TOKEN-[0-9a-f]{32}", placeholder("TOKEN", SEED))
    assert placeholder("TOKEN", SEED) != placeholder("OTHER", SEED).replace("OTHER", "TOKEN")
    assert placeholder("TOKEN", SEED) != placeholder("TOKEN", b"\1" * 32)


def test_each_sandbox_has_a_seed_of_its_own_that_stays(tmp_path: Path) -> None:
    one, other = new_id(), new_id()
    seed = seed_of(tmp_path / "gate", one)
    module._installation_seed.cache_clear()
    assert seed_of(tmp_path / "gate", one) == seed
    assert seed_of(tmp_path / "gate", other) != seed
    assert seed_of(tmp_path / "elsewhere", one) != seed
    assert (tmp_path / "gate/seed").stat().st_mode & 0o777 == 0o600


def test_a_box_gets_placeholders_and_the_names_of_the_bundle() -> None:
    variables = environment({"TOKEN": FROM_ENV}, SEED, "/home/user/")
    assert variables.pop("TOKEN") == placeholder("TOKEN", SEED)
    assert set(variables.values()) == {"/home/user/.skerry/ca.pem"}
    usual = {"SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", "GIT_SSL_CAINFO"}
    assert usual < set(variables)
    assert environment({}, SEED, "/home/user") == {}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"hosts": ()}, "which hosts"),
        ({"hosts": ("10.0.0.0/8",)}, "names, not addresses"),
        ({"hosts": "api.test"}, "one text; give a list"),
        ({"hosts": ("hunter2",)}, "^secrets: hosts: they are names with a dot, such as api.example.org"),
        ({"hosts": HOSTS, "command": "pass show"}, "command: .* give a list"),
        ({"hosts": HOSTS, "env": "A", "file": "/a"}, "one of env, file and command"),
        ({"hosts": HOSTS, "env": "A", "given": True}, "one of env, file and command, or given"),
        ({"hosts": HOSTS, "file": "relative"}, "absolute path"),
        ({"hosts": HOSTS, "command": ("", "a")}, "no program"),
        ({"hosts": HOSTS, "command": ("a", "\0")}, "no program"),
        ({"hosts": HOSTS, "hook": "module.function"}, "MODULE:FUNCTION"),
    ],
)
def test_a_secret_that_says_no_clear_thing_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidSpec, match=reason):
        Secret(**fields)


def test_values_of_the_environment_are_taken_by_the_program_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "one")
    monkeypatch.setenv("ANOTHER_NAME", "two")
    secrets = {
        "TOKEN": FROM_ENV,
        "RENAMED": Secret(hosts=HOSTS, env="ANOTHER_NAME"),
        "FILE": Secret(hosts=HOSTS, file="/etc/hostname"),
        "COMMAND": Secret(hosts=HOSTS, command=("true",)),
        "GIVEN": Secret(hosts=HOSTS, given=True),
    }
    monkeypatch.setenv("GIVEN", "not for those who give it themselves")
    assert from_environment(secrets) == {"TOKEN": "one", "RENAMED": "two"}
    monkeypatch.delenv("ANOTHER_NAME")
    with pytest.raises(InvalidSpec, match="RENAMED: the variable ANOTHER_NAME is not set"):
        from_environment(secrets)


def test_a_variable_that_is_no_text_is_an_error_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "the-value-\udcff")
    with pytest.raises(InvalidSpec, match="TOKEN: its value is no UTF-8") as caught:
        from_environment({"TOKEN": FROM_ENV})
    assert "the-value" not in repr(caught.value)
    assert caught.value.__context__ is None


def test_a_secret_covers_its_hosts_and_port_80_only_if_it_says_so() -> None:
    secrets = {
        "plain": Secret(hosts=("example.org",)),
        "below": Secret(hosts=("*.example.org",)),
        "clear": Secret(hosts=("example.org:80",)),
        "other": Secret(hosts=("example.org:8443", "api.example.org:8080")),
    }
    assert set(covering(secrets, "example.org", 443)) == {"plain"}
    assert set(covering(secrets, "example.org", 80)) == {"clear"}
    assert set(covering(secrets, "example.org", 8443)) == {"other"}
    assert set(covering(secrets, "api.example.org", 443)) == {"below"}
    assert covering(secrets, "api.example.org", 80) == {}
    assert covering(secrets, "notexample.org", 443) == {}


async def test_a_value_that_was_provided_is_that_sandbox_s_until_it_is_forgotten(vault: Vault) -> None:
    one, other = new_id(), new_id()
    vault.provide(one, {"TOKEN": "first"})
    vault.provide(one, {"TOKEN": "second"})
    assert (await vault.value(one, "TOKEN", FROM_ENV)).reveal() == "second"
    with pytest.raises(NoValue, match=r"the secret TOKEN: .* set TOKEN"):
        await vault.value(other, "TOKEN", FROM_ENV)
    vault.forget(one)
    vault.forget(one)
    with pytest.raises(NoValue):
        await vault.value(one, "TOKEN", FROM_ENV)


async def test_a_file_is_read_when_its_value_is_needed(vault: Vault, tmp_path: Path) -> None:
    file = tmp_path / "token"
    secret = Secret(hosts=HOSTS, file=str(file))
    id = new_id()
    for content, value in ((b"one\n", "one"), (b"two\n\n", "two\n"), (b"three", "three")):
        file.write_bytes(content)
        assert (await vault.value(id, "TOKEN", secret)).reveal() == value


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"),
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"a" * 70_000, "larger than 65536"),
        (b"\xff\xfe", "no UTF-8"),
    ],
)
async def test_a_file_that_has_no_value_is_told_with_the_secret_s_name(
    vault: Vault, tmp_path: Path, content: bytes | None, reason: str
) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(NoValue, match=f"the secret TOKEN: .*{reason}") as raised:
        await vault.value(new_id(), "TOKEN", Secret(hosts=HOSTS, file=str(file)))
    assert str(tmp_path) not in str(raised.value), "the box hears this"


async def test_a_pipe_is_no_file_to_wait_for(vault: Vault, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(NoValue, match="no regular file"):
            await vault.value(new_id(), "TOKEN", Secret(hosts=HOSTS, file=str(path)))


def counting(folder: Path, rest: str) -> Secret:
    """A secret of a command that leaves a line each time that it runs."""
    return Secret(hosts=HOSTS, command=("sh", "-c", f"echo x >> {folder}/runs; {rest}"))


def runs(folder: Path) -> int:
    return len((folder / "runs").read_text().splitlines())


async def test_a_command_runs_once_for_many_requests_and_again_after_a_minute(
    vault: Vault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, id = counting(tmp_path, f"echo value-$(wc -l < {tmp_path}/runs)"), new_id()
    values = await asyncio.gather(*(vault.value(id, "TOKEN", secret) for _ in range(20)))
    assert {value.reveal() for value in values} == {"value-1"}
    now = module.time.monotonic
    monkeypatch.setattr(module.time, "monotonic", lambda: now() + 61)
    assert (await vault.value(id, "TOKEN", secret)).reveal() == "value-2"
    vault.provide(id, {})
    assert (await vault.value(id, "TOKEN", secret)).reveal() == "value-3"


async def test_a_command_that_fails_is_not_run_for_each_request(vault: Vault, tmp_path: Path) -> None:
    secret, id = counting(tmp_path, "echo hidden-value; exit 3"), new_id()
    for _ in range(5):
        with pytest.raises(NoValue, match="the secret TOKEN: its command ended with code 3") as caught:
            await vault.value(id, "TOKEN", secret)
        assert "hidden-value" not in str(caught.value)
    assert runs(tmp_path) == 1


async def test_a_command_that_hangs_is_killed_with_all_that_it_started(
    vault: Vault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_COMMAND_S", 0.3)
    os.mkfifo(tmp_path / "held")
    secret = Secret(hosts=HOSTS, command=("sh", "-c", f"sleep 100 > {tmp_path}/held & sleep 100"))
    with open(os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK), "rb") as held:
        with pytest.raises(NoValue, match=r"did not end in 0\.3 s"):
            await vault.value(new_id(), "TOKEN", secret)
        os.set_blocking(held.fileno(), True)
        assert await asyncio.to_thread(held.read) == b""  # nobody holds the other end


async def test_a_command_that_is_not_there_or_prints_without_end_is_told(vault: Vault) -> None:
    for command, reason in ((("/no/such",), "cannot be run: No such file"), (("yes",), "larger than 65536")):
        with pytest.raises(NoValue, match=reason):
            await vault.value(new_id(), command[0], Secret(hosts=HOSTS, command=command))


NAMES = st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True)
VISIBLE = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40)
AROUND = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20)
QUERY = st.text(st.sampled_from("abc=&+%20.~/?"), max_size=20)


@given(names=st.lists(NAMES, min_size=1, max_size=4, unique=True), data=st.data(), before=AROUND, after=AROUND)
def test_every_placeholder_in_a_header_becomes_its_value_and_the_rest_stays(
    names: list[str], data: st.DataObject, before: str, after: str
) -> None:
    values = {name: data.draw(VISIBLE) for name in names}
    used = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=4))
    substitution = Substitution({name: placeholder(name, SEED) for name in names})
    sent = before + "|".join(placeholder(name, SEED) for name in used) + after
    wanted = before + "|".join(values[name] for name in used) + after
    headers = [(b"X-One", sent.encode()), (b"Host", b"h")]
    assert substitution.find(b"/", headers) == set(used)
    assert substitution.put_in(b"/", headers, values) == (b"/", [(b"X-One", wanted.encode()), (b"Host", b"h")])


@given(user=st.text(max_size=20), value=st.text(min_size=1, max_size=40), case=st.sampled_from(["Basic", "basic"]))
def test_basic_authentication_keeps_the_user_and_gets_the_value(user: str, value: str, case: str) -> None:
    substitution = Substitution({"TOKEN": placeholder("TOKEN", SEED)})

    def header(password: str) -> list[tuple[bytes, bytes]]:
        pair = base64.b64encode(f"{user}:{password}".encode("utf-8", "surrogatepass"))
        return [(b"Authorization", f"{case} ".encode() + pair)]

    try:
        value.encode()
    except UnicodeEncodeError:
        return
    assert substitution.find(b"/", header(placeholder("TOKEN", SEED))) == {"TOKEN"}
    assert substitution.put_in(b"/", header(placeholder("TOKEN", SEED)), {"TOKEN": value})[1] == header(value)


@given(value=VISIBLE, before=QUERY, after=QUERY, encoded=st.sets(st.integers(0, 40)), upper=st.booleans())
def test_a_placeholder_in_the_query_is_found_however_it_is_encoded(
    value: str, before: str, after: str, encoded: set[int], upper: bool
) -> None:
    text = placeholder("TOKEN", SEED)
    form = "%{:02X}" if upper else "%{:02x}"
    spelled = "".join(form.format(ord(c)) if at in encoded else c for at, c in enumerate(text))
    substitution = Substitution({"TOKEN": text})
    target = f"/path?{before}&k={spelled}&{after}".encode()
    assert substitution.find(target, []) == {"TOKEN"}
    made, _ = substitution.put_in(target, [], {"TOKEN": value})
    assert made == f"/path?{before}&k={quote(value, safe='')}&{after}".encode()
    assert unquote(made.decode()).endswith(f"&k={value}&{unquote(after)}")


@given(target=st.binary(max_size=60), value=st.binary(max_size=60))
def test_what_has_no_placeholder_stays_byte_for_byte(target: bytes, value: bytes) -> None:
    substitution = Substitution({"TOKEN": placeholder("TOKEN", SEED)})
    headers = [(b"Authorization", b"Basic " + value), (b"X", value)]
    assert substitution.find(target, headers) == set()
    assert substitution.put_in(target, headers, {"TOKEN": "value"}) == (target, headers)


@pytest.mark.parametrize("value", ["a\r\nb", "a\nb", "a\0b", "a\x7fb", " a", "a "])
def test_a_value_that_would_break_a_header_does_not_get_into_one(value: str) -> None:
    text = placeholder("TOKEN", SEED)
    substitution = Substitution({"TOKEN": text})
    with pytest.raises(Unfit, match="TOKEN") as caught:
        substitution.put_in(b"/", [(b"X", text.encode())], {"TOKEN": value})
    assert value not in str(caught.value)
    target, _ = substitution.put_in(f"/?a={text}".encode(), [], {"TOKEN": value})
    assert unquote(target.decode()) == f"/?a={value}"


def test_short_values_are_not_looked_for_in_answers() -> None:
    substitution = Substitution({"TOKEN": placeholder("TOKEN", SEED)})
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n"
    assert substitution.hide(head, {"TOKEN": "text"}) == head
