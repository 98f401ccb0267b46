from __future__ import annotations

import json
import os
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.errors import ConfigError, InvalidFleet
from skerry.fleet import tree
from skerry.fleet.fields import ALIASES, HEALTH_READERS, PHASE_FIELDS, SECRET_FIELDS, SPEC_FIELDS
from skerry.fleet.load import TOP_FIELDS, load
from skerry.fleet.model import File, FleetSpec, Healthcheck, OnFailure, Phase
from skerry.fleet.plan import graph_lines, order
from skerry.model.secrets import Secret
from skerry.model.spec import Cache, Mount, Network, Spec, SpecOptions, Workspace

PAGE = Path(__file__).parents[2] / "docs/reference/fleet-file.md"


def problems(text: str, path: str = "fleet.yaml") -> list[str]:
    """What is wrong with a file, each as `LINE:COLUMN: message`."""
    with pytest.raises(InvalidFleet) as caught:
        load(path, text)
    assert str(caught.value).startswith(path)
    return [f"{each.line}:{each.column}: {each.message}" for each in caught.value.problems]


def phase(body: str, **options: Any) -> Phase:
    """The one phase of a fleet with these fields, given as a flow table."""
    return load("fleet.yaml", f"name: demo\nphases:\n  a: {body}\n", **options).phases[0]


def test_a_small_file_is_a_fleet() -> None:
    assert load("fleet.yaml", "name: demo\nphases: [{name: a}]") == FleetSpec(name="demo", phases=(Phase(name="a"),))


def test_a_whole_file_is_a_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    (tmp_path / "app.conf").write_bytes(b"\xffdata")
    file = tmp_path / "fleet.yaml"
    file.write_text("""\
name: demo
project: work
provider: mock
image: base
timeout: 10m
max_parallel: 4
max_per_phase: 20
x-anchors: &small {memory: 64M, cpus: 0.5}
defaults:
  env: {MODE: test, LEVEL: 3}
  labels: [team=x]
phases:
  - name: db
    <<: *small
    disk: 1G
    egress: 10M
    healthcheck: {command: [pg_isready, -q], interval: 500ms, timeout: 2s, retries: 9, start_period: 3}
  - name: workers
    count: 8
    wait_for: db
    image: worker
    cpu: "2"
    pids: 64
    on_failure: continue
    timeout: 90s
    max_parallel: 2
    env: [LEVEL=4, TOKEN, ABSENT_VARIABLE]
    user: 1000:1000
    cwd: /srv
    network: bridge
    cache: read
    cache_paths: {mine: /var/mine}
    writable_root: true
    mounts: [./data:/data:ro, {source: /usr, target: /host-usr}]
    workspace: {path: work, copy: true}
    lifetime: never
    idle: 1h
    setup:
      - echo hello
      - [ls, -l, /]
    files:
      /etc/motd: "hi"
      /etc/app.conf: {from: app.conf, mode: 0640}
""")
    spec = Spec.of(
        provider="mock", image="base", memory="64M", cpus=0.5, disk="1G", egress="10M",
        env={"MODE": "test", "LEVEL": "3"}, labels={"team": "x"},
    )  # fmt: skip
    check = Healthcheck(command=("pg_isready", "-q"), interval_s=0.5, timeout_s=2, retries=9, start_period_s=3)
    workers = Phase(
        name="workers",
        count=8,
        wait_for=("db",),
        on_failure=OnFailure.CONTINUE,
        timeout_s=90,
        max_parallel=2,
        inherited=("ABSENT_VARIABLE", "TOKEN"),
        setup=("echo hello", ("ls", "-l", "/")),
        files=(
            File(path="/etc/motd", content=b"hi"),
            File(path="/etc/app.conf", content=b"\xffdata", mode=0o640),
        ),
        spec=Spec.of(
            provider="mock",
            image="worker",
            cpus=2,
            pids=64,
            env={"MODE": "test", "LEVEL": "4", "TOKEN": "secret"},
            labels={"team": "x"},
            user="1000:1000",
            cwd="/srv",
            network=Network.BRIDGE,
            cache=Cache.READ,
            cache_paths={"mine": "/var/mine"},
            writable_root=True,
            mounts=[
                Mount(source=str(tmp_path / "data"), target="/data", read_only=True),
                Mount(source="/usr", target="/host-usr"),
            ],
            workspace=Workspace(path=str(tmp_path / "work"), copy=True),
            lifetime=None,
            idle="1h",
        ),
    )
    assert load(file) == FleetSpec(
        name="demo",
        project="work",
        timeout_s=600,
        max_parallel=4,
        max_per_phase=20,
        phases=(Phase(name="db", spec=spec, healthcheck=check), workers),
    )


def test_phases_can_be_a_table_by_name() -> None:
    fleet = load("fleet.yaml", "name: demo\nphases:\n  db:\n  web: {count: 2, wait_for: [db]}\n")
    assert [(each.name, each.count, each.wait_for) for each in fleet.phases] == [("db", 1, ()), ("web", 2, ("db",))]


def test_the_provider_of_the_caller_is_taken_where_the_file_names_none() -> None:
    assert phase("{}", provider="mock").spec.provider == "mock"
    assert phase("{provider: other}", provider="mock").spec.provider == "other"


def test_json_is_a_file_too() -> None:
    assert load("fleet.json", '{"name": "demo", "phases": {"a": {"count": 2}}}').phases[0].count == 2


def test_characters_that_json_writes_as_two_escapes_are_one() -> None:
    assert phase(r'{env: {A: "\ud83d\ude00"}}').spec.env == {"A": "\U0001f600"}
    assert any("half of a character" in each for each in problems(r'name: "\ud83d"'))


def test_words_that_were_booleans_before_yaml_1_2_are_texts() -> None:
    assert phase("{env: {A: no, B: on, C: Yes, D: off, E: y, F: 0123, G: 1_000, H: 12:30:45}}").spec.env == {
        "A": "no", "B": "on", "C": "Yes", "D": "off", "E": "y", "F": "0123", "G": "1_000", "H": "12:30:45",
    }  # fmt: skip
    assert phase("{env: {A: true, B: 1.50, C: '', D: ~x}}").spec.env == {"A": "true", "B": "1.50", "C": "", "D": "~x"}
    assert problems("name: demo\nphases:\n  a: {writable_root: yes}") == [
        "3:22: phase 'a': writable_root: must be true or false, and is 'yes'"
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None), ("~", None), ("null", None), ("true", True), ("FALSE", False), ("12", 12), ("-3", -3), ("0o17", 15),
        ("0x1F", 31), ("1.5", 1.5), (".5", 0.5), ("1e3", 1000.0), (".inf", float("inf")), ("-.INF", float("-inf")),
        ("nULL", "nULL"), ("tRUE", "tRUE"), ("0b1", "0b1"), ("1_0", "1_0"), ("+", "+"), (".", "."), ("inf", "inf"),
    ],
)  # fmt: skip
def test_plain_values_are_what_the_core_schema_says(text: str, value: object) -> None:
    found = tree.Scalar(1, 1, text, plain=True).value
    assert (type(found), found) == (type(value), value)
    assert tree.Scalar(1, 1, text, plain=False).value == text


def test_all_mistakes_are_told_at_once_each_with_its_place() -> None:
    text = """\
name: Demo
max_per_phase: 5
fases: 3
defaults: {memory: lots, envv: 1}
phases:
  - name: db
    count: -1
    count: 2
    wait_for: web
  - name: workers
    count: 9
    cpus: many
    memory: 1
    wait_for: [bd, workers, db, db]
    setup: [[]]
    lifetime: -3
  - name: web
    on_failure: explode
    wait_for: [db]
    timeout: 0
  - count: 1
  - name: all
  - name: web
    image: [a]
    labels: {skerry.fleet: x}
  - 17
"""
    assert problems(text) == [
        "1:7: name: 'Demo' must be lower-case letters, digits, '.', '_' or '-', at most 63",
        "3:1: unknown field 'fases'; did you mean 'phases'?",
        "4:20: phase 'db': memory: 'lots' is not a size; write bytes or e.g. 512M, 2G",
        "4:26: defaults: unknown field 'envv'; did you mean 'env'?",
        "7:12: phase 'db': count: -1 is out of range; 0 to 1000",
        "8:5: 'count' is given twice, first in line 7",
        "9:15: phase 'db': wait_for goes in a circle, so none of them would start: db -> web -> db",
        "11:12: phase 'workers': count 9 is more than max_per_phase, which is 5",
        "12:11: phase 'workers': cpus: must be a number, and is 'many'",
        "13:13: phase 'workers': memory: 1 is out of range; the least is 16777216",
        "14:16: phase 'workers': wait_for names 'bd', and there is no such phase; did you mean 'db'?",
        "14:20: phase 'workers': wait_for names the phase itself, so it would never start",
        "14:33: phase 'workers': wait_for names 'db' twice",
        "15:12: phase 'workers': setup: () is not a command",
        "16:15: phase 'workers': lifetime_s: -3.0 is out of range; 0 means never",
        "18:17: phase 'web': on_failure: must be fail-fast or continue",
        "20:14: phase 'web': timeout: 0 s is out of range; 0.001 s to 604800 s",
        "21:5: a phase: name: must be given",
        "22:11: phase 'all': name: 'all' means every member; choose another",
        "23:11: phase 'web': there is a phase of this name already",
        "24:12: phase 'web': image: must be a text, and is a list",
        "25:13: phase 'web': labels: 'skerry.fleet' is ours: labels that begin with 'skerry.' are",
        "26:5: phases: each must be a table with a name",
    ]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("{count: 1.5}", "count: must be a whole number, and is 1.5"),
        ("{count: '2'}", "count: must be a whole number, and is '2'"),
        ("{count: 99999999999999999999}", "count: must be a whole number"),
        ("{count: 101}", "count 101 is more than max_per_phase, which is 100"),
        ("{image: true}", "image: must be a text, and is true; put it in quotes"),
        ("{image: }", "image: must be a text, and is empty"),
        ("{image: ''}", "image: '' is not an image reference"),
        ("{memory: {}}", "memory: must be a number or a text, and is a table"),
        ("{memory: 12 parsecs}", "memory: '12 parsecs' is not a size"),
        ("{cpu: 1, cpus: 2}", "are the same; give one of them"),
        ("{cpus: .nan}", "cpus: nan is out of range"),
        ("{pids: 1}", "pids: 1 is out of range"),
        ("{timeout: soon}", "timeout: 'soon' is not a duration"),
        ("{timeout: .inf}", "timeout: inf is not a duration"),
        ("{network: the moon}", "network: 'the moon' must be none, rules, bridge"),
        ("{env: {A: [1]}}", "env: 'A' must be a text, and is a list"),
        ("{env: [A=1, A=2]}", "env: 'A' is given twice"),
        ("{env: {SKERRY_INDEX: 3}}", "env: SKERRY_INDEX is set for each member"),
        ("{env: ['=x']}", "env: '' is not a name=value"),
        ("{labels: [a]}", "labels: 'a' has no value"),
        ("{labels: {a: }}", "labels: 'a' has no value"),
        ("{mounts: [nothing]}", "is not SOURCE:TARGET"),
        ("{mounts: [/a:/proc]}", "mounts: target '/proc' is reserved"),
        ("{mounts: [{source: /a}]}", "mounts: target must be given"),
        ("{mounts: [{source: /a, target: /b, read-only: true}]}", "did you mean 'read_only'?"),
        ("{workspace: {copy: true}}", "workspace: give a path or a source"),
        ("{cache_paths: {a: /b}}", "cache_paths: without cache there is none"),
        ("{setup: [{a: 1}]}", "setup: must be a text, and is a table"),
        ("{files: [a]}", "files: must be a table (NAME: VALUE), and is a list"),
        ("{files: {/a: {text: x, from: /etc/passwd}}}", "files: '/a': give either text or from"),
        ("{files: {/a: {from: /nonexistent/file}}}", "/nonexistent/file cannot be read: No such file"),
        ("{files: {/a: {from: /}}}", "/ is not a file"),
        ("{files: {/a: {text: x, mode: rwx}}}", "must be a mode such as 0644, and is 'rwx'"),
        ("{files: {/a: {text: x, mode: 0899}}}", "must be a mode such as 0644"),
        ("{healthcheck: {interval: 1s}}", "healthcheck: command must be given"),
        ("{healthcheck: {command: x, retries: 0}}", "healthcheck: retries 0 is out of range"),
        ("{healthcheck: {command: x, interval: never}}", "interval: must be a duration, and is 'never'"),
        ("{wait_for: {b: 1}}", "wait_for: must be a list, and is a table"),
        ("{wait_for: a}", "wait_for names the phase itself"),
        ("{reach: [db]}", "reach: 'db' is not NAME:PORT, such as db:5432"),
        ("{reach: ['a:70000']}", "reach: 'a:70000' is not NAME:PORT, such as db:5432, with a port from 1 to 65535"),
        ("{reach: ['a:0']}", "with a port from 1 to 65535"),
        ("{reach: ['-=a:1']}", "reach: '-=a:1': it is no host name"),
        ("{reach: ['5:80']}", "reach: '5:80': programs take that for an address"),
        ("{reach: [localhost=a:80]}", "reach: 'localhost=a:80': programs take that for an address"),
        ("{reach: ['b:80']}", "reach names 'b', and there is no such phase or member; there are a"),
        ("{reach: [agent-a-002:80]}", "reach names 'agent-a-002', and there is no such phase or member"),
        ("{reach: [x=agent-b-001:80]}", "reach names 'agent-b-001', and there is no such phase or member"),
        ("{reach: {a: 80}}", "reach: must be a list, and is a table"),
        ("{allow: ['pypi.org:0']}", "allow: 'pypi.org:0': '0' is no port"),
        ("{deny: [a.b:x]}", "deny: 'a.b:x': 'x' is no port"),
        ("{allow: pypi.org, network: bridge}", "allow: a box on the network bridge does not need the gate"),
        ("{egress: 1M, network: bridge}", "egress: a box on the network bridge does not need the gate"),
        ("{egress: much}", "egress: 'much' is not a size"),
        ("{internal: 1}", "internal: must be true or false, and is 1"),
        ("{internal: true, allow: pypi.org}", "allow: what is internal reaches nothing but its fleet"),
        ("{internal: true, secrets: {A: {hosts: a.b}}}", "secrets: what is internal reaches nothing but its fleet"),
        ("{internal: true, network: bridge}", "network: what is internal reaches nothing but its fleet"),
        ("{secrets: [A]}", "secrets: must be a table (NAME: VALUE), and is a list"),
        ("{secrets: {A: }}", "secrets: say which hosts a secret is for"),
        ("{secrets: {A: {hosts: a.b, value: x}}}", "secrets: 'A': unknown field 'value'"),
        ("{secrets: {A: {hosts: 10.0.0.1}}}", "secrets: hosts are names, not addresses"),
        ("{secrets: {A: {hosts: a.b, env: A, file: x}}}", "secrets: give one of env, file and command"),
        ("{secrets: {'A-B': {hosts: a.b}}}", "secrets: 'A-B' is no name of a variable"),
        ("{name: b}", "unknown field 'name'"),
        ("{wait-for: b}", "unknown field 'wait-for'; did you mean 'wait_for'?"),
        ("[1]", "it: must be a table"),
        ("{? [a, b] : c}", "a key must be a text"),
    ],
    ids=str,
)
def test_a_wrong_field_is_told_in_its_line(body: str, told: str) -> None:
    found = problems(f"name: demo\nphases:\n  a: {body}\n")
    assert len(found) == 1, found
    assert found[0].startswith("3:")
    assert told in found[0]


def test_a_phase_says_what_its_members_reach() -> None:
    text = """\
name: demo
phases:
  db: {count: 2, internal: true}
  web:
    reach: [db:5432, agent-db-002:5433, "store=db:5432"]
    allow: [python, PyPI.org, "github.com:22"]
    deny: pypi.org:80
    secrets:
      TOKEN: {hosts: [api.example.org], file: token, hook: "signing:sign"}
      OTHER: {hosts: other.example.org, command: [pass, show, other]}
"""
    db, web = load("/srv/fleet.yaml", text).phases
    assert db.spec == Spec.of(project="demo")
    assert web.spec == Spec.of(
        project="demo",
        network=Network.RULES,
        reach=["db:5432", "agent-db-002:5433", "store=db:5432"],
        allow=["python", "pypi.org", "github.com:22"],
        deny=["pypi.org:80"],
        secrets={
            "TOKEN": Secret(hosts=("api.example.org",), file="/srv/token", hook="signing:sign"),
            "OTHER": Secret(hosts=("other.example.org",), command=("pass", "show", "other")),
        },
    )


def test_rules_among_the_defaults_do_not_hold_where_a_phase_has_another_network() -> None:
    text = """\
name: demo
defaults: {allow: python, deny: a.b, reach: ["db:1"], secrets: {A: {hosts: a.b}}}
phases:
  db: {internal: true}
  closed: {network: none}
  open: {network: bridge}
  other: {allow: [c.d]}
"""
    db, closed, opened, other = (each.spec for each in load("fleet.yaml", text).phases)
    assert (db.network, db.reach, db.allow, db.deny, db.secrets) == (Network.RULES, ("db:1",), (), (), {})
    assert (closed.network, closed.reach, opened.network) == (Network.NONE, (), Network.BRIDGE)
    assert (other.allow, other.deny, list(other.secrets)) == (("c.d",), ("a.b",), ["A"])


def test_sets_of_rules_that_there_are_not_are_told_where_they_are_known() -> None:
    text = "name: demo\nphases:\n  a: {allow: [python, corp, pythn], deny: nonsense}\n"
    assert load("fleet.yaml", text).phases[0].spec.allow == ("python", "corp", "pythn")
    with pytest.raises(InvalidFleet) as caught:
        load("fleet.yaml", text, sets={"corp": ("*.corp.example",)})
    told = [(each.line, each.column, each.message.partition(" is called so")[0]) for each in caught.value.problems]
    assert told == [
        (3, 29, "phase 'a': allow: 'pythn': a name has a dot in it, and no set"),
        (3, 43, "phase 'a': deny: 'nonsense': a name has a dot in it, and no set"),
    ]


def test_members_that_are_not_there_are_told_at_the_place_of_each() -> None:
    text = (
        "name: demo\nphases:\n  db: {count: 2}\n  web:\n    reach:\n      - db:1\n      - bd:1\n      - agent-db-3:1\n"
    )
    assert problems(text) == [
        "7:9: phase 'web': reach names 'bd', and there is no such phase or member; did you mean 'db'?",
        "8:9: phase 'web': reach names 'agent-db-3', and there is no such phase or member; there are db, web",
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "1:1: the file is empty"),
        ("# only this\n", "1:1: the file is empty"),
        ("- a\n", "1:1: a fleet's file must be a table with 'name' and 'phases'"),
        (
            "name: a\nphases: []\n",
            "2:9: phases: must be a list of phases, or a table of them by name, with at least one",
        ),
        ("name: a\nphases:\n\t- b\n", "3:1: not YAML: while scanning for the next token found character '\\t'"),
        ("name: [1, 2\n", "not YAML: while parsing a flow sequence"),
        ("name: 'x\n", "not YAML: while scanning a quoted scalar"),
        ("name: a\x01b\n", "1:8: the character U+0001 cannot be in a YAML file"),
        ("%YAML 1.1\n---\nname: a\n", "2:1: the file must be YAML 1.2"),
        ("name: a\n---\nname: b\n", "2:1: there is a second document"),
        ("name: *nothing\n", "1:7: *nothing names no anchor before it"),
        ("name: &a [*a]\n", "1:11: *a is inside of what it names"),
        ("name: !!python/object:os.system x\n", "1:7: the tag tag:yaml.org,2002:python/object:os.system means nothing"),
        ("name: a\nphases: {a: {<<: 3}}\n", "2:18: << must name a table"),
        ("[" * 100_000, "1:34: nested deeper than 32"),
        ("a: " * 100_000, "not YAML"),
        ("- " * 100_000, "nested deeper than 32"),
    ],
    ids=lambda text: text[:20],
)
def test_what_cannot_be_a_fleet_is_told_in_its_line(text: str, told: str) -> None:
    assert any(told in each for each in problems(text))


def test_both_name_and_phases_are_missed() -> None:
    assert problems("timeout: 3") == [
        "1:1: name: must be given: the fleet's members are found by it",
        "1:1: phases: must be a list of phases, or a table of them by name, with at least one",
    ]


def test_aliases_that_stand_for_very_much_are_refused() -> None:
    names = "abcdefghij"
    bomb = "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
    for last, name in pairwise(names):
        bomb += f"{name}: &{name} [{', '.join([f'*{last}'] * 10)}]\n"
    assert "more than 50000 values" in problems(bomb)[0]


def test_a_fleet_of_very_many_phases_is_refused_and_a_long_chain_is_drawn() -> None:
    chain = "name: demo\nphases:\n  p0:\n" + "".join(f"  p{at}: {{wait_for: p{at - 1}}}\n" for at in range(1, 500))
    fleet = load("fleet.yaml", chain)
    assert len(order(fleet)) == len(graph_lines(fleet)) == 500
    assert problems(chain + "  more:\n") == ["1:1: phases: 501 phases; at most 500"]


def test_a_file_that_is_too_large_is_not_read_further(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_bytes(b"#" * (tree.MAX_BYTES + 1))
    with pytest.raises(InvalidFleet, match="larger than 512 KiB"):
        load(file)
    with pytest.raises(InvalidFleet, match="larger than 512 KiB"):
        load("/dev/zero")
    assert "larger than 512 KiB" in problems("#" * (tree.MAX_BYTES + 1))[0]


def test_a_file_that_is_no_utf_8_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_bytes(b"name: demo\nphases: {\xff}\n")
    with pytest.raises(InvalidFleet) as caught:
        load(file)
    assert str(caught.value) == f"{file}:2:10: the file is not text in UTF-8"
    file.write_bytes("\ufeffname: d\nphases: {a: }".encode())
    assert load(file).name == "d"


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidFleet, match=r"fleet\.yaml: cannot be read: No such file"):
        load(tmp_path / "fleet.yaml")


def test_a_pipe_among_the_files_does_not_hold_us_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidFleet, match="pipe is not a file"):
        load(tmp_path / "fleet.yaml", "name: demo\nphases: {a: {files: {/a: {from: pipe}}}}")


def test_a_mistake_among_the_defaults_is_told_once() -> None:
    text = "name: demo\ndefaults: {memory: 1}\nphases: {a: , b: , c: }"
    assert problems(text) == ["2:20: phase 'a': memory: 1 is out of range; the least is 16777216"]


def test_the_value_of_a_variable_of_the_caller_is_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "hunter2" * 30_000)
    found = problems("name: demo\nphases: {a: {env: [TOKEN]}}")
    assert found == ["2:19: phase 'a': env: more than 131072 bytes"]


def test_without_the_yaml_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ruamel.yaml", None)
    with pytest.raises(ConfigError, match=r"pip install 'skerry\[fleet\]'"):
        load("fleet.yaml", "name: demo")


def is_told_or_a_fleet(text: str) -> bool:
    try:
        return isinstance(load("fleet.yaml", text), FleetSpec)
    except InvalidFleet as error:
        return bool(error.problems)


@given(st.text(st.sampled_from("abn:-[]{},&*!|>'\"%#?\t\n 01<x.") | st.characters(), max_size=60))
def test_no_text_makes_it_fail_otherwise(text: str) -> None:
    assert is_told_or_a_fleet(text)
    assert is_told_or_a_fleet(f"name: demo\nphases: {text}")
    assert is_told_or_a_fleet(f"name: demo\nphases:\n  a: {{{text}}}")


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
keys = st.sampled_from(sorted(PHASE_FIELDS)) | st.text(max_size=3)
values = st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3))


@given(st.sampled_from(sorted(PHASE_FIELDS)), values)
def test_no_value_of_a_field_makes_it_fail_otherwise(field: str, value: object) -> None:
    assert is_told_or_a_fleet(json.dumps({"name": "demo", "phases": {"a": {field: value}}}))


def test_a_phase_has_every_option_of_a_spec() -> None:
    assert set(SpecOptions.__annotations__) - {"project", "name", "timeout"} | {"default_timeout"} == SPEC_FIELDS
    assert set(PHASE_FIELDS) >= SPEC_FIELDS


@pytest.mark.parametrize(
    ("heading", "fields"),
    [
        ("The file", set(TOP_FIELDS)),
        ("A phase", {"name", *PHASE_FIELDS} - SPEC_FIELDS - set(ALIASES)),
        ("What its members are", SPEC_FIELDS),
        ("A secret", set(SECRET_FIELDS)),
        ("A health check", set(HEALTH_READERS)),
    ],
)
def test_the_page_has_every_field_and_no_other(heading: str, fields: set[str]) -> None:
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", section, re.MULTILINE)
    assert sorted(name for row in rows for name in re.findall(r"\w+", row)) == sorted(fields)


@pytest.mark.parametrize("provider", ["docker", "podman", "incus", "vmdocker"])
def test_a_phase_without_an_image_is_a_mistake_where_its_provider_needs_one(provider: str) -> None:
    text = f"name: x\nphases:\n  a: {{provider: {provider}}}\n  b: {{provider: {provider}, image: debian}}\n  c: {{}}\n"
    assert len(load("fleet.yaml", text).phases) == 3
    with pytest.raises(InvalidFleet) as caught:
        load("fleet.yaml", text, asks_providers=True)
    told = f"fleet.yaml:3:17: phase 'a': image: {provider} makes its boxes of one, and none is named"
    assert str(caught.value) == told


def test_a_phase_has_a_timeout_for_its_start_and_one_for_commands() -> None:
    text = "name: x\nphases:\n  a: {timeout: 5m, default_timeout: 30s}\n  b: {default_timeout: never}\n"
    a, b = load("fleet.yaml", text).phases
    assert (a.timeout_s, a.spec.timeout_s, b.timeout_s, b.spec.timeout_s) == (300, 30, None, 0)
    with pytest.raises(InvalidFleet, match=r"fleet.yaml:3:\d+: phase 'a': .*timeout"):
        load("fleet.yaml", "name: x\nphases:\n  a: {default_timeout: soon}\n")
