from __future__ import annotations

import pytest

from skerry.errors import InvalidFleet
from skerry.fleet.load import load
from skerry.model.spec import Network, Port, Spec

PATH = "/srv/app/compose.yaml"


def specs(text: str) -> dict[str, Spec]:
    return {phase.name: phase.spec for phase in load(PATH, text).phases}


def reach(text: str) -> dict[str, tuple[str, ...]]:
    """What each service reaches."""
    return {name: spec.reach for name, spec in specs(text).items()}


def problems(text: str) -> list[str]:
    with pytest.raises(InvalidFleet) as caught:
        load(PATH, text)
    return [f"{each.line}:{each.column}: {each.message}" for each in caught.value.problems]


def test_services_that_name_no_network_share_one() -> None:
    text = "services:\n  db: {expose: [5432, '6000-6001/tcp']}\n  web: {expose: ['80']}\n  job: {}\n"
    db = ("db:5432", "db:6000", "db:6001")
    assert reach(text) == {"db": ("web:80",), "web": db, "job": (*db, "web:80")}
    assert {spec.network for spec in specs(text).values()} == {Network.RULES}


def test_without_ports_of_others_there_is_no_network() -> None:
    assert specs("services: {db: {}, web: {depends_on: [db]}}")["web"] == Spec(project="app")


def test_services_reach_those_that_they_share_a_network_with() -> None:
    text = """\
services:
  db: {networks: [back], expose: [5432]}
  app: {networks: {back: , front: {aliases: [api, API.Example]}}, expose: [8000]}
  proxy: {networks: [front], expose: [80]}
  lone: {network_mode: none, expose: [9]}
networks: {back: {internal: true, driver: bridge}, front: }
"""
    assert reach(text) == {
        "db": ("app:8000",),
        "app": ("db:5432", "proxy:80"),
        "proxy": ("app:8000", "api=app:8000", "api.example=app:8000"),
        "lone": (),
    }
    assert specs(text)["lone"].network == Network.NONE


def test_what_a_service_waits_for_is_reached_only_on_a_network_of_both() -> None:
    text = """\
services:
  db: {networks: [a], expose: [1]}
  web: {networks: [b], depends_on: [db]}
networks: {a: , b: }
"""
    assert reach(text)["web"] == ()


def test_a_link_is_waited_for_and_has_a_name_of_its_own() -> None:
    text = """\
services:
  db: {expose: [5432]}
  cache: {expose: [6379]}
  web: {depends_on: [cache], links: [db:store, cache]}
  other: {}
"""
    fleet = load(PATH, text)
    assert fleet.phase("web").wait_for == ("cache", "db")
    assert fleet.phase("web").spec.reach == ("db:5432", "store=db:5432", "cache:6379")
    assert fleet.phase("other").spec.reach == ("db:5432", "cache:6379")


def test_a_container_is_known_by_its_name() -> None:
    assert reach("services: {db: {expose: [1], container_name: My_DB}, web: {}}")["web"] == ("db:1", "my_db=db:1")


def test_ports_that_are_published_on_the_loopback_are_reached_too() -> None:
    text = """\
services:
  a: {ports: ["127.0.0.1:8080:80", "127.0.0.1::81/tcp"]}
  b: {ports: [{host_ip: 127.0.0.1, published: 8081, target: 82}]}
  c: {x-skerry: {ports: [83]}}
  d: {}
"""
    found = specs(text)
    assert found["d"].reach == ("a:80", "a:81", "b:82", "c:83")
    assert found["a"].ports == (Port(port=80, local=8080), Port(port=81))
    assert found["b"].ports == (Port(port=82, local=8081),)


def test_a_network_that_the_engine_has_is_used_as_it_is() -> None:
    text = """\
services:
  db: {networks: [corp], expose: [1]}
  web: {networks: [other], expose: [2]}
  app: {network_mode: bridge, expose: [3]}
  job: {}
networks: {corp: {external: true}, other: {external: true, name: the-other}}
"""
    found = specs(text)
    assert [found[name].network for name in ("db", "web", "app")] == ["corp", "the-other", Network.BRIDGE]
    assert not any(spec.reach for spec in found.values())


def test_the_network_of_all_can_be_the_engines() -> None:
    found = specs("services: {a: {expose: [1]}, b: {}}\nnetworks: {default: {external: true, name: corp}}")
    assert [(each.network, each.reach) for each in found.values()] == [("corp", ())] * 2


def test_what_a_service_says_to_us_is_what_holds() -> None:
    text = """\
services:
  db: {expose: [1, 2]}
  a: {x-skerry: {reach: ["db:2"]}}
  b: {x-skerry: {network: bridge}, expose: [3]}
  c: {x-skerry: {network: none}}
  d: {x-skerry: {allow: [python], deny: [a.b]}}
"""
    found = specs(text)
    assert found["a"].reach == ("db:2",)
    assert (found["b"].network, found["b"].reach) == (Network.BRIDGE, ())
    assert (found["c"].network, found["c"].reach) == (Network.NONE, ())
    assert (found["d"].allow, found["d"].reach) == (("python",), ("db:1", "db:2", "b:3"))


def test_a_service_on_internal_networks_alone_reaches_nothing_else() -> None:
    networks = "networks: {back: {internal: true}, front: }\n"
    both = "services:\n  a: {networks: [back, front], x-skerry: {allow: [python]}}\n"
    assert specs(both + networks)["a"].allow == ("python",)
    alone = "services:\n  a: {networks: [back], x-skerry: {allow: [python]}}\n"
    assert problems(alone + networks) == [
        "2:43: service 'a': x-skerry: allow: what is internal reaches nothing but its fleet; take one of both away"
    ]
    own = "services:\n  a: {networks: [back], x-skerry: {internal: false, allow: [python]}}\n"
    assert specs(own + networks)["a"].allow == ("python",)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("{networks: [bcak]}", "2:18: service 'a': networks: there is no network 'bcak'; did you mean 'back'?"),
        ("{networks: {bcak: }}", "2:18: service 'a': networks: there is no network 'bcak'; did you mean 'back'?"),
        ("{networks: {back: {ipv4_address: x}}}", "networks: 'back': unknown field 'ipv4_address'"),
        ("{networks: {back: {aliases: [a b]}}}", "aliases: 'a b': it is no host name"),
        ("{networks: [back], network_mode: none}", "networks: it has network_mode too; take one of both away"),
        ("{networks: [back, corp]}", "networks: 'corp' is one of the engine, and a sandbox is on no other then"),
        ("{container_name: db, scale: 2}", "container_name: there are several of it"),
        ("{container_name: 'x y'}", "container_name: 'x y': it is no host name"),
        ("{expose: [0]}", "expose: '0' is no port, such as 5432 or 8000-8010"),
        ("{expose: [53/udp]}", "expose: '53/udp' is no port, such as 5432 or 8000-8010; UDP goes nowhere"),
        ("{expose: [9-8]}", "expose: '9-8' is no port"),
        ("{expose: [1-70]}", "expose: 70 ports; at most 64"),
        ("{ports: ['8080:80']}", "'ports' cannot be mapped to a fleet: forward them"),
        ("{ports: [80]}", "'ports' cannot be mapped to a fleet: forward them"),
        ("{ports: ['0.0.0.0:80:80']}", "'ports' cannot be mapped to a fleet: forward them"),
        ("{ports: [{target: 80}]}", "'ports' cannot be mapped to a fleet: forward them"),
        ("{ports: [{host_ip: 127.0.0.1, target: 53, protocol: udp}]}", "ports: '53/udp' is not [LOCAL:]PORT"),
        ("{links: [c]}", "2:15: service 'a': links: 'c' cannot be reached: there is no other service of that name"),
        ("{links: [a]}", "links: 'a' cannot be reached: there is no other service of that name"),
        ("{links: [b]}", "links: 'b' cannot be reached: say in its 'expose' which ports b has"),
        ("{links: [b], network_mode: none}", "links: 'b' cannot be reached: they share no network"),
        ("{links: ['b:x y']}", "links: 'x y': it is no host name"),
    ],
    ids=str,
)
def test_what_cannot_be_is_told_in_its_line(body: str, told: str) -> None:
    found = problems(f"services:\n  a: {body}\n  b: {{}}\nnetworks: {{back: , corp: {{external: true}}}}\n")
    assert len(found) == 1, found
    assert found[0].startswith("2:")
    assert told in found[0]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("{driver: overlay}", "network 'back': driver: 'overlay' cannot be mapped to a fleet"),
        ("{ipam: {}}", "network 'back': unknown field 'ipam'"),
        ("{internal: 1}", "network 'back': internal: must be true or false"),
        ("[]", "network 'back': it: must be a table"),
    ],
    ids=str,
)
def test_a_network_that_cannot_be_mapped_is_told_in_its_line(body: str, told: str) -> None:
    found = problems(f"services: {{a: {{networks: [back]}}}}\nnetworks:\n  back: {body}\n")
    assert len(found) == 1, found
    assert found[0].startswith("3:")
    assert told in found[0]


def test_a_circle_through_a_link_is_told_at_the_link() -> None:
    text = "services:\n  a: {links: [b], expose: [1]}\n  b: {depends_on: {a: {}}, expose: [1]}\n"
    assert problems(text) == ["2:15: phase 'a': wait_for goes in a circle, so none of them would start: a -> b -> a"]
