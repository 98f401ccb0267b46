"""Decisions by policy alone, and addresses in every spelling."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.errors import InvalidSpec
from skerry.gate.base import Refused
from skerry.gate.decide import check_address, host_of, is_public, ports_of, rule_for
from skerry.model.rules import Rules
from skerry.model.secrets import Secret

from .box import policy

ADDRESSES = {
    "127.0.0.1": "loopback",
    "127.255.255.254": "loopback",
    "0.0.0.0": "this host",
    "0.1.2.3": "this network",
    "10.1.2.3": "private",
    "172.16.0.1": "private",
    "192.168.1.1": "private",
    "100.64.0.1": "shared",
    "100.100.100.200": "metadata",
    "169.254.169.254": "metadata",
    "168.63.129.16": "metadata",
    "192.0.0.192": "metadata",
    "192.0.2.1": "documentation",
    "192.88.99.1": "relay",
    "198.18.0.1": "measurement",
    "224.0.0.1": "multicast",
    "239.255.255.250": "multicast",
    "240.0.0.1": "reserved",
    "255.255.255.255": "broadcast",
    "::": "unspecified",
    "::1": "loopback",
    "::127.0.0.1": "IPv4 of old",
    "fe80::1": "link",
    "fec0::1": "site",
    "fc00::1": "private",
    "fd00:ec2::254": "metadata",
    "ff02::1": "multicast",
    "2001:db8::1": "documentation",
    "3fff::1": "documentation",
    "64:ff9b:1::a00:1": "translated within a site",
    "100::1": "discard",
    "::ffff:127.0.0.1": "loopback as IPv6",
    "::ffff:169.254.169.254": "metadata as IPv6",
    "64:ff9b::7f00:1": "loopback, translated",
    "64:ff9b::a9fe:a9fe": "metadata, translated",
    "2002:7f00:1::1": "loopback, tunnelled",
    "2002:a00:1::": "private, tunnelled",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2": "tunnelled from private",
}


def nobody(address: object) -> bool:
    return False


@pytest.mark.parametrize("text", ADDRESSES, ids=lambda text: f"{text} ({ADDRESSES[text]})")
def test_a_name_does_not_lead_to_an_address_that_is_not_of_the_internet(text: str) -> None:
    with pytest.raises(Refused, match="a rule has to name the address"):
        check_address(policy(["a.test"]), "a.test", 443, ipaddress.ip_address(text), nobody)


@pytest.mark.parametrize(
    "text", ["1.1.1.1", "93.184.216.34", "2606:2800:220:1::1", "64:ff9b::101:101", "2002:101:101::1"]
)
def test_a_name_leads_to_addresses_of_the_internet(text: str) -> None:
    check_address(policy(["a.test"]), "a.test", 443, ipaddress.ip_address(text), nobody)


def test_a_name_does_not_lead_to_an_address_of_this_machine() -> None:
    with pytest.raises(Refused, match="this machine itself"):
        check_address(policy(["a.test"]), "a.test", 443, ipaddress.ip_address("1.1.1.1"), lambda _: True)


def test_a_rule_that_names_the_address_on_the_port_lets_a_name_lead_there() -> None:
    rules = policy(["a.test", "10.1.0.0/16:443", "127.0.0.1:443"])
    for text in ("10.1.0.5", "127.0.0.1", "::ffff:10.1.0.5"):
        check_address(rules, "a.test", 443, ipaddress.ip_address(text), nobody)
    for text, port in (("10.2.0.5", 443), ("10.1.0.5", 80)):
        with pytest.raises(Refused):
            check_address(rules, "a.test", port, ipaddress.ip_address(text), nobody)


@pytest.mark.parametrize("rule", ["0.0.0.0/0", "128.0.0.0/1", "::/0"])
def test_a_rule_for_all_addresses_opens_no_private_ones(rule: str) -> None:
    everything = policy([rule])
    for text in ("169.254.169.254", "192.168.0.1", "fd00::1", "fe80::1"):
        with pytest.raises(Refused, match="a rule has to name the address"):
            check_address(everything, "a.test", 443, ipaddress.ip_address(text), nobody)
    check_address(policy([rule, "192.168.0.1"]), "a.test", 443, ipaddress.ip_address("192.168.0.1"), nobody)
    check_address(policy(["10.0.0.0/8", "fc00::/7"]), "a.test", 443, ipaddress.ip_address("10.1.0.5"), nobody)
    assert rule_for(everything, "2001::1" if ":" in rule else "192.1.1.1", 443) == rule


def test_a_translated_address_needs_a_rule_for_the_address_within() -> None:
    with pytest.raises(Refused):
        check_address(policy(["64:ff9b::/96"]), "a.test", 443, ipaddress.ip_address("64:ff9b::a00:1"), nobody)


def test_the_configuration_lets_its_names_lead_anywhere_but_to_what_is_denied() -> None:
    known = {"db.internal": ("10.1.0.5",)}
    address = ipaddress.ip_address("10.1.0.5")
    check_address(policy(["db.internal"], hosts=known), "db.internal", 443, address, lambda _: True)
    with pytest.raises(Refused):
        check_address(policy(["a.test"], hosts=known), "a.test", 443, address, nobody)
    with pytest.raises(Refused, match="denies"):
        check_address(policy(["db.internal"], ["10.0.0.0/8"], hosts=known), "db.internal", 443, address, nobody)


def test_a_denied_address_is_denied_within_a_translated_one_too() -> None:
    with pytest.raises(Refused, match="denies"):
        check_address(policy(["a.test"], ["1.1.1.1"]), "a.test", 443, ipaddress.ip_address("64:ff9b::101:101"), nobody)


@given(st.ip_addresses())
def test_no_address_is_public_that_python_does_not_call_global(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    if is_public(address):
        assert address.is_global
        assert not address.is_multicast


SPELLINGS = [
    "127.1", "127.0.1", "2130706433", "0x7f000001", "0x7f.0.0.1", "017700000001", "0177.0.0.1", "127.0.0.01",
    "127.0.0.1.", "127.000.000.001", "0", "0x0", "1.2.3", "1.2.3.4.5", "256.1.1.1", "1.1.1.1.0x1",
    "127。0。0。1.", "::1%lo", "fe80::1%eth0", "[::1]", "::ffff:127.0.0.1%1",
]  # fmt: skip


@pytest.mark.parametrize("text", SPELLINGS)
def test_what_some_programs_take_for_an_address_is_no_host(text: str) -> None:
    with pytest.raises(Refused):
        host_of(text)


@pytest.mark.parametrize(
    "text",
    ["", ".", "a..b", "-a.test", "a b.test", "a.test/", "a.test:80", "user@a.test", "a.test\0", "a.test\n", "x" * 64],
)
def test_what_is_no_host_name_is_refused(text: str) -> None:
    with pytest.raises(Refused, match="no host name"):
        host_of(text)


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("PyPI.org", "pypi.org"),
        ("pypi.org.", "pypi.org"),
        ("BÜCHER.example", "xn--bcher-kva.example"),
        ("XN--BCHER-KVA.example", "xn--bcher-kva.example"),
        ("::ffff:10.1.0.5", "10.1.0.5"),
        ("0:0:0:0:0:0:0:1", "::1"),
        ("2001:DB8::0:1", "2001:db8::1"),
        ("1.2.3.4", "1.2.3.4"),
    ],
)
def test_a_host_has_one_spelling(text: str, host: str) -> None:
    assert host_of(text) == host


@given(st.text())
def test_a_host_in_its_one_spelling_stays_the_same(text: str) -> None:
    try:
        host = host_of(text)
    except Refused:
        return
    assert host_of(host) == host


@pytest.mark.parametrize("text", ["fa\u00df.example", "FA\u1e9e.example", "\u03c3\u03c2.example", "a\u200db.example"])
def test_a_name_that_is_two_names_by_two_standards_is_none(text: str) -> None:
    with pytest.raises(InvalidSpec, match="xn--"):
        Rules.of([text])
    with pytest.raises(Refused):
        host_of(text)


@pytest.mark.parametrize("text", ["::ffff:10.1.9.9", "[::ffff:a01:909]:443", "::ffff:10.1.9.0/120"])
def test_rules_may_write_ipv4_as_ipv6(text: str) -> None:
    denying = policy(["10.1.0.0/16"], [text])
    with pytest.raises(Refused, match="denies"):
        rule_for(denying, "10.1.9.9", 443)
    assert rule_for(denying, "10.1.8.9", 443) == "10.1.0.0/16"


RULES = policy(["pypi.org", "*.hosted.org", "github.com:22", "10.1.0.0/16:443"], ["bad.hosted.org", "10.1.9.9:443"])


@pytest.mark.parametrize(
    ("host", "port", "rule"),
    [
        ("pypi.org", 443, "pypi.org"),
        ("files.hosted.org", 80, "*.hosted.org"),
        ("a.b.hosted.org", 443, "*.hosted.org"),
        ("github.com", 22, "github.com:22"),
        ("10.1.0.5", 443, "10.1.0.0/16:443"),
    ],
)
def test_what_a_rule_allows_is_allowed_by_its_name(host: str, port: int, rule: str) -> None:
    assert rule_for(RULES, host, port) == rule


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("example.org", 443),
        ("hosted.org", 443),  # the apex
        ("evilhosted.org", 443),
        ("pypi.org.evil.test", 443),
        ("xpypi.org", 443),
        ("www.pypi.org", 443),
        ("pypi.org", 22),
        ("github.com", 443),
        ("xn--pypi-0ra.org", 443),
        ("bad.hosted.org", 443),
        ("10.1.9.9", 443),
        ("10.1.0.5", 80),
        ("10.2.0.5", 443),
        ("2130706433", 443),
    ],
)
def test_what_no_rule_allows_or_one_denies_is_refused(host: str, port: int) -> None:
    with pytest.raises(Refused):
        rule_for(RULES, host, port)


def test_hosts_of_secrets_need_no_other_rule_and_can_be_denied() -> None:
    secrets = {"TOKEN": Secret(hosts=("api.test", "*.api.test:8443"))}
    assert rule_for(policy(secrets=secrets), "api.test", 443) == "api.test"
    assert ports_of(policy(secrets=secrets), "eu.api.test") == {8443}
    with pytest.raises(Refused):
        rule_for(policy(deny=["api.test"], secrets=secrets), "api.test", 443)
    assert ports_of(policy(deny=["api.test"], secrets=secrets), "api.test") == set()


def test_members_are_reached_on_their_ports_only() -> None:
    reach = {"db": frozenset({5432})}
    assert rule_for(policy(reach=reach), "db", 5432) == "reach db:5432"
    assert ports_of(policy(reach=reach), "db") == {5432}
    with pytest.raises(Refused):
        rule_for(policy(reach=reach), "db", 80)
