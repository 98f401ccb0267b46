"""What was asked for: a `Spec` is frozen and whole, and valid from the moment it exists."""

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
from skerry.units import parse_duration, parse_size

SandboxId = NewType("SandboxId", str)

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_ENV_NAME = re.compile(r"[^=\0]+")
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}|\d{1,10}(:\d{1,10})?")
_RUNTIME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_RESERVED_TARGETS = ("/", "/proc", "/dev", "/sys", "/.skerry")
_MAX_ENV_BYTES = 128 * 1024
_MAX_LABELS = 64
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


class Cache(StrEnum):
    NONE = "none"
    READ = "read"
    """What the project's caches hold can be used, and nothing put into them: for code that is not trusted."""
    WRITE = "write"
    """What is put there is there for every sandbox of the project."""


_CHOICES = {"network": tuple(Network), "cache": tuple(Cache)}


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
    """Where the work came from: a git URL, or a path. Without a `path` a git source is cloned."""
    commit: str | None = None
    """The commit of the source; what was really cloned is written here."""

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
    root: str | os.PathLike[str]
    memory: int | str
    cpus: float
    pids: int
    disk: int | str
    env: Mapping[str, str]
    cwd: str
    user: str
    mounts: Sequence[Mount | str]
    workspace: Workspace
    data: bool
    cache: Cache | str
    cache_paths: Mapping[str, str]
    network: Network | str
    lifetime: float | str | None
    idle: float | str | None
    labels: Mapping[str, str]
    project: str
    name: str
    language: str


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a sandbox should be. `None` means: not asked for, so the provider's default applies.

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
    memory: int | None = None
    """Bytes of memory for all processes together, without swap."""
    cpus: float | None = None
    pids: int | None = None
    disk: int | None = None
    """Bytes that the box may write to its own folders."""
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
    network: Network = Network.NONE
    lifetime_s: float | None = None
    """Seconds from creation until the sandbox ends by itself; 0 is never."""
    idle_s: float | None = None
    """Seconds without a call or a running process until it ends by itself; 0 is never."""
    labels: dict[str, str] = {}
    project: str = "default"
    name: str | None = None
    language: str | None = None
    """What `run_code` takes when it is given no language."""

    def __post_init__(self) -> None:
        _check_characters(self)
        _check_limits(self)
        _check_text(self)
        _check_env(self.env)

    @classmethod
    def of(cls, **options: Unpack[SpecOptions]) -> Spec:
        """A spec from keywords, with sizes and durations as people write them."""
        return cls.parse(_to_fields(options))

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Spec:
        """A spec from plain data (a file, a request, the store); every wrong field is named."""
        try:
            return msgspec.convert(dict(fields), cls)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, InvalidSpec):
                raise error.__cause__ from None
            field = _field_of(error)
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
    for size in ("memory", "disk"):
        if fields.get(size) is not None:
            fields[size] = parse_size(fields[size], size)
    for duration in ("lifetime", "idle"):
        if duration in fields:
            value = fields.pop(duration)
            fields[f"{duration}_s"] = 0 if value is None else parse_duration(value, duration)
    if isinstance(fields.get("root"), os.PathLike):
        fields["root"] = os.path.abspath(fields["root"])
    if isinstance(fields.get("workspace"), Workspace):
        fields["workspace"] = msgspec.to_builtins(fields["workspace"])
    if "mounts" in fields:
        fields["mounts"] = [msgspec.to_builtins(Mount.parse(m) if isinstance(m, str) else m) for m in fields["mounts"]]
    return fields


def _check_limits(spec: Spec) -> None:
    for field, least in (("memory", 16 * 2**20), ("pids", 4), ("disk", 2**20)):
        value = getattr(spec, field)
        if value is not None and not least <= value < 2**63:
            raise InvalidSpec(f"{field}: {value} is out of range; the least is {least}", field=field)
    if spec.cpus is not None and not (math.isfinite(spec.cpus) and 0.01 <= spec.cpus <= 4096):
        raise InvalidSpec(f"cpus: {spec.cpus} is out of range; 0.01 to 4096", field="cpus")
    for field in ("lifetime_s", "idle_s"):
        value = getattr(spec, field)
        if value is not None and not (math.isfinite(value) and 0 <= value < 2**31):
            raise InvalidSpec(f"{field}: {value} is out of range; 0 means never", field=field)


def _check_text(spec: Spec) -> None:
    for field, pattern, rule in (
        ("provider", _NAME, "a lower-case name"),
        ("project", _NAME, "lower-case letters, digits, '.', '_' or '-', at most 63"),
        ("name", _NAME, "lower-case letters, digits, '.', '_' or '-', at most 63"),
        ("user", _USER, "a user name, UID or UID:GID"),
        ("snapshot", _NAME, "lower-case letters, digits, '.', '_' or '-', at most 63"),
        ("runtime", _RUNTIME, "the name of a runtime that the engine knows"),
        ("target", _RUNTIME, "the name of a member of the cluster"),
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


def _field_of(error: msgspec.ValidationError) -> str | None:
    path = str(error).rpartition("at `$.")[2]
    return re.split(r"[.\[`]", path)[0] or None
