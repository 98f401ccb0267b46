from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.errors import InvalidSpec
from skerry.model.rules import Rule
from skerry.model.spec import Mount, Network, Spec, new_id, parse_id
from skerry.units import format_duration, format_size, parse_duration, parse_size

WRONG: dict[str, list[Any]] = {
    "provider": ["", "Local", "a b", "../x", "x" * 64, 5, None, "-x"],
    "image": ["", "-v/etc:/x", "a\nb", "a\0b", 5],
    "root": ["relative", "", "/a\0b", 5],
    "memory": [0, -1, 1000, 2**63, 1.5, "512M", True, [], math.nan],
    "cpus": [0, -1, 5000, math.nan, math.inf, "1", [], True],
    "pids": [0, -1, 3, 2**63, 1.5, "10"],
    "disk": [0, -1, 100, 2**63, "1G"],
    "egress": [0, -1, 1023, 2**63, 1.5, "1M", True],
    "env": [[], {"A=B": "x"}, {"": "x"}, {"A": "x\0"}, {"A\0": "x"}, {"A": 1}, {"A": "x" * 200_000}, "A=B"],
    "cwd": ["relative", "", "/a\0b", 5],
    "user": ["", "Root!", "a b", "1:2:3", "-1", "x" * 40, 0],
    "mounts": [
        "x", ["/a:/b"], [{"source": "/a"}], [{"source": "a", "target": "/b"}], [{"source": "/a", "target": "b"}],
        [{"source": "/a", "target": "/"}], [{"source": "/a", "target": "/proc/x"}],
        [{"source": "/a", "target": "/dev"}],
        [{"source": "/a", "target": "/x/../proc"}], [{"source": "/a", "target": "/.skerry/x"}],
        [{"source": "/a", "target": "/b", "mode": "rw"}], [{"source": "/a\0", "target": "/b"}],
        [{"source": "/a", "target": "//proc"}],
    ],
    "snapshot": ["", "A", "a/b", "x" * 64, 5],
    "runtime": ["", "../x", "a b", "-x", 5],
    "target": ["", "../x", "a b", "-x", 5],
    "group": ["", "../x", "a b", "-x", 5],
    "writable_root": [None, "yes", 1],
    "admin": [None, "yes", 1],
    "workspace": [
        {}, {"path": "relative"}, {"path": "/a\0"}, {"source": ""}, {"source": "--upload-pack=x"}, {"source": "a\nb"},
        {"source": "/x", "commit": "-x"}, {"path": "/x", "mode": "ro"}, "/x",
    ],
    "data": ["yes", 1],
    "cache": ["all", "", None, True],
    "cache_paths": [{"A": "/x"}, {"a": "x"}, {"a": "/x\0"}, {"a": "/"}, {"a": "/x/../proc"}, {"a": "/.skerry"}, []],
    "network": ["a b", "-x", "container:x", "", 5, None],
    "allow": ["pypi.org", ["http://pypi.org"], ["a b"], [""], ["pypi.org:0"], ["10.1.0.0/33:443"], [5]],
    "deny": ["pypi.org", ["http://pypi.org"], ["a b"], [""], ["pypi.org:0"], [5]],
    "reach": ["db:5432", ["db"], ["db:"], ["db:0"], ["db:65536"], ["D B:1"], [5]],
    "secrets": [[], {"A": "x"}, {"A": {}}, {"A B": {"hosts": ["a.example"]}}, {"A": {"hosts": ["10.1.0.5"]}}],
    "lifetime_s": [-1, math.nan, math.inf, 2**31, "1h"],
    "timeout_s": [-1, math.nan, math.inf, 2**31, "1h"],
    "idle_s": [-1, math.nan, math.inf, 2**31, "1h"],
    "sleep_after_s": [-1, math.nan, math.inf, 2**31, "1h"],
    "labels": [{"": "x"}, {"a b": "x"}, {"a": "x" * 300}, {"a": "\n"}, {"a": 1}, {f"k{i}": "" for i in range(65)}, []],
    "project": ["", "A", "../x", "x" * 64, None],
    "name": ["", "A", "a/b", "x" * 64, "-x", "."],
    "language": [5, []],
    "command": [[], [""], " ", "", ["a\0"], [5], "x" * 200_000, 5],
    "restart": ["always", "never", "", None, 5],
    "ports": [
        ["80"], [{}], [{"port": 0}], [{"port": 80, "local": 65536}], [{"port": 80}, {"port": 80}], [80], "80",
        [{"port": 1, "local": 9}, {"port": 2, "local": 9}], [{"port": 80, "host": "0.0.0.0"}],
        [{"port": port} for port in range(1, 40)],
    ],
}  # fmt: skip


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in WRONG.items() for v in values])
def test_a_wrong_field_is_refused_and_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidSpec) as caught:
        Spec.parse({field: value})
    assert caught.value.field == field
    assert field.removesuffix("_s") in str(caught.value)


def test_every_field_has_wrong_values_above() -> None:
    assert set(WRONG) == set(Spec.__struct_fields__)


def test_an_unknown_field_is_refused_and_named() -> None:
    with pytest.raises(InvalidSpec, match="colour"):
        Spec.parse({"colour": "red"})


@pytest.mark.parametrize("fields", [{"memory": "512Q"}, {"memory": "-1M"}, {"disk": ""}, {"lifetime": "soon"},
                                    {"idle": "1 fortnight"}, {"lifetime": True}, {"mounts": ["/a"]},
                                    {"mounts": ["/a:/b:rx"]}, {"memory": "nan"}, {"lifetime": math.nan}])  # fmt: skip
def test_what_people_write_wrongly_is_refused_by_its_name(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpec) as caught:
        Spec.of(**fields)
    assert caught.value.field == next(iter(fields))


def test_people_write_sizes_and_durations() -> None:
    spec = Spec.of(memory="512M", disk="1.5G", lifetime="2h", idle=None, mounts=["/src:/dst:ro"], network="host")
    assert (spec.memory, spec.disk, spec.lifetime_s, spec.idle_s) == (2**29, 3 * 2**29, 7200.0, 0)
    assert spec.mounts == (Mount(source="/src", target="/dst", read_only=True),)
    assert spec.network is Network.HOST


def test_what_is_sent_can_be_bounded_where_it_goes_through_the_gate() -> None:
    spec = Spec.of(allow=["pypi.org"], egress="10M")
    assert (spec.egress, spec.network) == (10 << 20, Network.RULES)
    assert Spec.of(egress="10M").network is Network.NONE
    for network in ("bridge", "host", "of-the-engine"):
        with pytest.raises(InvalidSpec, match=f"egress: a box on the network {network} .* use allow"):
            Spec.of(network=network, egress="10M")


def test_a_relative_path_is_taken_from_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert Mount.parse("sub:/x").source == str(tmp_path / "sub")
    assert Spec.of(root=Path("root")).root == str(tmp_path / "root")


def test_a_derived_spec_changes_only_what_it_is_told() -> None:
    spec = Spec.of(memory="64M", env={"A": "1"})
    assert spec.but(cpus=2) == Spec.of(memory="64M", env={"A": "1"}, cpus=2)
    with pytest.raises(InvalidSpec):
        spec.but(cpus=-1)
    with pytest.raises(AttributeError):
        spec.memory = 1  # type: ignore[misc]


def test_only_what_differs_was_asked_for() -> None:
    assert Spec().asked() == set()
    assert Spec.of(memory="64M", network="none", lifetime=None).asked() == {"memory", "lifetime_s"}


names = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,62}", fullmatch=True)
words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0="), min_size=1, max_size=10)
paths = st.builds(lambda name: f"/x/{name}", st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
mounts = st.builds(
    lambda s, t, r: {"source": s, "target": "/mnt" + t.replace(".", "_"), "read_only": r}, paths, paths, st.booleans()
)
valid = st.fixed_dictionaries(
    {},
    optional={
        "provider": names, "image": st.from_regex(r"[a-z][a-z0-9:/.-]{0,40}", fullmatch=True), "root": paths,
        "memory": st.integers(2**24, 2**62), "cpus": st.floats(0.01, 4096), "pids": st.integers(4, 2**40),
        "disk": st.integers(2**20, 2**62), "env": st.dictionaries(words, words, max_size=4), "cwd": paths,
        "user": st.sampled_from(["root", "nobody", "0", "1000:1000"]), "mounts": st.lists(mounts, max_size=3),
        "network": st.sampled_from(list(Network)), "lifetime_s": st.floats(0, 2**30), "idle_s": st.floats(0, 2**30),
        "labels": st.dictionaries(names, names, max_size=4), "project": names, "name": names, "language": words,
    },
)  # fmt: skip


@given(valid)
def test_a_spec_survives_being_written_and_read(fields: dict[str, Any]) -> None:
    spec = Spec.parse(fields)
    assert Spec.parse(msgspec.to_builtins(spec)) == spec
    assert msgspec.json.decode(msgspec.json.encode(spec), type=Spec) == spec
    assert spec.but() == spec


@given(st.dictionaries(st.sampled_from([*Spec.__struct_fields__, "x"]), st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)), max_leaves=5)))  # fmt: skip
def test_no_data_gives_another_error(fields: dict[str, Any]) -> None:
    with contextlib.suppress(InvalidSpec):
        Spec.parse(fields)


ID = "0d9b1c52-8a7e-4f3b-9c1d-2e6f7a8b9c0d"


@pytest.mark.parametrize(
    "text", ["", "x", "A" + ID[1:], ID.replace("-", ""), f"{{{ID}}}", ID + "\n", "../" + ID, f"urn:uuid:{ID}"]
)
def test_an_id_has_one_spelling(text: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        parse_id(text)
    assert caught.value.field == "id"
    made = new_id()
    assert parse_id(made) == made


# rules


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ("https://me@pypi.org:8443/simple", "no URL; write pypi.org:8443$"),
        ("*", "nothing stands for all names"),
        ("a*.org", r"as in \*.example.org"),
        ("*.*.org", r"as in \*.example.org"),
        ("10.1.0.1/16", "did you mean 10.1.0.0/16"),
        ("pypi.org:0", "1 to 65535"),
        ("pypi org", "no host name"),
        (["pypi.org"], "one by one"),
    ],
)
@pytest.mark.parametrize("field", ["allow", "deny"])
def test_what_is_no_rule_is_refused_with_its_field_and_what_to_write(field: str, rule: Any, reason: str) -> None:
    with pytest.raises(InvalidSpec, match=f"^{field}: .*{reason}") as raised:
        Rule.parse(rule, field)
    assert raised.value.field == field


def test_one_text_is_no_list_of_rules() -> None:
    with pytest.raises(InvalidSpec, match="give a list"):
        Spec(allow="python")  # type: ignore[arg-type]


@pytest.mark.parametrize("rules", [{"allow": ["pypi.org"]}, {"deny": ["pypi.org"]}, {"reach": ["db:5432"]}])
def test_who_asks_for_no_network_is_given_none_by_rules(rules: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpec, match="leave network out"):
        Spec.of(network="none", **rules)
    assert Spec.of(**rules).network is Network.RULES
    with pytest.raises(InvalidSpec, match="leave network out"):
        Spec.of(**rules).but(network="none")


# units


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), (5, 5), ("1k", 1024), ("1KiB", 1024), ("2 MB", 2 << 20), (".5G", 1 << 29), ("1T", 1 << 40), ("7b", 7)],
)
def test_sizes(text: int | str, size: int) -> None:
    assert parse_size(text, "f") == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), (5, 5), (0.5, 0.5), ("250ms", 0.25), ("1.5h", 5400), ("2M", 120), ("1d", 86400), ("10 min", 600)],
)
def test_durations(text: float | str, seconds: float) -> None:
    assert parse_duration(text, "f") == pytest.approx(seconds)


@given(st.one_of(st.text(), st.booleans(), st.none(), st.floats(), st.integers()))
def test_units_know_only_numbers_and_errors(value: Any) -> None:
    for parse in (parse_size, parse_duration):
        with contextlib.suppress(InvalidSpec):
            assert math.isfinite(parse(value, "f"))


@given(st.integers(0, 2**60))
def test_a_size_for_people_is_close_to_the_truth(count: int) -> None:
    assert parse_size(format_size(count), "f") == pytest.approx(count, rel=0.06)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0s"), (0.5, "0.5s"), (1, "1s"), (59.9, "59s"), (60, "1m"), (125, "2m 5s"), (3600, "1h"),
        (25194, "6h 59m"), (86400 * 3 + 60, "3d"),
    ],
)  # fmt: skip
def test_a_duration_is_told_in_its_two_largest_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
