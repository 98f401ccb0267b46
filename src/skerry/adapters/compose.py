"""Compose files of frameworks' tasks: variables filled in, files laid over each other, and images apart from services,
so that the rest can be read as a fleet."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from skerry.config import variable
from skerry.errors import InvalidFleet, Problem

_VARIABLE = re.compile(r"\$(?:(?P<escaped>\$)|\{(?P<braced>\w+)(?P<default>:?-[^}]*)?\}|(?P<bare>\w+))")


class Build(NamedTuple):
    """Sources of an image: one that has a name is pulled, where it is not there, and any other built."""

    context: Path
    dockerfile: str = "Dockerfile"
    args: Mapping[str, str] | None = None
    target: str | None = None
    image: str = ""

    def key(self, content: str) -> str:
        """A tag that changes with what the image is made of; `content` stands for the files of the task."""
        args = sorted((self.args or {}).items())
        told = json.dumps([content, str(self.context), self.dockerfile, args, self.target])
        return hashlib.sha256(told.encode()).hexdigest()[:24]


class Project(NamedTuple):
    """A compose file without its images."""

    content: Mapping[str, Any]
    builds: Mapping[str, Build]

    def with_images(self, images: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        """The services, each with the image of its name instead of what that is built of."""
        services = {}
        for name, service in self.content["services"].items():
            made_of = {"image": images[name]} if name in images else {}
            services[name] = {key: value for key, value in service.items() if key != "build"} | made_of
        return services

    def as_text(self, services: Mapping[str, Any]) -> str:
        """The text of a compose file that can be read as a fleet."""
        return json.dumps(_escaped({**self.content, "services": services}))


def read(paths: Sequence[Path], base: Mapping[str, Any], env: Mapping[str, str]) -> Project:
    """The project of files, each laid over those before it and over `base`; `env` goes before the variables of this
    program. Raises InvalidFleet."""
    content = dict(base)
    for path in paths:
        content = _laid_over(content, _filled(_load(path), env, path))
    folder, builds = paths[0].parent, {}
    for name, service in content["services"].items():
        build, image = service.get("build"), service.get("image")
        if build is not None:
            builds[name] = _build(folder, build)
        elif image is not None:
            builds[name] = Build(context=folder, dockerfile="", image=image)
    return Project(content, builds)


def _load(path: Path) -> dict[str, Any]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    if not path.exists():
        return {}
    try:
        content = YAML(typ="safe", pure=True).load(path.read_text())
    except YAMLError as error:
        raise InvalidFleet([Problem(0, 0, str(error))], path=str(path)) from None
    services = content.get("services") if isinstance(content, dict) else None
    if not isinstance(services, dict) or not all(isinstance(each, dict | None) for each in services.values()):
        raise InvalidFleet([Problem(0, 0, "it must be a table with 'services', a table of tables")], path=str(path))
    return {**content, "services": {name: each or {} for name, each in services.items()}}


def _build(folder: Path, build: Any) -> Build:
    given: dict[str, Any] = {"context": build} if isinstance(build, str) else build
    args: Any = given.get("args") or {}
    if isinstance(args, list):
        args = dict(text.partition("=")[::2] for text in args)
    context = folder / given.get("context", ".")
    return Build(
        context=context.resolve(),
        dockerfile=given.get("dockerfile", "Dockerfile"),
        args={key: str(value) for key, value in args.items()} or None,
        target=given.get("target"),
    )


def _laid_over(below: Any, above: Any) -> Any:
    """Tables are merged, lists joined, and all else is what is above."""
    if isinstance(below, dict) and isinstance(above, dict):
        merged = {key: _laid_over(below.get(key), value) for key, value in above.items()}
        return {**below, **merged}
    if isinstance(below, list) and isinstance(above, list):
        return [*below, *above]
    return above


def _filled(value: Any, values: Mapping[str, str], path: Path) -> Any:
    """Variables as compose fills them in. Raises InvalidFleet for one that has no value."""
    if isinstance(value, dict):
        return {key: _filled(each, values, path) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, values, path) for each in value]
    if not isinstance(value, str):
        return value

    def fill(found: re.Match[str]) -> str:
        if found["escaped"]:
            return "$"
        name, default = found["braced"] or found["bare"], found["default"]
        known = values.get(name, variable(name))
        if known or (known is not None and not (default or "").startswith(":")):
            return known
        if default is None:
            raise InvalidFleet([Problem(0, 0, f"variable {name!r} has no value")], path=str(path))
        return default.lstrip(":").removeprefix("-")

    return _VARIABLE.sub(fill, value)


def _escaped(value: Any) -> Any:
    """Texts with their dollars doubled, as whoever reads the file takes them."""
    if isinstance(value, dict):
        return {key: _escaped(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(each) for each in value]
    return value.replace("$", "$$") if isinstance(value, str) else value
