"""The options of a new sandbox, as the spec that they make."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import pytest

from skerry.cli.options import _CACHES, _RESTART, make_spec, spec_options
from skerry.errors import InvalidSpec
from skerry.model.spec import Cache, Port, Restart, Spec, Workspace


@click.command()
@spec_options
@click.pass_context
def command(context: click.Context, **options: Any) -> None:
    context.obj = make_spec(options)[1]


def spec_of(*args: str) -> Spec:
    context = command.make_context("new", list(args))
    command.invoke(context)
    spec: Spec = context.obj
    return spec


def test_the_caches_are_those_of_the_spec() -> None:
    assert tuple(cache.value for cache in Cache) == _CACHES


def test_the_restart_policies_are_those_of_the_spec() -> None:
    assert tuple(policy.value for policy in Restart) == _RESTART


def test_a_command_is_a_line_for_the_shell_or_a_list_as_in_a_dockerfile() -> None:
    assert spec_of("--command", "exec server --port 80").command == "exec server --port 80"
    assert spec_of("--command", '["server", "a b"]').command == ("server", "a b")
    assert spec_of("--command", "image", "--restart", "always").restart is Restart.ALWAYS
    with pytest.raises(click.UsageError, match="JSON list"):
        spec_of("--command", '["server"')


def test_ports_are_published_as_with_docker() -> None:
    published = spec_of("-p", "3002", "-p", "8080:80", "--publish", "127.0.0.1:9000:90").ports
    assert published == (Port(port=3002), Port(port=80, local=8080), Port(port=90, local=9000))
    with pytest.raises(InvalidSpec, match=r"127\.0\.0\.1 alone"):
        spec_of("-p", "0.0.0.0:8080:80")


def test_what_is_not_asked_for_is_not_in_the_spec() -> None:
    assert spec_of().asked() == {"lifetime_s", "idle_s"}


def test_every_field_has_its_option() -> None:
    spec = spec_of(
        "--image", "debian:12", "--snapshot", "before", "--runtime", "runsc", "--writable-root", "--no-data",
        "--cache", "read", "--cache-path", "models=/opt/models", "--cache-path", "x=/y",
    )  # fmt: skip
    assert (spec.image, spec.snapshot, spec.runtime, spec.writable_root) == ("debian:12", "before", "runsc", True)
    assert (spec.data, spec.cache, spec.cache_paths) == (False, Cache.READ, {"models": "/opt/models", "x": "/y"})
    assert spec_of("--data").data is True


def test_a_workspace_is_named_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work").mkdir()
    here = f"{tmp_path}/work"
    assert spec_of("--workspace", "work").workspace == Workspace(path=here)
    assert spec_of("--workspace", "work", "--workspace-copy").workspace == Workspace(path=here, copy=True)
    assert spec_of("--workspace-source", "work", "--workspace-commit", "v1").workspace == Workspace(
        source=here, commit="v1"
    )
    url = "https://example.org/x.git"
    assert spec_of("--workspace-source", url).workspace == Workspace(source=url)
    assert spec_of("--workspace", os.curdir, "--workspace-source", url).workspace == Workspace(
        path=str(tmp_path), source=url
    )


@pytest.mark.parametrize(
    "args",
    [
        ("--workspace", "/no/such/folder"), ("--workspace", "/etc/passwd"), ("--workspace-copy",),
        ("--workspace-commit", "v1"), ("--cache", "always"), ("--cache-path", "models"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_wrong_usage(args: tuple[str, ...]) -> None:
    with pytest.raises(click.UsageError):
        spec_of(*args)


def test_what_looks_like_an_option_is_no_source() -> None:
    with pytest.raises(InvalidSpec, match="source"):
        spec_of("--workspace-source=--upload-pack=evil")


def test_the_time_of_commands_is_an_option_of_its_own() -> None:
    assert [spec_of("--default-timeout", each).timeout_s for each in ("90s", "2m", "never")] == [90, 120, 0]
    with pytest.raises(InvalidSpec, match="--default-timeout"):
        spec_of("--default-timeout", "soon")
