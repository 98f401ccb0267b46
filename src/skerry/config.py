"""What the installation is set to: flags over environment over file over defaults, merged and checked once."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from skerry.errors import ConfigError, InvalidSpec
from skerry.units import parse_duration

if TYPE_CHECKING:
    from skerry.providers.base import Provider
    from skerry.spec import Spec, SpecOptions

_PREFIX = "SKERRY_"
_REGISTRY = "registry.db"
_NOT_SETTINGS = frozenset({"SKERRY_CONFIG", "SKERRY_DEBUG", "SKERRY_REQUIRE"})


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of this installation; `origins` tells for each dotted key where its value came from."""

    provider: str
    state_dir: str
    project: str
    lifetime: str
    """How long a sandbox lives when it is not told; `never` is a value."""
    idle: str
    database: str
    """The registry: a file, or postgresql://..."""
    max_sandboxes: int
    """How many sandboxes there may be at once; 0 is no limit."""
    max_boots: int
    """How many may be in the making at once."""
    providers: dict[str, dict[str, Any]]
    """Each provider's own settings, by its name; only the provider knows what they may be."""
    origins: dict[str, str]

    def load_provider(self, name: str) -> Provider:
        """A provider, made from its own slice of the settings; one that keeps state does so below ours."""
        from skerry import providers

        settings = dict(self.providers.get(name, {}))
        known = providers.provider_class(name).Config
        if "state_dir" in known.__struct_fields__:
            settings.setdefault("state_dir", f"{self.state_dir}/{name}")
        for field, shared in known.from_environment.items():
            if value := variable(shared):
                settings.setdefault(field, value)
        try:
            return providers.load(name, settings)
        except ConfigError as error:
            prefix = f"providers.{name}."
            places = {origin for key, origin in self.origins.items() if key.startswith(prefix)}
            raise ConfigError(f"{error} (set in {', '.join(sorted(places))})" if places else str(error)) from None

    def spec(self, options: SpecOptions) -> Spec:
        """A spec from keywords, with our provider, project and clocks where nothing is said."""
        from skerry.spec import Spec

        asked: SpecOptions = {"provider": self.provider, "project": self.project, **options}
        return self.complete(Spec.of(**asked))

    def complete(self, spec: Spec) -> Spec:
        """The spec with our clocks where it asks for none of its own, so that nothing lives for ever by oversight."""
        clocks = {
            f"{clock}_s": 0.0 if value == "never" else parse_duration(value, clock)
            for clock, value in (("lifetime", self.lifetime), ("idle", self.idle))
        }
        return msgspec.structs.replace(spec, **{k: v for k, v in clocks.items() if getattr(spec, k) is None})

    def values(self) -> dict[str, Any]:
        """Every value by its dotted key."""
        top = {key: getattr(self, key) for key in _KEYS} | {"database": _PASSWORD.sub(r"\1:***", self.database)}
        slices = {f"providers.{name}": settings for name, settings in self.providers.items()}
        return top | {f"{at}.{key}": value for at, settings in slices.items() for key, value in settings.items()}


_NUMBERS = ("max_sandboxes", "max_boots")
_KEYS = ("provider", "state_dir", "project", "lifetime", "idle", "database", *_NUMBERS)
_PASSWORD = re.compile(r"(?<=://)([^/@:]*):[^@]*(?=@)")


class _Setting(NamedTuple):
    value: Any
    origin: str


_Layer = dict[str, _Setting]


def load(overrides: Mapping[str, Any] | None = None) -> Config:
    """The configuration of this process. `overrides` are the flags; those that are None were not given."""
    settings = _defaults() | _from_file() | _from_environment() | _from_flags(overrides or {})
    plain = {key: _checked(key, setting) for key, setting in settings.items() if key in _KEYS}
    if plain["database"] == _REGISTRY:
        plain["database"] = f"{plain['state_dir']}/{_REGISTRY}"
    slices: dict[str, dict[str, Any]] = {}
    for key, setting in settings.items():
        if key not in _KEYS:
            _, name, field = key.split(".", 2)
            slices.setdefault(name, {})[field] = setting.value
    return Config(**plain, providers=slices, origins={key: setting.origin for key, setting in settings.items()})


def variable(name: str) -> str | None:
    """A variable of this process's environment, for what is not a setting (TERM, NO_COLOR, `-e NAME`)."""
    return os.environ.get(name)


def _defaults() -> _Layer:
    state_dir = "/var/lib/skerry" if _is_root() else str(_xdg("XDG_STATE_HOME", "~/.local/state"))
    values: dict[str, Any] = {
        "provider": "local",
        "state_dir": state_dir,
        "project": "default",
        "lifetime": "24h",
        "idle": "never",
        "database": _REGISTRY,
        "max_sandboxes": 100,
        "max_boots": 16,
    }
    return {key: _Setting(value, "default") for key, value in values.items()}


def _from_file() -> _Layer:
    named = os.environ.get("SKERRY_CONFIG")
    path = Path(named).expanduser() if named else _default_file()
    try:
        data = tomllib.loads(path.read_text())
    except FileNotFoundError:
        if named:
            raise ConfigError(f"{path}: no such file; SKERRY_CONFIG names it") from None
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    return {key: _Setting(value, str(path)) for key, value in _flat(data, str(path)).items()}


def _from_environment() -> _Layer:
    layer: _Layer = {}
    for name, value in os.environ.items():
        if name.startswith(_PREFIX) and name not in _NOT_SETTINGS:
            key = name.removeprefix(_PREFIX).lower().replace("__", ".")
            if key not in _KEYS and not (key.startswith("providers.") and key.count(".") == 2):
                raise ConfigError(f"{name}: no setting has that name; there are {_spelled_for_environment()}")
            layer[key] = _Setting(value, f"${name}")
    return layer


def _from_flags(overrides: Mapping[str, Any]) -> _Layer:
    return {key: _Setting(value, f"--{key.replace('_', '-')}") for key, value in overrides.items() if value is not None}


def _flat(data: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Dotted keys from a file's tables; an unknown key is an error that names the file."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if key in _KEYS:
            flat[key] = value
        elif key != "providers":
            raise ConfigError(f"{path}: unknown key {key!r}; there are {', '.join(_KEYS)} and [providers.NAME]")
        elif not isinstance(value, dict) or not all(isinstance(settings, dict) for settings in value.values()):
            raise ConfigError(f"{path}: 'providers' must hold one table for each provider: [providers.NAME]")
        else:
            flat |= {f"providers.{name}.{field}": v for name, fields in value.items() for field, v in fields.items()}
    return flat


def _checked(key: str, setting: _Setting) -> Any:
    value, origin = setting
    if key in _NUMBERS:
        return _checked_number(key, value, origin)
    if key in ("lifetime", "idle") and isinstance(value, int | float) and not isinstance(value, bool):
        value = f"{value}s"
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{origin}: {key} is {value!r}; it must be a text that is not empty")
    if key == "state_dir":
        value = os.path.expanduser(value)
        if not os.path.isabs(value):
            raise ConfigError(f"{origin}: state_dir {value!r} must be an absolute path")
    if key in ("lifetime", "idle") and value != "never":
        try:
            parse_duration(value, key)
        except InvalidSpec as error:
            raise ConfigError(f"{origin}: {error}, or never") from None
    return value


def _checked_number(key: str, value: Any, origin: str) -> int:
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    least = 0 if key == "max_sandboxes" else 1
    if type(number) is not int or number < least:
        raise ConfigError(f"{origin}: {key} is {value!r}; it must be a whole number, at least {least}")
    return number


def _default_file() -> Path:
    folder = Path("/etc/skerry") if _is_root() else _xdg("XDG_CONFIG_HOME", "~/.config")
    return folder / "config.toml"


def _xdg(name: str, fallback: str) -> Path:
    """A base folder as the XDG specification says: a relative one is as good as none."""
    named = os.environ.get(name, "")
    return Path(named if os.path.isabs(named) else fallback).expanduser() / "skerry"


def _spelled_for_environment() -> str:
    return ", ".join(_PREFIX + key.upper() for key in _KEYS) + " and SKERRY_PROVIDERS__NAME__SETTING"


def _is_root() -> bool:
    return os.geteuid() == 0
