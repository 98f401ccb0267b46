from __future__ import annotations

from pathlib import Path

import pytest

from skerry.errors import InvalidFleet
from skerry.fleet.load import load
from skerry.fleet.model import FleetSpec, Healthcheck, OnFailure, Phase
from skerry.fleet.plan import order
from skerry.model.spec import Mount, Spec

PATH = "/srv/My App/compose.yaml"


def problems(text: str) -> list[str]:
    with pytest.raises(InvalidFleet) as caught:
        load(PATH, text)
    return [f"{each.line}:{each.column}: {each.message}" for each in caught.value.problems]


def service(body: str) -> Phase:
    return load(PATH, f"services:\n  a: {body}\n").phases[0]


def test_services_become_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    text = """\
version: "3.9"
name: shop
x-common: &common
  environment: &variables {MODE: test, PRICE: "5$$"}
  user: "1000"
services:
  db:
    <<: *common
    image: postgres:16
    volumes:
      - ./data:/var/lib/data
      - {type: bind, source: /usr, target: /host-usr, read_only: true}
    healthcheck:
      test: [CMD-SHELL, "pg_isready -U shop"]
      interval: 1m30s
      timeout: 500ms
      retries: 5
      start_period: 2s
    mem_limit: 512m
    cpus: "0.5"
    pids_limit: 100
    network_mode: none
    restart: "no"
  web:
    image: shop
    command: sleep infinity
    init: true
    tty: true
    stdin_open: true
    working_dir: /srv
    environment: [A=1, TOKEN]
    labels: {tier: front}
    depends_on:
      db: {condition: service_healthy}
    deploy:
      mode: replicated
      replicas: 3
      resources: {limits: {cpus: '1', memory: 64M, pids: 50}}
    x-skerry: {on_failure: continue, setup: [make ready], labels: {extra: "1"}}
volumes: {}
x-skerry: {max_parallel: 2}
"""
    db = Phase(
        name="db",
        healthcheck=Healthcheck(
            command="pg_isready -U shop", interval_s=90, timeout_s=0.5, retries=5, start_period_s=2
        ),
        spec=Spec.of(
            image="postgres:16",
            env={"MODE": "test", "PRICE": "5$"},
            user="1000",
            mounts=[
                Mount(source="/srv/My App/data", target="/var/lib/data"),
                Mount(source="/usr", target="/host-usr", read_only=True),
            ],
            memory="512M",
            cpus=0.5,
            pids=100,
        ),
    )
    web = Phase(
        name="web",
        count=3,
        wait_for=("db",),
        on_failure=OnFailure.CONTINUE,
        setup=("make ready",),
        inherited=("TOKEN",),
        spec=Spec.of(
            image="shop",
            cwd="/srv",
            env={"A": "1", "TOKEN": "secret"},
            labels={"tier": "front", "extra": "1"},
            cpus=1,
            memory="64M",
            pids=50,
        ),
    )
    fleet = FleetSpec(name="shop", max_parallel=2, phases=(db, web))
    assert load(PATH, text) == fleet
    assert order(fleet) == (("db",), ("web",))


def test_without_a_name_the_folder_gives_it_as_docker_compose_does() -> None:
    assert load(PATH, "services: {a: {image: x}}").name == "myapp"
    assert load(Path("/compose.yaml"), "services: {a: {image: x}}").name == "fleet"


def test_the_provider_of_the_caller_is_taken_unless_the_service_names_one_for_us() -> None:
    text = "services: {a: {image: x}, b: {image: x, x-skerry: {provider: other}}}"
    fleet = load(PATH, text, provider="mock")
    assert [phase.spec.provider for phase in fleet.phases] == ["mock", "other"]


@pytest.mark.parametrize(
    ("body", "check"),
    [
        ("{test: [CMD, curl, localhost]}", Healthcheck(command=("curl", "localhost"), interval_s=30, retries=3)),
        ("{test: curl localhost}", Healthcheck(command="curl localhost", interval_s=30, retries=3)),
        ("{test: [NONE]}", None),
        ("{disable: true}", None),
    ],
)
def test_a_health_check_is_what_docker_would_run(body: str, check: Healthcheck | None) -> None:
    assert service(f"{{image: x, healthcheck: {body}}}").healthcheck == check


@pytest.mark.parametrize("command", ["sleep infinity", "[sleep, infinity]", "tail -f /dev/null"])
def test_a_command_that_only_waits_is_no_obstacle(command: str) -> None:
    assert service(f"{{image: x, command: {command}}}").setup == ()


def test_what_a_service_waits_for_can_be_a_list() -> None:
    fleet = load(PATH, "services: {a: {image: x, depends_on: [b]}, b: {image: x}}")
    assert fleet.phases[0].wait_for == ("b",)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("{image: x, build: .}", "'build' cannot be mapped to a fleet: build the image first"),
        ("{image: x, command: nginx}", "'command' cannot be mapped to a fleet: a sandbox waits for commands"),
        ("{image: x, entrypoint: [a]}", "'entrypoint' cannot be mapped"),
        ("{image: x, ports: ['80:80']}", "'ports' cannot be mapped to a fleet: forward them"),
        ("{image: x, restart: always}", "'restart' cannot be mapped"),
        ("{image: x, privileged: true}", "'privileged' cannot be mapped"),
        ("{image: x, cap_add: [ALL]}", "'cap_add' cannot be mapped"),
        ("{image: x, env_file: a}", "'env_file' cannot be mapped to a fleet: write the variables"),
        ("{image: x, imgae: x}", "'imgae' cannot be mapped"),
        ("{image: x, volumes: ['data:/data']}", "'data:/data' is a volume by name"),
        ("{image: x, volumes: [/data]}", "'/data' is a volume by name"),
        ("{image: x, volumes: [{type: tmpfs, target: /a}]}", "only 'type: bind' can be mapped"),
        ("{image: x, volumes: [{type: bind, target: /a}]}", "source and target must be given"),
        ("{image: x, volumes: [{type: bind, source: /a, target: /b, bind: {}}]}", "unknown field 'bind'"),
        ("{image: x, deploy: {replicas: some}}", "deploy: replicas: must be a whole number, and is 'some'"),
        ("{image: x, deploy: {mode: global}}", "deploy: 'mode' cannot be mapped"),
        ("{image: x, deploy: {resources: {reservations: {}}}}", "deploy: resources: 'reservations' cannot be mapped"),
        ("{image: x, deploy: {resources: {limits: {gpus: 1}}}}", "deploy: resources: limits: 'gpus' cannot be mapped"),
        ("{image: x, environment: ['A=${B}']}", "variables are not filled in"),
        ("{image: $IMAGE}", "variables are not filled in"),
        ("{image: x, depends_on: [b]}", "wait_for names 'b', and there is no such phase"),
        ("{image: x, depends_on: {a: {condition: service_started}}}", "wait_for names the phase itself"),
        ("{image: x, healthcheck: {interval: 1s}}", "healthcheck: test must be given"),
        ("{image: x, healthcheck: {test: [echo]}}", "a list must begin with CMD, CMD-SHELL or NONE"),
        (
            "{image: x, healthcheck: {test: a, interval: 5}}",
            "interval: must be a duration such as 30s or 1m30s, and is 5",
        ),
        ("{image: x, network_mode: service:b}", "network: 'service:b' must be none"),
        ("{image: x, x-skerry: {counts: 3}}", "x-skerry: unknown field 'counts'; did you mean 'count'?"),
        ("[]", "it: must be a table"),
    ],
    ids=str,
)
def test_what_cannot_be_mapped_is_told_in_its_line(body: str, told: str) -> None:
    found = problems(f"services:\n  a: {body}\n")
    assert len(found) == 1, found
    assert found[0].startswith("2:")
    assert told in found[0]


def test_all_that_cannot_be_mapped_is_told_at_once() -> None:
    text = """\
services:
  db:
    image: x
    env_file: a
  web:
    image: x
    depends_on:
      db: {condition: service_healthy}
      job: {condition: service_completed_successfully, required: false}
configs: {back: {}}
secrets: {a: {file: b}}
"""
    assert problems(text) == [
        "4:5: service 'db': 'env_file' cannot be mapped to a fleet: write the variables below 'environment'",
        "8:23: service 'web': depends_on: 'db' has no healthcheck, so it is never service_healthy",
        "9:7: phase 'web': wait_for names 'job', and there is no such phase; there are db",
        "9:24: service 'web': depends_on: 'job': condition is 'service_completed_successfully', which cannot be mapped "
        "to a fleet; it can be service_started or service_healthy",
        "9:66: service 'web': depends_on: 'job': required is false, which cannot be mapped to a fleet; it can be true",
        "10:1: 'configs' cannot be mapped to a fleet: take it away, or use a fleet file",
        "11:1: 'secrets' cannot be mapped to a fleet: give them below x-skerry, or name a variable of yours without a "
        "value below 'environment'",
    ]


def test_circles_are_found_here_too() -> None:
    found = problems("services:\n  a: {image: x, depends_on: [b]}\n  b: {image: x, depends_on: [a]}\n")
    assert found == ["2:30: phase 'a': wait_for goes in a circle, so none of them would start: a -> b -> a"]


@pytest.mark.parametrize("text", ["services: {}", "services: [a]", "- a", "services:"])
def test_a_file_without_services_is_refused(text: str) -> None:
    assert len(problems(text)) == 1
