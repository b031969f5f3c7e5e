"""The settings of a training run: one TOML file becomes one frozen tree.

Unknown keys are refused, with the nearest known one in the message. ``--set section.key=value`` overrides single
values; the value is parsed as TOML, or else taken as a string.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from opsd import durable
from opsd.checkpoints.remote import without_user
from opsd.files import read_settings
from opsd.trainer.data_settings import DataSettings, Shape
from opsd.trainer.model_settings import ModelSettings, Section, model_problem
from opsd.trainer.settings import (
    CheckpointSettings,
    EvaluationSettings,
    MetricsSettings,
    OptimizerSettings,
    ParallelSettings,
    ReplaySettings,
    RunSettings,
    ScheduleSettings,
    TrackingSettings,
)

if TYPE_CHECKING:
    from opsd.trainer.data.mixture import Mixture

PRESETS = Path(__file__).parent / "configs"
MIXTURES = PRESETS / "mixtures"
CHECKPOINTS, CONFIG = "checkpoints", "config.json"
"""In the run folder: the checkpoint folder, and the settings of the run's last start."""
_FREE = {"dtype", "attention"}
"""Settings of [model] that may change during a run."""


class ConfigError(ValueError):
    """The settings cannot be used; the message is one sentence that says which and what to do."""


class Config(Section):
    """All settings of a run."""

    run: RunSettings
    model: ModelSettings
    parallel: ParallelSettings = ParallelSettings()
    data: DataSettings
    optimizer: OptimizerSettings
    schedule: ScheduleSettings
    checkpoint: CheckpointSettings
    replay: ReplaySettings = ReplaySettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    metrics: MetricsSettings = MetricsSettings()
    tracking: TrackingSettings = TrackingSettings()

    def problem(self) -> str | None:
        """What is inconsistent between the sections, in one sentence."""
        data = self.data
        if problem := self._shape_problem() or self.schedule.problem():
            return problem
        optimizer = self.optimizer
        for name in ("balance_loss", "router_z_loss"):
            if getattr(optimizer, name) and not self.model.expert_layers:
                return f"optimizer.{name} needs model.experts"
        if bool(optimizer.balance_rate) > self.model.router_bias:
            return "optimizer.balance_rate needs model.router_bias"
        if 0 < self.model.positions < self.evaluation.sequence:
            return f"evaluation.sequence {self.evaluation.sequence} is more than model.positions {self.model.positions}"
        if not data.shards:
            return (
                "data.shards is not set: `python -m opsd.trainer.data` makes shards; then pass --set data.shards=FOLDER"
            )
        return self.checkpoint.problem() or data.problem(self.run.steps)

    def _shape_problem(self) -> str | None:
        for shape in self.data.shapes:
            model = self.model_with(shape)
            problem = model_problem(model) or self.parallel.problem(model, shape.sequence)
            if 0 < model.positions < shape.sequence:
                problem = f"data.sequence {shape.sequence} is more than model.positions {model.positions}"
            if problem:
                return f"data.stages, from step {shape.start}: {problem}" if shape.start > 1 else problem
        return None

    def model_with(self, shape: Shape) -> ModelSettings:
        """The model as it is while the run has ``shape``."""
        return self.model.model_copy(update=dict(shape.rope)) if shape.rope else self.model

    def digest(self, mixture: Mixture, shards: Mapping[str, str], position: int) -> str:
        """Identifies model, optimiser and the first ``position`` samples in their order, to which a state belongs.

        ``shards`` identifies the corpus of each source. Settings that may change during a run (length, batch, learning
        rate, later stages) are left out. So are settings at their default: a setting added by a later release then does
        not invalidate existing checkpoints.
        """
        order = mixture.identity(position)
        identity = {
            "model": self.model.model_dump(exclude=_FREE, exclude_defaults=True),
            "seed": self.run.seed,
            "sequence": self.data.sequence,
            "order": asdict(order),
            "shards": {name: shards[name] for name in order.sources},
        }
        starts = [(self.data.position(shape.start), shape.rope) for shape in self.data.shapes]
        begun = [next(alike) for rope, alike in groupby(starts, itemgetter(1)) if rope]
        if begun := [(start, rope) for start, rope in begun if start < position]:
            identity["rope"] = begun
        if self.optimizer.kind != "adamw":
            identity["optimizer"] = self.optimizer.kind
        return hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=16).hexdigest()

    @property
    def lasting(self) -> dict[str, object]:
        """The settings that cannot change during a run, by key; the order of the data so far is not among them."""
        model = {f"model.{name}": value for name, value in self.model.model_dump(exclude=_FREE).items()}
        rest = {"optimizer.kind": self.optimizer.kind, "run.seed": self.run.seed, "data.sequence": self.data.sequence}
        return model | rest

    def store(self, folder: Path) -> None:
        """Write the settings into the run's ``folder``, without the passwords of addresses. Raises OSError."""
        durable.replace(folder / CONFIG, without_user(self.model_dump_json(indent=1)).encode())

    def changes(self, folder: Path) -> list[str] | None:
        """The settings that cannot change and differ from those of the last start of the run in ``folder``.

        None if these are not known.
        """
        try:
            before = Config.model_validate_json((folder / CONFIG).read_text(encoding="utf-8")).lasting
        except (OSError, ValueError):
            return None
        return [
            f"{key} was {before[key]!r} and is {value!r}" for key, value in self.lasting.items() if before[key] != value
        ]


def load(source: str, overrides: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> Config:
    """Read ``source``, a TOML file or the name of a preset, and apply overrides. Raises ConfigError."""
    path = locate(source)
    return complete(read(path), path, overrides, environ)


def complete(
    raw: dict[str, Any], path: Path, overrides: Sequence[str] = (), environ: Mapping[str, str] = os.environ
) -> Config:
    """``raw``, the settings that ``path`` has, with overrides applied and checked. Raises ConfigError."""
    for override in overrides:
        _apply(raw, override)
    _resolve_mixture(raw, path)
    if isinstance(run := raw.setdefault("run", {}), dict):
        run.setdefault("folder", environ.get("OPSD_RUN_DIR") or f"runs/{path.stem}")
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        said: dict[str, list[str]] = {}
        for detail in error.errors():
            said.setdefault(_origin(detail, path, overrides), []).append(sentence(detail, Config))
        raise ConfigError("; ".join(f"{where}: {'; '.join(what)}" for where, what in said.items())) from None
    if problem := config.problem():
        words = {*re.findall(r"[\w.]+", problem)}
        given = (f"--set {one}" for one in reversed(overrides) if words & {_key(one), _key(one).rpartition(".")[2]})
        raise ConfigError(f"{next(given, path)}: {problem}")
    return config


def locate(source: str) -> Path:
    """The file of the settings that ``source`` names. Raises ConfigError."""
    path = _find(source, PRESETS)
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    return path


def _find(source: str, presets: Path) -> Path:
    path = Path(source)
    if path.suffix != ".toml":
        path = presets / f"{source}.toml"
        if not path.is_file():
            names = sorted(preset.stem for preset in presets.glob("*.toml"))
            near = "".join(f"; did you mean {name}?" for name in difflib.get_close_matches(source, names, n=1))
            raise ConfigError(f"{source!r} is neither a .toml file nor a preset ({', '.join(names)}){near}")
    return path


def read(path: Path) -> dict[str, Any]:
    """The content of a TOML file. Raises ConfigError."""
    try:
        return tomllib.loads(read_settings(path).decode())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path} cannot be read: {reason}") from error


def _resolve_mixture(raw: dict[str, Any], path: Path) -> None:
    """Insert the stages of the file that ``data.mixture`` names."""
    data = raw.get("data", {})
    if not (isinstance(data, dict) and isinstance(mixture := data.get("mixture"), str) and mixture):
        return
    if data.get("stages"):
        raise ConfigError(f"{path}: data.mixture and data.stages are both given; remove one")
    source = mixture if not mixture.endswith(".toml") else str(path.parent / mixture)
    data["stages"] = read(_find(source, MIXTURES)).get("stages", [])
    if not data["stages"]:
        raise ConfigError(f"{path}: data.mixture {mixture!r} has no [[stages]]")


def _apply(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and dot and name):
        raise ConfigError(f"--set {override}: expected section.key=value, for instance run.steps=100")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    if not isinstance(settings := raw.setdefault(section, {}), dict):
        raise ConfigError(f"--set {override}: {section} has to be a section, the file says {section} = {settings!r}")
    settings[name] = value


def _key(override: str) -> str:
    return override.partition("=")[0].strip()


def _origin(error: ErrorDetails, path: Path, overrides: Sequence[str]) -> str:
    """The last override that has, or is part of, what ``error`` is about; else the file."""
    where = [str(part) for part in error["loc"]]
    for override in reversed(overrides):
        if all(one == other for one, other in zip(_key(override).split("."), where, strict=False)):
            return f"--set {override}"
    return str(path)


def sentence(error: ErrorDetails, model: type[BaseModel]) -> str:
    """The problem of a file whose content is ``model``. An unknown key gets the nearest known one."""
    where = [str(part) for part in error["loc"]]
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(where[-1], _known(where[:-1], model), n=1, cutoff=0)
        return f"unknown key {'.'.join(where)}; did you mean {'.'.join([*where[:-1], *near])}?"
    if error["type"] == "missing":
        return f"{'.'.join(where)} is missing"
    said = error["msg"].removeprefix("Value error, ")
    return f"{'.'.join(where)}: {said[0].lower()}{said[1:]}, not {error['input']!r}"


def _known(section: list[str], model: type[BaseModel]) -> Iterable[str]:
    fields = model.model_fields
    for name in (name for name in section if not name.isdecimal()):
        annotation = fields[name].annotation
        kind = next(iter(get_args(annotation)), annotation)  # one of a list of sections
        fields = getattr(kind, "model_fields", {})
    return fields
