"""Quotas: what a sandbox takes of each bound, and what is refused beside those that live."""

from __future__ import annotations

import pytest

from skerry.errors import InvalidSpec, LimitReached
from skerry.model.spec import Spec
from skerry.model.tenants import NO_QUOTA, Quota

MIB = 1 << 20
SENDING = Spec.of(allow=["a.example"], egress="4M")


@pytest.mark.parametrize("field", ["sandboxes", "cpus", "memory", "disk", "egress"])
def test_a_bound_is_0_or_more(field: str) -> None:
    Quota(**{field: 0})
    with pytest.raises(InvalidSpec, match=f"{field} is -1"):
        Quota(**{field: -1})


def test_nothing_is_refused_where_there_is_no_bound() -> None:
    NO_QUOTA.admit(Spec(network="bridge"), [SENDING] * 1000)


@pytest.mark.parametrize(
    ("quota", "spec"),
    [
        (Quota(cpus=2), Spec(cpus=1)),
        (Quota(memory=128 * MIB), Spec.of(memory="64M")),
        (Quota(disk=2048 * MIB), Spec.of(disk="1G")),
        (Quota(egress=8 * MIB), SENDING),
    ],
)
def test_what_all_take_together_keeps_to_the_bound(quota: Quota, spec: Spec) -> None:
    quota.admit(spec, [])
    quota.admit(spec, [spec])
    with pytest.raises(LimitReached, match="destroy some, ask for less, or have its quota raised"):
        quota.admit(spec, [spec, spec])


def test_a_sandbox_says_how_much_it_takes_of_what_is_bounded() -> None:
    for quota, field in ((Quota(cpus=2), "cpus"), (Quota(memory=MIB), "memory"), (Quota(disk=MIB), "disk")):
        with pytest.raises(InvalidSpec, match=f"{field}: say how much"):
            quota.admit(Spec(), [])
    with pytest.raises(InvalidSpec, match="egress: say how much: the project has a quota of 8M a second"):
        Quota(egress=8 * MIB).admit(Spec.of(allow=["a.example"]), [])


def test_what_has_no_network_sends_nothing() -> None:
    quota = Quota(egress=4 * MIB)
    quota.admit(Spec(), [SENDING])
    quota.admit(Spec.of(egress="1G"), [SENDING])
    quota.admit(SENDING, [Spec.of(egress="1G")] * 10)


@pytest.mark.parametrize("network", ["bridge", "host", "of-the-engine"])
def test_a_network_that_goes_past_the_gate_is_refused_where_sending_is_bounded(network: str) -> None:
    with pytest.raises(InvalidSpec, match=f"network: on {network} nothing bounds .* use allow and egress") as caught:
        Quota(egress=4 * MIB).admit(Spec(network=network), [])
    assert caught.value.field == "network"
