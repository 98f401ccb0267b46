"""`skerry token` and `skerry tenant`: made, listed, changed and removed on the registry."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from skerry.access.access import Access
from skerry.cli.token import _SCOPES
from skerry.config import load
from skerry.errors import AccessDenied
from skerry.model.tenants import Principal, Scope
from skerry.providers.mock import Mock
from skerry.store import Store

Call = Callable[..., tuple[int, str, str]]


def principal(text: str) -> Principal:
    """Whoever a server takes a token for."""

    async def check() -> Principal:
        store = await Store.open(load().database)
        try:
            return await Access(store).check(text)
        finally:
            await store.aclose()

    return asyncio.run(check())


def data(answer: tuple[int, str, str]) -> Any:
    code, out, err = answer
    assert code == 0, err
    return json.loads(out)


def test_the_scopes_are_those_of_the_model() -> None:
    assert set(_SCOPES) == {str(scope) for scope in Scope}


def test_a_token_is_shown_once_and_works(call: Call, mock: Mock) -> None:
    code, out, err = call("token", "create", "--note", "for ci")
    assert code == 0
    assert "not shown again" in err
    text = out.strip()
    assert principal(text).is_admin
    code, listed, _ = call("token", "ls")
    assert code == 0
    assert text not in listed
    assert "for ci" in listed
    (token,) = data(call("token", "ls", "--json"))
    assert (token["tenant"], token["scopes"], token["expires_at"]) == (None, ["admin"], None)
    assert token["last_used_at"] is None  # which a server writes down
    assert call("token", "ls", "-q")[1].split() == [token["id"]]


def test_a_token_of_a_tenant_has_the_scopes_and_the_end_that_were_asked_for(call: Call, mock: Mock) -> None:
    assert call("tenant", "add", "acme")[0] == 0
    made = data(call("token", "create", "--tenant", "acme", "--scope", "sandbox:read", "--expires", "1h", "--json"))
    found = principal(made["token"])
    assert (found.tenant, found.scopes) == ("acme", {Scope.READ})
    assert 3500 < made["expires_at"] - time.time() <= 3600
    assert data(call("token", "ls", "--tenant", "other", "--json")) == []


def test_a_token_that_is_removed_is_worth_nothing(call: Call, mock: Mock) -> None:
    made = data(call("token", "create", "--json"))
    assert call("token", "rm", made["id"])[:2] == (0, f"{made['id']}\n")
    with pytest.raises(AccessDenied):
        principal(made["token"])
    code, _, err = call("token", "rm", made["id"])
    assert code == 125
    assert "there is no token" in err


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("--tenant", "nobody"), 125, "there is no tenant 'nobody'"),
        (("--scope", "everything"), 125, "everything"),
        (("--expires", "soon"), 125, "soon"),
        (("--expires", "0"), 125, "of no use"),
    ],
)
def test_a_token_that_cannot_be_is_refused(call: Call, mock: Mock, args: tuple[str, ...], code: int, says: str) -> None:
    found, _, err = call("token", "create", *args)
    assert (found, says in err) == (code, True), err


def test_a_token_of_a_tenant_is_never_an_admins(call: Call, mock: Mock) -> None:
    call("tenant", "add", "acme")
    code, _, err = call("token", "create", "--tenant", "acme", "--scope", "admin")
    assert code == 125
    assert "cannot have admin" in err


def test_a_tenant_has_a_quota_that_can_be_changed_bound_by_bound(call: Call, mock: Mock) -> None:
    made = data(call("tenant", "add", "acme", "--sandboxes", "5", "--memory", "2G", "--note", "them", "--json"))
    assert made["quota"] == {"sandboxes": 5, "cpus": None, "memory": 2 << 30, "disk": None, "egress": None}
    words = ("--sandboxes", "none", "--cpus", "1.5", "--egress", "50M", "--json")
    changed = data(call("tenant", "set", "acme", *words))
    assert changed["quota"] == {"sandboxes": None, "cpus": 1.5, "memory": 2 << 30, "disk": None, "egress": 50 << 20}
    assert changed["note"] == "them"
    code, out, _ = call("tenant", "ls")
    assert code == 0
    assert out.splitlines()[1].split()[:4] == ["acme", "1.5", "2G", "50M"]
    assert call("tenant", "ls", "-q")[1] == "acme\n"


@pytest.mark.parametrize(
    "args", [("add", "../x"), ("add", "a", "--sandboxes", "-1"), ("set", "nobody", "--cpus", "1"), ("rm", "nobody")]
)
def test_a_tenant_that_cannot_be_is_refused(call: Call, mock: Mock, args: tuple[str, ...]) -> None:
    assert call("tenant", *args)[0] == 125


def test_what_is_no_bound_is_refused(call: Call, mock: Mock) -> None:
    call("tenant", "add", "acme")
    assert call("tenant", "set", "acme", "--cpus", "many")[0] == 125
    assert call("tenant", "set", "acme")[0] == 125


def test_a_tenant_with_sandboxes_is_kept_unless_they_are_to_end_too(call: Call, mock: Mock) -> None:
    call("tenant", "add", "acme")
    text = call("token", "create", "--tenant", "acme")[1].strip()
    assert call("create", "--project", "acme")[0] == 0
    code, _, err = call("tenant", "rm", "acme")
    assert code == 125
    assert "has 1 sandboxes" in err
    assert principal(text).tenant == "acme"
    assert call("tenant", "rm", "acme", "--destroy")[:2] == (0, "acme\n")
    with pytest.raises(AccessDenied):
        principal(text)
    assert data(call("ps", "--json")) == []


def test_it_is_told_in_the_ledger(call: Call, mock: Mock) -> None:
    call("tenant", "add", "acme")
    text = call("token", "create", "--tenant", "acme")[1].strip()
    code, out, _ = call("ledger", "show", "--json", "--kind", "token", "--kind", "tenant")
    assert code == 0
    lines = [json.loads(line) for line in out.splitlines()]
    assert [(line["kind"], line["facts"]["action"]) for line in lines] == [("tenant", "create"), ("token", "create")]
    assert text not in out
