"""Settings of the installation: flags over environment over file over defaults, merged and checked once."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_origin

import msgspec

from skerry.errors import ConfigError, InvalidSpec
from skerry.model.settings import AdmissionSettings as AdmissionSettings
from skerry.model.settings import LedgerSettings as LedgerSettings
from skerry.model.settings import NetworkConfig as NetworkConfig
from skerry.model.settings import ServerSettings as ServerSettings
from skerry.model.templates import Template
from skerry.units import parse_duration, parse_size

if TYPE_CHECKING:
    from skerry.model.spec import Spec, SpecOptions
    from skerry.providers.base import Provider

_PREFIX = "SKERRY_"
_LASTING = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "SSH_AUTH_SOCK", "DBUS_SESSION_BUS_ADDRESS",
})  # fmt: skip
_LASTING_KINDS = ("LC_", "XDG_", "PYTHON")
_REGISTRY = "registry.db"
_NOT_SETTINGS = frozenset({"SKERRY_CONFIG", "SKERRY_DEBUG", "SKERRY_FORKSERVER", "SKERRY_REQUIRE"})


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of this installation; `origins` tells for each dotted key where its value came from."""

    url: str = ""
    """The server that the command line, and `skerry.connect()`, use; empty is this machine itself."""
    token: str = ""
    ca: str = ""
    """File of certificates that a server is trusted by, beside those of the system."""
    provider: str
    state_dir: str
    project: str
    lifetime: str
    """Lifetime of a sandbox that is not told one; `never` is a value."""
    idle: str
    timeout: str = "never"
    """Time of an operation that is given none, in a sandbox that is told none; `never` is a value."""
    database: str
    """The registry: a file, or postgresql://..."""
    max_sandboxes: int
    """The most sandboxes at once; 0 is no limit."""
    max_boots: int
    """The most that are made at once."""
    min_free_memory: int = 0
    """Bytes of the host's memory that have to stay free when a box is made on it; 0 is no look."""
    log: str = "off"
    """What the command line logs to stderr: a level, or `LOGGER=LEVEL`; `off` is a value."""
    admission: AdmissionSettings = AdmissionSettings()
    ledger: LedgerSettings = LedgerSettings()
    server: ServerSettings = ServerSettings()
    providers: dict[str, dict[str, Any]]
    """Each provider's own settings, by its name; only the provider knows what they may be."""
    network: NetworkConfig = NetworkConfig()
    templates: dict[str, Template] = {}
    """What sandboxes are that E2B's clients ask for by the name of a template: [e2b.templates.NAME]."""
    tool: str = "api"
    """Program that uses these settings, for the ledger: cli, mcp, ..., or one of the user's own."""
    origins: dict[str, str]

    def load_provider(self, name: str) -> Provider:
        """A provider, made from its own slice of the settings; one that keeps state does so below ours."""
        from skerry import providers

        try:
            return providers.load(name, self.settings_of(name))
        except ConfigError as error:
            prefix = f"providers.{name}."
            places = {origin for key, origin in self.origins.items() if key.startswith(prefix)}
            raise ConfigError(f"{error} (set in {', '.join(sorted(places))})" if places else str(error)) from None

    def settings_of(self, name: str) -> dict[str, Any]:
        """Settings of a provider, with those that this program's environment has for it: DOCKER_HOST and the like."""
        from skerry import providers

        settings = dict(self.providers.get(name, {}))
        known = providers.provider_class(name).Config
        if "state_dir" in known.__struct_fields__:
            settings.setdefault("state_dir", f"{self.state_dir}/{name}")
        for field, shared in known.from_environment.items():
            if value := variable(shared):
                settings.setdefault(field, value)
        return settings

    def spec(self, options: SpecOptions) -> Spec:
        """A spec from keywords, with our provider, project and clocks where nothing is said."""
        from skerry.model.spec import Spec

        asked: SpecOptions = {"provider": self.provider, "project": self.project, **options}
        return self.complete(Spec.of(**asked))

    def complete(self, spec: Spec) -> Spec:
        """The spec with our clocks where it asks for none of its own, so that nothing lives for ever by oversight."""
        clocks = {
            f"{clock}_s": 0.0 if value == "never" else parse_duration(value, clock)
            for clock, value in (("lifetime", self.lifetime), ("idle", self.idle))
        }
        if self.timeout != "never":
            clocks["timeout_s"] = parse_duration(self.timeout, "timeout")
        return msgspec.structs.replace(spec, **{k: v for k, v in clocks.items() if getattr(spec, k) is None})

    def values(self) -> dict[str, Any]:
        """Every value by its dotted key, without passwords."""
        from skerry.log import hide_passwords

        top = {key: attrgetter(key)(self) for key in _KEYS} | {"database": hide_passwords(self.database)}
        top["token"] = "********" if self.token else ""
        top |= {} if self.network.ca is None else {_CA: self.network.ca}
        slices: dict[str, Mapping[str, Any]] = {f"providers.{name}": each for name, each in self.providers.items()}
        slices |= {f"network.{table}": getattr(self.network, table) for table in _NETWORK}
        return top | {f"{at}.{key}": value for at, settings in slices.items() for key, value in settings.items()}


_MIN_FREE = "min_free_memory"
_NUMBERS = ("max_sandboxes", "max_boots", _MIN_FREE)
_DURATIONS = ("lifetime", "idle", "timeout")
_NETWORK = ("hosts", "sets")
_CA = "network.ca"
_TEMPLATES = "e2b.templates"
_SECTIONS: Mapping[str, type[msgspec.Struct]] = {
    "admission": AdmissionSettings, "ledger": LedgerSettings, "server": ServerSettings,
}  # fmt: skip
_FIELDS = {f"{name}.{each.name}": each for name, kind in _SECTIONS.items() for each in msgspec.structs.fields(kind)}
_SIZES = ("admission.min_free_disk", "ledger.max_bytes", "server.max_body")
_LEAST = {
    **{f"admission.{name}": 0 for name in AdmissionSettings.__struct_fields__},
    "ledger.max_bytes": 1, "ledger.keep": 0, "server.max_body": 1024, "server.rate": 1, "server.max_calls": 1,
    "server.max_connections": 1, "server.drain_s": 0,
}  # fmt: skip
_SERVER = ("url", "token", "ca")
_KEYS = ("provider", "state_dir", "project", *_DURATIONS, "database", *_NUMBERS, "log", *_SERVER, *_FIELDS)


class _Setting(NamedTuple):
    value: Any
    origin: str


_Layer = dict[str, _Setting]
_latest: tuple[tuple[dict[bytes, bytes], int], Config] | None = None
"""What the environment was when it was last asked, and what came of it."""


def load(overrides: Mapping[str, Any] | None = None) -> Config:
    """The configuration of this process. `overrides` are the flags; those that are None were not given."""
    global _latest
    if overrides or any(path.exists() for path in (_file(), contexts_path())):
        return _loaded(overrides or {})
    # without files it is what the environment says; a program that makes many sandboxes asks for each
    said = os.environb.copy(), os.geteuid()
    if _latest is None or _latest[0] != said:
        _latest = said, _loaded({})
    return _latest[1]


def _loaded(overrides: Mapping[str, Any]) -> Config:
    settings = _defaults()
    for layer in (_from_file(), _from_context(), _from_environment(), _from_flags(overrides)):
        if "url" in layer:  # a token is for the server that it was given with, and no other
            settings |= {key: _Setting("", "default") for key in _SERVER}
        settings |= layer
    plain = {key: _checked(key, setting) for key, setting in settings.items() if key in _KEYS}
    sections: dict[str, Any] = {
        name: kind(**{field: plain.pop(f"{name}.{field}") for field in kind.__struct_fields__})
        for name, kind in _SECTIONS.items()
    }
    if plain["database"] == _REGISTRY:
        plain["database"] = f"{plain['state_dir']}/{_REGISTRY}"
    templates = _checked_templates(settings.pop(_TEMPLATES, None))
    slices: dict[str, dict[str, Any]] = {}
    tables: dict[str, dict[str, tuple[str, ...]]] = {table: {} for table in _NETWORK}
    for key, setting in settings.items():
        if key not in _KEYS:
            kind, name, *field = key.split(".", 2)
            if kind != "network":
                slices.setdefault(name, {})[field[0]] = setting.value
            elif key != _CA:
                tables[name][field[0]] = _checked_network(name, field[0], setting)
    ca = _checked_ca(settings[_CA]) if _CA in settings else None
    network = NetworkConfig(ca=ca, hosts=tables["hosts"], sets=tables["sets"])
    origins = {key: setting.origin for key, setting in settings.items()}
    return Config(**plain, **sections, network=network, templates=templates, providers=slices, origins=origins)


def variable(name: str) -> str | None:
    """A variable of this process's environment, for what is not a setting (TERM, NO_COLOR, `-e NAME`)."""
    return os.environ.get(name)


def lasting_environment() -> dict[str, str]:
    """The variables of this process that one which outlives it needs, to run and to start programs. It is told its
    settings, and all others, in which there may be tokens, are nobody's but this process's."""
    return {name: value for name, value in os.environ.items() if name in _LASTING or name.startswith(_LASTING_KINDS)}


def _defaults() -> _Layer:
    state_dir = "/var/lib/skerry" if os.geteuid() == 0 else str(_xdg("XDG_STATE_HOME", "~/.local/state"))
    values: dict[str, Any] = {
        **dict.fromkeys(_SERVER, ""),
        "provider": "local",
        "state_dir": state_dir,
        "project": "default",
        "lifetime": "24h",
        "idle": "never",
        "timeout": "never",
        "database": _REGISTRY,
        "max_sandboxes": 100,
        "max_boots": 16,
        _MIN_FREE: 256 << 20,
        "log": "off",
        **{key: field.default for key, field in _FIELDS.items()},
    }
    return {key: _Setting(value, "default") for key, value in values.items()}


def contexts_path() -> Path:
    """The file in which `skerry context` keeps the servers that it knows, beside that of the settings."""
    return _file().with_name("contexts.json")


def _file() -> Path:
    folder = Path("/etc/skerry") if os.geteuid() == 0 else _xdg("XDG_CONFIG_HOME", "~/.config")
    return Path(os.environ.get("SKERRY_CONFIG") or folder / "config.toml").expanduser()


def _from_context() -> _Layer:
    from skerry import contexts

    path = contexts_path()
    used = contexts.read(path).used if path.exists() else None
    return {} if used is None else {key: _Setting(getattr(used, key), str(path)) for key in _SERVER}


def _from_file() -> _Layer:
    path = _file()
    try:
        data = tomllib.loads(path.read_text())
    except FileNotFoundError:
        if os.environ.get("SKERRY_CONFIG"):
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
                names = ", ".join(_PREFIX + key.upper().replace(".", "__") for key in _KEYS)
                known = f"{names} and SKERRY_PROVIDERS__NAME__SETTING"
                raise ConfigError(f"{name}: no setting has that name; there are {known}")
            layer[key] = _Setting(value, f"${name}")
    return layer


def _from_flags(overrides: Mapping[str, Any]) -> _Layer:
    return {
        key: _Setting(value, "-v" if key == "log" else f"--{key.replace('_', '-')}")
        for key, value in overrides.items()
        if value is not None
    }


def _flat(data: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Dotted keys from a file's tables; an unknown key is an error that names the file."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if key in _KEYS and "." not in key:
            flat[key] = value
        elif key == "network":
            flat |= _flat_network(value, path)
        elif key == "e2b":
            flat[_TEMPLATES] = value
        elif key in _SECTIONS and isinstance(value, dict):
            flat |= {f"{key}.{field}": each for field, each in value.items()}
            if unknown := [field for field in value if f"{key}.{field}" not in _KEYS]:
                known = ", ".join(_SECTIONS[key].__struct_fields__)
                raise ConfigError(f"{path}: unknown key {unknown[0]!r} in [{key}]; there are {known}")
        elif key != "providers":
            known = f"{', '.join(_KEYS)}, [admission], [ledger], [network], [server], [e2b] and [providers.NAME]"
            raise ConfigError(f"{path}: unknown key {key!r}; there are {known}")
        elif not isinstance(value, dict) or not all(isinstance(settings, dict) for settings in value.values()):
            raise ConfigError(f"{path}: 'providers' must hold one table for each provider: [providers.NAME]")
        else:
            flat |= {f"providers.{name}.{field}": v for name, fields in value.items() for field, v in fields.items()}
    return flat


def _flat_network(value: Any, path: str) -> dict[str, Any]:
    tables = {key: each for key, each in value.items() if key != "ca"} if isinstance(value, dict) else None
    if tables is None or not all(isinstance(table, dict) for table in tables.values()):
        raise ConfigError(f"{path}: 'network' must hold tables: [network.hosts], [network.sets]")
    if unknown := sorted(tables.keys() - set(_NETWORK)):
        raise ConfigError(f"{path}: unknown key 'network.{unknown[0]}'; there are {', '.join(_NETWORK)} and ca")
    flat = {f"network.{table}.{name}": each for table, fields in tables.items() for name, each in fields.items()}
    return flat | ({_CA: value["ca"]} if "ca" in value else {})


def _checked_templates(setting: _Setting | None) -> dict[str, Template]:
    if setting is None:
        return {}
    try:
        return msgspec.convert(setting.value, dict[Literal["templates"], dict[str, Template]])["templates"]
    except (msgspec.ValidationError, KeyError) as error:
        raise ConfigError(f"{setting.origin}: e2b: {error}; it holds [e2b.templates.NAME]") from None


def _checked_ca(setting: _Setting) -> str:
    value, origin = setting
    if not isinstance(value, str) or not os.path.isabs(os.path.expanduser(value)):
        raise ConfigError(f"{origin}: {_CA} is {value!r}; it must be the absolute path of a file")
    return os.path.expanduser(value)


def _checked_network(table: str, name: str, setting: _Setting) -> tuple[str, ...]:
    """Addresses of a name, or rules of a set; one alone may stand without a list."""
    import ipaddress

    from skerry.model.rules import Rule, is_set_name, normal_name

    value, origin = setting
    texts = [value] if isinstance(value, str) else value
    try:
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError("it must be a text, or a list of texts")
        if table == "hosts":
            if normal_name(name) != name:
                raise ValueError(f"the name is written {normal_name(name)}")
            return tuple(str(ipaddress.ip_address(text)) for text in texts)
        if not is_set_name(name):
            raise ValueError("the name of a set has lower-case letters, digits and -, and no dot")
        return tuple(Rule.parse(text, "sets").text for text in texts)
    except (ValueError, InvalidSpec) as error:
        raise ConfigError(f"{origin}: network.{table}.{name}: {error}") from None


def _checked(key: str, setting: _Setting) -> Any:
    value, origin = setting
    if key in _NUMBERS:
        return _checked_number(key, value, origin)
    if key in _FIELDS:
        return _checked_field(key, value, origin)
    if key in _DURATIONS and isinstance(value, int | float) and not isinstance(value, bool):
        value = f"{value}s"
    if not isinstance(value, str) or not (value or key in _SERVER):
        raise ConfigError(f"{origin}: {key} is {value!r}; it must be a text that is not empty")
    if key == "state_dir":
        value = os.path.expanduser(value)
        if not os.path.isabs(value):
            raise ConfigError(f"{origin}: state_dir {value!r} must be an absolute path")
    if key in _DURATIONS and value != "never":
        try:
            parse_duration(value, key)
        except InvalidSpec as error:
            raise ConfigError(f"{origin}: {error}, or never") from None
    if key == "log" and value != "off":
        from skerry.log import parse

        try:
            parse(value)
        except ConfigError as error:
            raise ConfigError(f"{origin}: {error}") from None
    return value


def _checked_number(key: str, value: Any, origin: str) -> int:
    try:
        number = parse_size(value, key) if key == _MIN_FREE else int(value) if isinstance(value, str) else value
    except (ValueError, InvalidSpec):
        number = None
    least = 1 if key == "max_boots" else 0
    if type(number) is not int or number < least:
        raise ConfigError(f"{origin}: {key} is {value!r}; it must be a whole number, at least {least}")
    return number


def _checked_field(key: str, value: Any, origin: str) -> Any:
    """A setting of a section, as its type has it; variables are texts, and one text is a list of one."""
    type = _FIELDS[key].type
    try:
        if key in _SIZES:
            value = parse_size(value, key)
        elif get_origin(type) is tuple:
            value = [value] if isinstance(value, str) else value
        value = msgspec.convert(value, type, strict=False)
        for pattern in value if key == "ledger.redact" else ():
            re.compile(pattern)
    except (msgspec.ValidationError, InvalidSpec, re.error) as error:
        raise ConfigError(f"{origin}: {key} is {value!r}: {error}") from None
    least = _LEAST.get(key)
    if least is not None and not least <= value < float("inf"):
        kind = "number" if type is float else "whole number"
        raise ConfigError(f"{origin}: {key} is {value!r}; it must be a {kind}, at least {least}")
    return value


def _xdg(name: str, fallback: str) -> Path:
    """A base folder as the XDG specification says: a relative one is as good as none."""
    named = os.environ.get(name, "")
    return Path(named if os.path.isabs(named) else fallback).expanduser() / "skerry"
