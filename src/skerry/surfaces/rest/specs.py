"""Specs in requests: the words of `Spec.of`, and what of them a tenant may say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import msgspec

from skerry import providers
from skerry.errors import InvalidSpec, NotPermitted, SkerryError
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.rules import Rule, Rules, is_set_name
from skerry.model.secrets import Secret
from skerry.model.spec import Cache, Mount, Network, Port, Restart, Spec, SpecOptions, Workspace
from skerry.model.tenants import Principal
from skerry.providers.base import Isolation

_UNSET = msgspec.UNSET
Unset = msgspec.UnsetType
_OF_THE_HOST = ("mounts", "root", "target", "group", "runtime")
"""Fields that name something of the host, which is nobody's but its owner's."""


class SpecBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Fields of a spec. What is left out is as the server is set."""

    provider: str | Unset = _UNSET
    image: str | Unset = _UNSET
    snapshot: str | Unset = _UNSET
    runtime: str | Unset = _UNSET
    target: str | Unset = _UNSET
    group: str | Unset = _UNSET
    root: str | Unset = _UNSET
    writable_root: bool | Unset = _UNSET
    admin: bool | Unset = _UNSET
    memory: int | str | Unset = _UNSET
    """Bytes, or as people write it: 512M."""
    cpus: float | Unset = _UNSET
    pids: int | Unset = _UNSET
    disk: int | str | Unset = _UNSET
    egress: int | str | Unset = _UNSET
    """Bytes that it may send in a second, through the rules of its network."""
    env: dict[str, str] | Unset = _UNSET
    cwd: str | Unset = _UNSET
    user: str | Unset = _UNSET
    mounts: tuple[Mount | str, ...] | Unset = _UNSET
    workspace: Workspace | Unset = _UNSET
    data: bool | Unset = _UNSET
    cache: Cache | Unset = _UNSET
    cache_paths: dict[str, str] | Unset = _UNSET
    network: str | Unset = _UNSET
    allow: tuple[str, ...] | Unset = _UNSET
    deny: tuple[str, ...] | Unset = _UNSET
    reach: tuple[str, ...] | Unset = _UNSET
    secrets: dict[str, Secret] | Unset = _UNSET
    """Names of secrets, and the hosts that each is for. A tenant gives their values with `PUT .../secrets`."""
    lifetime: float | str | Unset | None = _UNSET
    """Seconds, or as people write it: 2h; null is for ever."""
    idle: float | str | Unset | None = _UNSET
    sleep_after: float | str | Unset | None = _UNSET
    """The time without a call or a running process after which it sleeps; the next call wakes it."""
    timeout: float | str | Unset | None = _UNSET
    labels: dict[str, str] | Unset = _UNSET
    project: str | Unset = _UNSET
    name: str | Unset = _UNSET
    language: str | Unset = _UNSET
    command: tuple[str, ...] | str | Unset = _UNSET
    restart: Restart | Unset = _UNSET
    ports: tuple[Port | str | int, ...] | Unset = _UNSET

    def options(self) -> SpecOptions:
        """What was said, as keywords."""
        given = {name: getattr(self, name) for name in SpecBody.__struct_fields__}
        return cast("SpecOptions", {name: value for name, value in given.items() if value is not _UNSET})

    def spec(self, manager: AsyncSandboxManager, principal: Principal) -> Spec:
        """The spec that was asked for. Raises InvalidSpec, and NotPermitted for what is the host's."""
        spec = manager.complete(None, self.options())
        if not principal.is_admin:
            spec = for_tenant(spec)
            refuse_weaker(manager, spec)
        return spec


def for_tenant(spec: Spec) -> Spec:
    """A spec as a tenant may have it. Raises NotPermitted for what is the host's, and InvalidSpec."""
    work = spec.workspace and msgspec.structs.replace(spec.workspace, public=True)
    spec = msgspec.structs.replace(spec, secrets=_given(spec), workspace=work)
    refuse_host(spec)
    return spec


def _given(spec: Spec) -> dict[str, Secret]:
    """The secrets of a spec, those that say nothing of their values as ones whose values are given: else they would be
    those of variables of the server's own environment."""
    is_silent = {name for name, each in spec.secrets.items() if not (each.env or each.file or each.command)}
    return {
        name: msgspec.structs.replace(each, given=True) if name in is_silent else each
        for name, each in spec.secrets.items()
    }


def refuse_host(spec: Spec) -> None:
    """Raise NotPermitted for a field by which a spec reaches what is the host's own, and InvalidSpec for labels that
    are ours to give."""
    named: dict[str, Any] = {field: getattr(spec, field) for field in _OF_THE_HOST}
    named["network"] = spec.network not in (Network.NONE, Network.RULES)
    named["workspace"] = spec.workspace is not None and (
        spec.workspace.path is not None or not (spec.workspace.source or "").startswith(("https://", "http://"))
    )
    named["image"] = spec.image is not None and spec.image.startswith((".", "/"))
    named["ports"] = any(each.local is not None for each in spec.ports)
    named["secrets"] = any(not each.given or each.hook for each in spec.secrets.values())
    refuse_addresses(spec.allow)
    for field, value in named.items():
        if value:
            raise NotPermitted(f"{field}: that reaches what is the host's own, and is for its owner alone")
    for label in spec.labels:
        if label.startswith("skerry."):
            raise InvalidSpec(f"labels: {label!r}: those that begin with 'skerry.' are not for users", field="labels")


def refuse_weaker(manager: AsyncSandboxManager, spec: Spec) -> None:
    """Raise NotPermitted for a provider whose boxes are held less well than those of the one that the server is set to:
    how strong the wall is, is its owner's to say."""
    own = _isolation(manager, manager.config.provider)
    if (asked := _isolation(manager, spec.provider)) is not None and own is not None and asked < own:
        raise NotPermitted(f"provider: boxes of {spec.provider} are held less well than is asked for on this server")


def _isolation(manager: AsyncSandboxManager, name: str) -> Isolation | None:
    """How strong the wall of a provider is; None if there is none of that name, which others tell."""
    loaded = manager.loaded_provider(name)
    try:
        return (providers.provider_class(name) if loaded is None else loaded).isolation
    except SkerryError:
        return None


def refuse_addresses(rules: Iterable[str]) -> None:
    """Raise NotPermitted for a rule that opens an address whatever it is: it may be private, or the host itself, while
    a name leads to the internet alone. Raises InvalidSpec for what is no rule."""
    for text in rules:
        rule = None if is_set_name(text) else Rule.parse(text)
        if rule is None or rule.network is None:
            continue
        if Rules(allow=(rule,)).opens(rule.network.network_address, min(rule.ports)):
            raise NotPermitted(f"allow: {text!r}: single addresses are for the owner of the host alone; use names")
