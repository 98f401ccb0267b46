"""Headers that a sandbox's requests get on their way out, from E2B's `network.rules` to secrets of ours: one for each
host, with a hook that puts them in. Values are in memory alone, here and in the gate."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from skerry.errors import InvalidSpec, Unsupported, WrongState
from skerry.gate.headers import HOOK, Headers
from skerry.model.secrets import Secret

if TYPE_CHECKING:
    from skerry.surfaces.e2b.box import E2bSandbox
    from skerry.surfaces.e2b.secrets_calls import Secrets

_NAMED = "E2B_HEADERS_"
_REFERENCE = re.compile(r"\$\{e2b\.([^}]*)\}")
_OF_SECRETS = "secrets."
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}")
_VALUE = re.compile(r"[\t -~]{0,8192}")
_NOT_THEIRS = frozenset({"host", "content-length", "transfer-encoding", "connection", "expect", "te", "upgrade"})
"""Headers by which a request is what it is."""

Rules = dict[str, dict[str, str]]
"""For each host, as secrets spell it, its headers: texts with references to secrets."""


class _Transform(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    headers: dict[str, str] | None = None


class _Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    transform: _Transform | None = None


def read(given: Mapping[str, Any] | None) -> Rules:
    """What a request says. Raises InvalidSpec, and Unsupported for what is not done here."""
    try:
        found = msgspec.convert((given or {}).get("rules") or {}, dict[str, list[_Rule]])
    except msgspec.ValidationError as error:
        raise InvalidSpec(f"network.rules: {error}", field="network") from None
    rules: Rules = {}
    for host, ordered in found.items():
        (spelled,) = Secret(hosts=(host,), given=True).hosts
        for rule in ordered:
            headers = (rule.transform and rule.transform.headers) or {}
            for name, value in headers.items():
                _check(name, value)
            rules[spelled] = {**rules.get(spelled, {}), **headers}
    return rules


def _check(name: str, value: str) -> None:
    if not _HEADER.fullmatch(name) or name.lower() in _NOT_THEIRS:
        raise InvalidSpec(f"network.rules: {name[:64]!r} is no header that can be put in", field="network")
    if not _VALUE.fullmatch(value):
        raise InvalidSpec(f"network.rules: the value of {name} is not printable, or too long", field="network")
    for reference in _REFERENCE.findall(value):
        if not reference.startswith(_OF_SECRETS):
            raise Unsupported("network.rules", "e2b", "there are no identity tokens here; use a secret")


def names(rules: Rules) -> Iterator[str]:
    """Names of the secrets that rules refer to."""
    for headers in rules.values():
        for value in headers.values():
            yield from (each.removeprefix(_OF_SECRETS).lower() for each in _REFERENCE.findall(value))


def secrets_of(rules: Rules) -> dict[str, Secret]:
    """The secrets of the spec of a sandbox with such rules."""
    return {f"{_NAMED}{n}": Secret(hosts=(host,), given=True, hook=HOOK) for n, host in enumerate(sorted(rules), 1)}


def hosts_of(secrets: Mapping[str, Secret]) -> dict[str, str]:
    """The secrets of a spec that are of such rules, by their hosts."""
    return {secret.hosts[0]: name for name, secret in secrets.items() if secret.hook == HOOK}


async def check(rules: Rules, secrets: Secrets, project: str) -> None:
    """Raise InvalidSpec for rules that refer to a secret that there is not, and WrongState for one without a value."""
    for name in names(rules):
        if await secrets.value(name, project) is None:
            if name in await secrets.known(project):
                raise WrongState(f"the value of the secret {name!r} is not known since the server began: update it")
            raise InvalidSpec(f"network.rules: there is no secret {name!r}", field="network")


async def provide(box: E2bSandbox, rules: Rules, secrets: Secrets) -> None:
    """Give the gate what the rules of a sandbox are by now. Raises SkerryError."""
    values = {}
    for host, name in hosts_of(box.record.spec.secrets).items():
        values[name] = (await _filled(rules.get(host, {}), secrets, box.project)).value()
    if values:
        await box.sandbox.network.provide(values)


async def _filled(headers: Mapping[str, str], secrets: Secrets, project: str) -> Headers:
    known = {}
    for name in set(names({"": dict(headers)})):
        value = await secrets.value(name, project)
        if value is None:
            return Headers(missing=f"the secret {name!r} has no value any more")
        known[name] = value

    def fill(found: re.Match[str]) -> str:
        return known[found[1].removeprefix(_OF_SECRETS).lower()]

    return Headers({name: _REFERENCE.sub(fill, value) for name, value in headers.items()})
