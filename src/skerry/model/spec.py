"""Specs of sandboxes: a `Spec` is frozen and whole, and valid from the moment it exists."""

from __future__ import annotations

import math
import os
import posixpath
import re
import uuid
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NewType, TypedDict, Unpack

import msgspec

from skerry.errors import InvalidSpec
from skerry.model.secrets import Secret, check_secrets
from skerry.units import parse_duration, parse_size

SandboxId = NewType("SandboxId", str)

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_NAME_RULE = "lower-case letters, digits, '.', '_' or '-', at most 63"
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_ENV_NAME = re.compile(r"[^=\0]+")
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}|\d{1,10}(:\d{1,10})?")
_RUNTIME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_PORT = re.compile(r"(?:(?:(?P<host>[^:]*):)?(?P<local>\d{1,5})?:)?(?P<port>\d{1,5})(?:/tcp)?")
_RESERVED_TARGETS = ("/", "/proc", "/dev", "/sys", "/.skerry")
_MAX_ENV_BYTES = 128 * 1024
_MAX_LABELS = 64
_MAX_PORTS = 32
_MAX_OUR_LABELS = 8


def _is_reserved(target: str) -> bool:
    """Whether a path of a box is ours or the kernel's, so that nothing may be mounted there."""
    target = posixpath.normpath("/" + target.lstrip("/"))
    return target in _RESERVED_TARGETS or target.startswith(("/proc/", "/dev/", "/sys/", "/.skerry/"))


def new_id() -> SandboxId:
    return SandboxId(str(uuid.uuid4()))


def parse_id(text: str) -> SandboxId:
    """A whole sandbox id, in its one spelling; a box, folder and cgroup bear this name."""
    try:
        if str(uuid.UUID(text)) == text:
            return SandboxId(text)
    except ValueError:
        pass
    raise InvalidSpec(f"{text!r} is not a sandbox id (a UUID in lower case)", field="id")


class Network(StrEnum):
    NONE = "none"
    """Its own loopback and nothing else."""
    HOST = "host"
    """The host's network, host services included: no network isolation at all."""
    BRIDGE = "bridge"
    """An address of its own, behind the provider's bridge."""
    RULES = "rules"
    """Its own loopback, and what its rules allow, through the gate. Rules, secrets and `reach` imply it."""


class Cache(StrEnum):
    NONE = "none"
    READ = "read"
    """The project's caches can be read, and nothing put into them: for code that is not trusted."""
    WRITE = "write"  # all that is put there is there for every sandbox of the project
    OWN = "own"  # those of `cache_paths` alone, to be written to and kept as data is


class Restart(StrEnum):
    """When the command of a sandbox is started again after its end."""

    NO = "no"
    ON_FAILURE = "on-failure"
    """When it ends with another code than 0, or by a signal that did not ask it to end."""
    ALWAYS = "always"


_GATED = ("allow", "deny", "reach", "secrets")
_CHOICES = {"network": tuple(Network), "cache": tuple(Cache), "restart": tuple(Restart)}

IMAGE_COMMAND = "image"
"""The command that stands for the ENTRYPOINT and CMD of the image."""
LOOPBACK = "127.0.0.1"


class Port(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A port of the sandbox that has an address on this host's loopback for as long as the sandbox lives."""

    port: int
    local: int | None = None
    """The port of this host; one that is free is chosen, and then written here, if none is given."""

    def __post_init__(self) -> None:
        for number in (self.port, self.local):
            if number is not None and not 0 < number < 65536:
                raise InvalidSpec(f"ports: {number} is no port; 1 to 65535", field="ports")

    @classmethod
    def parse(cls, text: str | int) -> Port:
        """Docker's notation: `[[127.0.0.1:]LOCAL:]PORT[/tcp]`. No address but the loopback can be had."""
        if (match := _PORT.fullmatch(str(text))) is None:
            raise InvalidSpec(f"ports: {text!r} is not [LOCAL:]PORT, such as 3002 or 8080:3002", field="ports")
        if match["host"] not in (None, LOOPBACK, "localhost"):
            raise InvalidSpec(f"ports: {text!r}: ports are published on {LOOPBACK} alone", field="ports")
        return cls(port=int(match["port"]), local=int(match["local"]) if match["local"] else None)

    @property
    def address(self) -> str | None:
        """The address on this host, such as 127.0.0.1:8080, once there is one."""
        return None if self.local is None else f"{LOOPBACK}:{self.local}"


class Mount(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A folder or file of the host that the box sees."""

    source: str
    target: str
    read_only: bool = False

    def __post_init__(self) -> None:
        for side, path in (("source", self.source), ("target", self.target)):
            if not path.startswith("/") or "\0" in path:
                raise InvalidSpec(f"mounts: {side} {path!r} must be an absolute path", field="mounts")
        if _is_reserved(self.target):
            raise InvalidSpec(f"mounts: target {self.target!r} is reserved", field="mounts")

    @classmethod
    def parse(cls, text: str) -> Mount:
        """Docker's notation: `SOURCE:TARGET[:ro|rw]`; a relative source is taken from here."""
        source, _, rest = text.partition(":")
        target, _, mode = rest.partition(":")
        if not source or not target or mode not in ("", "ro", "rw"):
            raise InvalidSpec(f"mounts: {text!r} is not SOURCE:TARGET[:ro|rw]", field="mounts")
        return cls(source=os.path.abspath(os.path.expanduser(source)), target=target, read_only=mode == "ro")


class Workspace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A folder of work that the sandbox begins with, at `~/workspace`."""

    path: str | None = None
    """A folder of the host."""
    copy: bool = False
    """Copy the folder instead of showing it: what the sandbox changes stays in it."""
    source: str | None = None
    """Origin of the work: a git URL, or a path. Without a `path` a git source is cloned."""
    commit: str | None = None
    """The commit of the source; what was really cloned is written here."""
    public: bool = False
    """Clone it from the internet alone, over HTTP, and with nothing that this host knows: no keys, no passwords, no
    addresses of its own. So it is for all that tenants of a server ask for."""

    def __post_init__(self) -> None:
        if self.path is None and self.source is None:
            raise InvalidSpec("workspace: give a path or a source", field="workspace")
        if self.path is not None and (not self.path.startswith("/") or "\0" in self.path):
            raise InvalidSpec(f"workspace: {self.path!r} must be an absolute path", field="workspace")
        for field, value in (("source", self.source), ("commit", self.commit)):
            if value is not None and (not value or value.startswith("-") or not value.isprintable()):
                raise InvalidSpec(f"workspace: {field} {value!r} is not one", field="workspace")


class SpecOptions(TypedDict, total=False):
    """The keywords of `Spec.of`, `Sandbox(...)` and all that makes a sandbox."""

    provider: str
    image: str
    snapshot: str
    runtime: str
    target: str
    group: str
    writable_root: bool
    admin: bool
    root: str | os.PathLike[str]
    memory: int | str
    cpus: float
    pids: int
    disk: int | str
    egress: int | str
    env: Mapping[str, str]
    cwd: str
    user: str
    mounts: Sequence[Mount | str]
    workspace: Workspace
    data: bool
    cache: Cache | str
    cache_paths: Mapping[str, str]
    network: Network | str
    allow: Sequence[str]
    deny: Sequence[str]
    reach: Sequence[str]
    secrets: Mapping[str, Secret]
    lifetime: float | str | None
    idle: float | str | None
    sleep_after: float | str | None
    timeout: float | str | None
    labels: Mapping[str, str]
    project: str
    name: str
    language: str
    command: Sequence[str] | str
    restart: Restart | str
    ports: Sequence[Port | str | int]


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Description of a sandbox. `None` means: not asked for, so the provider's default applies.

    Make one with `Spec.of(memory="512M", ...)`, derive one with `spec.but(cpus=2)`.
    """

    provider: str = "local"
    image: str | None = None
    snapshot: str | None = None
    """The name of a snapshot whose files it begins with; the image is then the snapshot's own."""
    runtime: str | None = None
    """The OCI runtime that runs it, such as runsc."""
    target: str | None = None
    """The member of a cluster that it is to be on."""
    group: str | None = None
    """The group of members of which one is to have it."""
    root: str | None = None
    writable_root: bool = False
    """Let the box change the files of its image, and not only its own folders. Nothing bounds how much it writes."""
    admin: bool = False
    """Be root of a box whose root can be written to, and can do what installing packages takes: change owners, add and
    become users. It has the fewest capabilities for that, and none beyond its own files and processes."""
    memory: int | None = None
    """Bytes of memory for all processes together, without swap."""
    cpus: float | None = None
    pids: int | None = None
    disk: int | None = None
    """Bytes that the box may write to its own folders."""
    egress: int | None = None
    """Bytes that it may send in a second, by all connections of its rules together; more of them wait."""
    env: dict[str, str] = {}
    cwd: str | None = None
    user: str | None = None
    mounts: tuple[Mount, ...] = ()
    workspace: Workspace | None = None
    data: bool | None = None
    """Whether a volume that outlives the box is mounted at /.data."""
    cache: Cache = Cache.NONE
    cache_paths: dict[str, str] = {}
    """Caches of the project's own, beside the well-known ones: a path in the box by name."""
    network: str = Network.NONE
    """A `Network`, or the name of a network that the engine has."""
    allow: tuple[str, ...] = ()
    """Rules (`pypi.org`, `*.pythonhosted.org`, `github.com:22`, `10.1.0.0/16:443`) and names of sets (`python`)."""
    deny: tuple[str, ...] = ()
    """Rules for what is refused, whatever else allows it."""
    reach: tuple[str, ...] = ()
    """Members of its fleet that it may reach, each with a port: `db:5432`, or `store=db:5432` by another name."""
    secrets: dict[str, Secret] = {}
    """Secrets that the gate puts into requests, by the names of the variables that hold a placeholder in the box."""
    lifetime_s: float | None = None
    """Seconds from creation until the sandbox ends by itself; 0 is never."""
    idle_s: float | None = None
    """Seconds without a call or a running process until it ends by itself; 0 is never."""
    sleep_after_s: float | None = None
    """Seconds of the same until a manager that is open puts it to sleep; the next call wakes it. 0 is never."""
    timeout_s: float | None = None
    """Seconds that `exec`, `run_code` and calls about files may take which are given no time of their own; 0 is any."""
    labels: dict[str, str] = {}
    project: str = "default"
    name: str | None = None
    language: str | None = None
    """The language of `run_code` when it is given none."""
    command: tuple[str, ...] | str | None = None
    """Command that its agent keeps running: a list is argv, a string is for the shell, `image` is the image's own."""
    restart: Restart = Restart.ON_FAILURE
    ports: tuple[Port, ...] = ()

    def __post_init__(self) -> None:
        _check_characters(self)
        _imply(self)
        _check_limits(self)
        _check_text(self)
        _check_env(self.env)
        _check_service(self)
        _check_rules(self)

    @classmethod
    def of(cls, **options: Unpack[SpecOptions]) -> Spec:
        """A spec from keywords, with sizes and durations as people write them."""
        return cls.parse(_to_fields(options))

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Spec:
        """A spec from plain data (a file, a request, the store); every wrong field is named."""
        if fields.get("network") == Network.NONE and (given := [each for each in _GATED if fields.get(each)]):
            reason = "with the network none a sandbox reaches nothing; leave network out"
            raise InvalidSpec(f"{given[0]}: {reason}", field=given[0])
        try:
            return msgspec.convert(dict(fields), cls)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, InvalidSpec):
                raise error.__cause__ from None
            field = re.split(r"[.\[`]", str(error).rpartition("at `$.")[2])[0] or None
            if field in _CHOICES:
                message = f"{field}: {fields[field]!r} must be one of {', '.join(_CHOICES[field])}"
                raise InvalidSpec(message, field=field) from None
            raise InvalidSpec(f"spec: {error}", field=field) from None

    def but(self, **options: Unpack[SpecOptions]) -> Spec:
        """This spec with some fields changed."""
        return self.parse({**msgspec.to_builtins(self), **_to_fields(options)})

    def asked(self) -> set[str]:
        """The names of the fields that differ from their defaults."""
        return set(msgspec.to_builtins(self))


def _to_fields(options: SpecOptions) -> dict[str, Any]:
    fields: dict[str, Any] = dict(options)
    for size in ("memory", "disk", "egress"):
        if fields.get(size) is not None:
            fields[size] = parse_size(fields[size], size)
    for duration in ("lifetime", "idle", "sleep_after", "timeout"):
        if duration in fields:
            value = fields.pop(duration)
            fields[f"{duration}_s"] = 0 if value is None else parse_duration(value, duration)
    if isinstance(fields.get("root"), os.PathLike):
        fields["root"] = os.path.abspath(fields["root"])
    if isinstance(fields.get("workspace"), Workspace):
        fields["workspace"] = msgspec.to_builtins(fields["workspace"])
    if "mounts" in fields:
        fields["mounts"] = [msgspec.to_builtins(Mount.parse(m) if isinstance(m, str) else m) for m in fields["mounts"]]
    if "ports" in fields:
        fields["ports"] = [msgspec.to_builtins(p if isinstance(p, Port) else Port.parse(p)) for p in fields["ports"]]
    if "secrets" in fields:
        fields["secrets"] = {name: msgspec.to_builtins(secret) for name, secret in fields["secrets"].items()}
    if fields.get("command") is not None and not isinstance(fields["command"], str):
        fields["command"] = [str(word) for word in fields["command"]]
    return fields


def _imply(spec: Spec) -> None:
    """Spell out what one field means for others, so that providers look at those alone."""
    if spec.network in _CHOICES["network"]:  # those of ours are told apart by identity
        msgspec.structs.force_setattr(spec, "network", Network(spec.network))
    if spec.admin:
        if spec.user not in (None, "root", "0", "0:0"):
            raise InvalidSpec(f"admin: the box is root's then, and not {spec.user}'s; leave user out", field="admin")
        msgspec.structs.force_setattr(spec, "user", spec.user or "root")
        msgspec.structs.force_setattr(spec, "writable_root", True)


def _check_rules(spec: Spec) -> None:
    """Spell rules in their one way, and have the network that they need."""
    if spec.allow or spec.deny:
        from skerry.model.rules import check_texts  # most specs have none, and start without it

        for field in ("allow", "deny"):
            msgspec.structs.force_setattr(spec, field, check_texts(getattr(spec, field), field))
    check_secrets(spec.secrets)
    if both := sorted(spec.env.keys() & spec.secrets.keys()):
        reason = "it is a secret, and its variable holds a placeholder; leave one of them out"
        raise InvalidSpec(f"env: {both[0]}: {reason}", field="env")
    if spec.reach:
        from skerry.model.rules import Reach

        for text in spec.reach:
            Reach.parse(text)
    asked = [each for each in (*_GATED, "egress") if getattr(spec, each)]
    if asked and spec.network not in (Network.NONE, Network.RULES):
        reason = f"a box on the network {spec.network} does not need the gate to get out; use allow, without network"
        raise InvalidSpec(f"{asked[0]}: {reason}", field=asked[0])
    if asked and asked != ["egress"]:  # which is a bound of nothing without the others
        msgspec.structs.force_setattr(spec, "network", Network.RULES)


def _check_limits(spec: Spec) -> None:
    for field, least in (("memory", 16 * 2**20), ("pids", 4), ("disk", 2**20), ("egress", 2**10)):
        if (value := getattr(spec, field)) is not None and not least <= value < 2**63:
            raise InvalidSpec(f"{field}: {value} is out of range; the least is {least}", field=field)
    if spec.cpus is not None and not (math.isfinite(spec.cpus) and 0.01 <= spec.cpus <= 4096):
        raise InvalidSpec(f"cpus: {spec.cpus} is out of range; 0.01 to 4096", field="cpus")
    for field in ("lifetime_s", "idle_s", "sleep_after_s", "timeout_s"):
        if (value := getattr(spec, field)) is not None and not (math.isfinite(value) and 0 <= value < 2**31):
            raise InvalidSpec(f"{field}: {value} is out of range; 0 means never", field=field)


def _check_text(spec: Spec) -> None:
    for field, pattern, rule in (
        *((each, _NAME, _NAME_RULE) for each in ("provider", "project", "name", "snapshot")),
        ("user", _USER, "a user name, UID or UID:GID"),
        ("runtime", _RUNTIME, "the name of a runtime that the engine knows"),
        ("target", _RUNTIME, "the name of a member of the cluster"),
        ("network", _RUNTIME, "none, rules, bridge, host, or the name of a network of the engine"),
        ("group", _RUNTIME, "the name of a group of the cluster's members"),
    ):
        value = getattr(spec, field)
        if value is not None and not pattern.fullmatch(value):
            raise InvalidSpec(f"{field}: {value!r} must be {rule}", field=field)
    for field in ("cwd", "root"):
        value = getattr(spec, field)
        if value is not None and (not value.startswith("/") or "\0" in value):
            raise InvalidSpec(f"{field}: {value!r} must be an absolute path", field=field)
    if spec.image is not None and (not spec.image or spec.image.startswith("-") or not spec.image.isprintable()):
        raise InvalidSpec(f"image: {spec.image!r} is not an image reference", field="image")
    for name, path in spec.cache_paths.items():
        if not _NAME.fullmatch(name) or not path.startswith("/") or "\0" in path or _is_reserved(path):
            raise InvalidSpec(f"cache_paths: {name!r}: {path!r} is not a name and a path of a box", field="cache_paths")
    if spec.cache_paths and spec.cache is Cache.NONE:
        raise InvalidSpec("cache_paths: without cache there is none; set cache to read or write", field="cache_paths")
    own = [key for key in spec.labels if not key.startswith("skerry.")]
    if len(own) > _MAX_LABELS or len(spec.labels) - len(own) > _MAX_OUR_LABELS:
        raise InvalidSpec(f"labels: {len(spec.labels)} labels; at most {_MAX_LABELS}", field="labels")
    for key, value in spec.labels.items():
        if not _LABEL.fullmatch(key) or len(value) > 256 or not value.isprintable():
            raise InvalidSpec(f"labels: {key!r} is not a short printable label", field="labels")


def _check_service(spec: Spec) -> None:
    words = (spec.command,) if isinstance(spec.command, str) else spec.command
    if words is not None and (not words or not words[0].strip() or any("\0" in word for word in words)):
        raise InvalidSpec(f"command: {spec.command!r} names no program", field="command")
    if words is not None and sum(len(word.encode()) for word in words) > _MAX_ENV_BYTES:
        raise InvalidSpec(f"command: more than {_MAX_ENV_BYTES} bytes", field="command")
    if words is None and spec.restart is not Restart.ON_FAILURE:
        raise InvalidSpec("restart: there is no command that could be started again", field="restart")
    if len(spec.ports) > _MAX_PORTS:
        raise InvalidSpec(f"ports: {len(spec.ports)} ports; at most {_MAX_PORTS}", field="ports")
    for side in ("port", "local"):
        given = [number for port in spec.ports if (number := getattr(port, side)) is not None]
        if twice := {number for number in given if given.count(number) > 1}:
            raise InvalidSpec(f"ports: {min(twice)} is given twice", field="ports")


def _check_characters(spec: Spec) -> None:
    """Bytes of the command line that are no text can be neither written down nor sent."""
    for field, value in msgspec.to_builtins(spec).items():
        try:
            msgspec.json.encode(value)
        except UnicodeEncodeError:
            raise InvalidSpec(f"{field}: it holds bytes that are not UTF-8", field=field) from None


def _check_env(env: Mapping[str, str]) -> None:
    for name, value in env.items():
        if not _ENV_NAME.fullmatch(name) or "\0" in value:
            raise InvalidSpec(f"env: {name!r} is not a name=value that a process can have", field="env")
    if sum(len(k.encode()) + len(v.encode()) for k, v in env.items()) > _MAX_ENV_BYTES:
        raise InvalidSpec(f"env: more than {_MAX_ENV_BYTES} bytes", field="env")
