"""Secrets that code can use and never sees: where their values come from, and which hosts they are for."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from skerry.errors import InvalidSpec

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_HOOK = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_MAX_SECRETS = 64


class Secret(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A value of the host that requests to some hosts are given on their way out. The box has a placeholder for it in
    a variable of the secret's name. Only where the value is found is ever written down."""

    hosts: tuple[str, ...]
    """Rules without networks: names, or `*.NAME`, with a port if it is not 443. To port 80, where all travels in clear,
    a value goes only if a host says so."""
    env: str | None = None
    """Variable of the program that makes the sandbox; the secret's own name if nothing else is given."""
    file: str | None = None
    """File of the host, read when it is needed, so that a change of it holds at once."""
    command: tuple[str, ...] = ()
    """Command of the host whose output is the value."""
    given: bool = False
    """Its value is found nowhere: whoever uses the sandbox gives it, by `network.provide`, before it is needed."""
    hook: str | None = None
    """`MODULE:FUNCTION` on the host that changes a request with the value, where putting it in is not enough."""

    def __post_init__(self) -> None:
        from skerry.model.rules import Rule, refuse_text  # most specs have no secrets, and start without it

        refuse_text(self.hosts, "secrets: hosts")
        refuse_text(self.command, "secrets: command")
        if not self.hosts:
            raise InvalidSpec("secrets: say which hosts a secret is for", field="secrets")
        if any("." not in host and ":" not in host for host in self.hosts):  # a value, perhaps, which is not repeated
            reason = "they are names with a dot, such as api.example.org; a value comes from env, file or command"
            raise InvalidSpec(f"secrets: hosts: {reason}", field="secrets")
        rules = [Rule.parse(host, "secrets") for host in self.hosts]
        if any(rule.network is not None for rule in rules):
            raise InvalidSpec("secrets: hosts are names, not addresses", field="secrets")
        msgspec.structs.force_setattr(self, "hosts", tuple(rule.text for rule in rules))
        if sum(map(bool, (self.env, self.file, self.command, self.given))) > 1:
            raise InvalidSpec("secrets: give one of env, file and command, or given", field="secrets")
        if self.file is not None and (not self.file.startswith("/") or "\0" in self.file):
            raise InvalidSpec(f"secrets: file {self.file!r} must be an absolute path", field="secrets")
        if any("\0" in word for word in self.command) or (self.command and not self.command[0]):
            raise InvalidSpec("secrets: the command names no program", field="secrets")
        if self.hook is not None and not _HOOK.fullmatch(self.hook):
            raise InvalidSpec(f"secrets: hook {self.hook!r} is not MODULE:FUNCTION", field="secrets")


def check_secrets(secrets: Mapping[str, Secret]) -> None:
    """Raise InvalidSpec for names that no variable can have, or too many."""
    if len(secrets) > _MAX_SECRETS:
        raise InvalidSpec(f"secrets: {len(secrets)} secrets; at most {_MAX_SECRETS}", field="secrets")
    for name in secrets:
        if not _NAME.fullmatch(name):
            raise InvalidSpec(f"secrets: {name!r} is no name of a variable", field="secrets")
