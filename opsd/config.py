"""The configuration: one TOML file becomes one frozen tree of settings.

The file is the one named with ``--config``, else ``$OPSD_CONFIG``, else ``/etc/opsd/opsd.toml``, else there is none and
the defaults apply. ``OPSD_STATE_DIR`` and ``OPSD_SHM`` win over the file. A file that is missing, malformed or has an
unknown key raises ConfigError with one sentence that says what to change; commands exit with ``exitcodes.USAGE`` then.
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError, create_model

from opsd.collectors import plugins
from opsd.files import SYSTEM_FILE, read_settings
from opsd.settings.policy import PolicySettings
from opsd.settings.sections import (
    AgentSettings,
    CostSettings,
    NotifySettings,
    PreflightSettings,
    RepairSettings,
    Section,
    SpareSettings,
)

S = TypeVar("S", bound=Section)


class ConfigError(Exception):
    """A configuration that cannot be used; the message is one sentence for its author."""


class _AgentFirst(Section):
    agent: AgentSettings = AgentSettings()


if TYPE_CHECKING:
    _Collectors = _AgentFirst
else:
    _fields = {plugin.name: (plugin.settings, plugin.settings()) for plugin in plugins()}
    _Collectors = create_model("_Collectors", __base__=_AgentFirst, **_fields)


class Settings(_Collectors):
    """Everything that can be configured: one section for each collector, and these.

    The field names are the sections of the file.
    """

    spare: SpareSettings = SpareSettings()  # a collector's section as well, which many modules read
    policy: PolicySettings = PolicySettings()
    repair: RepairSettings = RepairSettings()
    notify: NotifySettings = NotifySettings()
    preflight: PreflightSettings = PreflightSettings()
    cost: CostSettings = CostSettings()

    def section(self, kind: type[S]) -> S:
        """The section of this class."""
        return next(section for _, section in self if isinstance(section, kind))


def sections() -> Iterator[tuple[str, type[BaseModel]]]:
    """Name and model of each section, in the order of the file."""
    for name, field in Settings.model_fields.items():
        assert isinstance(field.annotation, type)
        yield name, field.annotation


def find_file(path: Path | None = None, env: Mapping[str, str] = os.environ, system: Path = SYSTEM_FILE) -> Path | None:
    """The configuration file that applies, or None for the built-in defaults.

    A file named by ``path`` or ``OPSD_CONFIG`` is returned even if it does not exist. The ``system``'s file is returned
    unless it surely does not exist, since unreadable settings must not become the defaults.
    """
    if path is not None:
        return path
    if named := env.get("OPSD_CONFIG"):
        return Path(named)
    try:
        system.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        pass
    return system


def load(path: Path | None = None, overrides: Sequence[str] = (), env: Mapping[str, str] = os.environ) -> Settings:
    """Settings from the file that applies, the environment, and ``overrides`` ("agent.interval_s=0.5"), last one wins.

    Raises ConfigError.
    """
    file = find_file(path, env)
    data = {} if file is None else _read(file)
    _set(data, "agent.state_dir", env.get("OPSD_STATE_DIR"))
    _set(data, "ranks.root", env.get("OPSD_SHM"))
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator or "." not in key:
            raise ConfigError(f"--set {override}: write section.key=value, for instance agent.interval_s=0.5")
        _set(data, key.strip(), _parse_value(value.strip()))
    return _validate(data, "" if file is None else f"{file}: ")


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_settings(file).decode())
    except OSError as error:
        hint = ""
        if isinstance(error, FileNotFoundError):
            hint = f"; `opsd config init {file}` writes one"
        elif isinstance(error, PermissionError):
            hint = "; let everybody read it, or name another file with OPSD_CONFIG"
        raise ConfigError(f"{file}: cannot be read: {error.strerror}{hint}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not a text file in UTF-8") from error
    except RecursionError as error:
        raise ConfigError(f"{file}: not valid TOML: nested too deeply") from error
    except ValueError as error:  # besides TOMLDecodeError: a number with thousands of digits, a date that is none
        raise ConfigError(f"{file}: not valid TOML: {error}") from error


def _set(data: dict[str, Any], dotted: str, value: object) -> None:
    if value is None:
        return
    *outer, last = dotted.split(".")
    for key in outer:
        inner = data.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{dotted}: {key} is a value, not a section")
        data = inner
    data[last] = value


def _parse_value(text: str) -> object:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _validate(data: Mapping[str, Any], where: str) -> Settings:
    try:
        settings = Settings.model_validate(data)
    except ValidationError as error:
        raise ConfigError(where + _sentence(error)) from error
    if named := settings.policy.named_kinds():
        from opsd.runbooks import RUNBOOKS  # takes longer than all the rest, and most files name no runbook

        kinds = [runbook.kind for runbook in RUNBOOKS]
        for key, kind in named:
            if kind not in kinds:
                raise ConfigError(f"{where}unknown runbook {key}.{kind}{_suggest(kind, kinds, f'{key}.')}")
    return settings


def _sentence(error: ValidationError) -> str:
    """The first problem in one sentence; an unknown key comes before everything else."""
    problems = error.errors(include_url=False)
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    dotted = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown key {dotted}{_suggest_key(dotted)}"
    value = problem["input"]
    shown = "" if dotted.startswith("notify.") else f", not {value!r}"
    said = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{dotted}: {said[0].lower()}{said[1:]}{shown}"


def secret_files(settings: Settings) -> list[Path]:
    """Files with a secret that the settings make use of."""
    agent, notify = settings.agent, settings.notify
    token = notify.grafana_token_file if notify.grafana_url else None
    return [file for file in (agent.peer_credentials_file, notify.webhook_file, token) if file is not None]


def known_keys() -> list[str]:
    """Every settable key as ``section.key``."""
    return [f"{section}.{key}" for section, model in sections() for key in model.model_fields]


def _suggest_key(dotted: str) -> str:
    if "." not in dotted:
        return _suggest(dotted, [name for name, _ in sections()])
    section, _, key = dotted.partition(".")
    elsewhere = [known for known in known_keys() if known.endswith("." + key)]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    return _suggest(dotted, [known for known in known_keys() if known.startswith(section + ".")])


def _suggest(name: str, known: Iterable[str], prefix: str = "") -> str:
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {prefix}{nearest[0]}?" if nearest else f"; known are {', '.join(known)}"


def to_toml(settings: Settings) -> str:
    """The settings in force as TOML; secrets are masked, unset values are left out."""
    blocks = []
    for section, model in sections():
        values = getattr(settings, section)
        lines = [
            f"{key} = {literal(getattr(values, key))}" for key in model.model_fields if getattr(values, key) is not None
        ]
        blocks.append("\n".join([f"[{section}]", *lines]) + "\n")
    return "\n".join(blocks)


def summary(model: type[BaseModel]) -> str:
    """The purpose of a section, in one line."""
    return inspect.cleandoc(model.__doc__ or "").partition("\n")[0]


def template() -> str:
    """A configuration file in which every setting is explained and commented out at its default."""
    blocks = ["# Configuration of opsd. What is commented out shows the default or an example.\n"]
    for section, model in sections():
        lines = [f"# {summary(model)}", f"[{section}]"]
        for key, field in model.model_fields.items():
            value = field.examples[0] if field.examples else field.default
            lines += [f"# {field.description}", f"# {key} = {literal(value)}"]
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def _key(name: str) -> str:
    """``name`` as a TOML key, in quotes where it needs them."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else literal(name)


def literal(value: object) -> str:
    """``value`` as a TOML literal."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, BaseModel):
        return literal(value.model_dump(exclude_defaults=True))
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_key(str(key))} = {literal(item)}" for key, item in value.items())
        return f"{{ {pairs} }}" if value else "{}"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(literal, value)) + "]"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML escapes as JSON does
