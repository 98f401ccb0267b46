"""Boxes are spread over those members of a cluster that may have them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.errors import LimitReached, NotFound
from skerry.model.spec import Spec
from skerry.providers.incus.cluster import ClusterMember, choose

_NAMES = st.sampled_from([f"n{number}" for number in range(6)])
_MEMBERS = st.lists(
    st.builds(
        ClusterMember,
        name=_NAMES,
        is_online=st.booleans(),
        groups=st.sets(st.sampled_from(["default", "gpu", "arm"])).map(lambda groups: tuple(sorted(groups))),
        scheduler=st.sampled_from(["all", "group", "manual"]),
    ),
    unique_by=lambda member: member.name,
    max_size=6,
)
_SPECS = st.builds(
    lambda target, group: Spec(provider="incus", target=target, group=group),
    st.none() | _NAMES,
    st.none() | st.sampled_from(["default", "gpu", "arm", "unheard-of"]),
)
_BOXES = st.dictionaries(st.sampled_from([f"box{number}" for number in range(12)]), _NAMES)
_ANY = Spec(provider="incus")


@given(_MEMBERS, _BOXES, _BOXES, _SPECS)
def test_a_box_only_goes_where_it_may_be(
    members: list[ClusterMember], running: dict[str, str], in_flight: dict[str, str], spec: Spec
) -> None:
    load = Counter({**running, **in_flight}.values())
    fitting = {each.name: load[each.name] for each in members if each.is_online and may_have(each, spec)}
    if not fitting:
        with pytest.raises((LimitReached, NotFound)):
            choose(members, running, in_flight, spec)
        return
    assert fitting[choose(members, running, in_flight, spec)] == min(fitting.values())


def may_have(member: ClusterMember, spec: Spec) -> bool:
    is_meant = spec.target in (None, member.name) and (spec.group is None or spec.group in member.groups)
    takes = {"all": True, "group": spec.group is not None, "manual": False}[member.scheduler]
    return is_meant and (takes or spec.target == member.name)


@given(st.integers(1, 8), st.integers(0, 40), st.data())
def test_many_at_once_are_spread_evenly(count: int, boxes: int, data: st.DataObject) -> None:
    """Whatever of them is done, half done, or only begun."""
    members = [ClusterMember(f"n{number}") for number in range(count)]
    running: dict[str, str] = {}
    in_flight: dict[str, str] = {}
    for number in range(boxes):
        name = f"box{number}"
        where = choose(members, running, in_flight, _ANY)
        state = data.draw(st.sampled_from(["begun", "listed", "done"]))
        if state != "done":
            in_flight[name] = where
        if state != "begun":
            running[name] = where
    load = Counter({**running, **in_flight}.values())
    assert max(load[each.name] for each in members) - min(load[each.name] for each in members) <= 1


def test_one_that_was_away_is_filled_first() -> None:
    members = [ClusterMember("n1"), ClusterMember("n2", is_online=False), ClusterMember("n3")]
    running = {"a": "n1", "b": "n3", "c": "n2"}
    assert choose(members, running, {"d": "n1"}, _ANY) == "n3"
    members[1] = ClusterMember("n2")
    assert choose(members, running, {"d": "n1", "e": "n3"}, _ANY) == "n2"


@pytest.mark.parametrize(
    ("spec", "kind", "words"),
    [
        (Spec(provider="incus", target="n9"), NotFound, ["target", "'n9'", "n1, n2 (offline)"]),
        (Spec(provider="incus", group="gpu"), NotFound, ["group", "'gpu'", "arm, default"]),
        (Spec(provider="incus", target="n1", group="arm"), NotFound, ["target n1 and group arm", "n1, n2 (offline)"]),
        (Spec(provider="incus", target="n2"), LimitReached, ["target n2", "n2 (offline)", "incus cluster list"]),
        (Spec(provider="incus", group="arm"), LimitReached, ["group arm", "n2 (offline)"]),
    ],
)
def test_what_is_not_there_is_told_with_what_is(spec: Spec, kind: type[Exception], words: list[str]) -> None:
    members = [ClusterMember("n1"), ClusterMember("n2", is_online=False, groups=("default", "arm"))]
    with pytest.raises(kind) as caught:
        choose(members, {}, {}, spec)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_member_for_manual_use_is_only_given_what_asks_for_it() -> None:
    members = [ClusterMember("n1", scheduler="manual"), ClusterMember("n2", scheduler="group", groups=("gpu",))]
    assert choose(members, {}, {}, Spec(provider="incus", target="n1")) == "n1"
    assert choose(members, {}, {}, Spec(provider="incus", group="gpu")) == "n2"
    with pytest.raises(NotFound, match=r"scheduler\.instance"):
        choose(members, {}, {}, _ANY)
