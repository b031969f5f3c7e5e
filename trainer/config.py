"""Settings of a training run: one TOML file becomes one frozen tree.

Unknown keys are refused with the nearest known one. ``--set section.key=value`` overrides single values; the value is
read as TOML, and as a plain string where it is not TOML.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Strict,
    ValidationError,
)
from pydantic_core import ErrorDetails

from trainer.data.mixture import Mixture, MixtureError, Stage

PRESETS = Path(__file__).parent / "configs"
MIXTURES = PRESETS / "mixtures"


class ConfigError(ValueError):
    """Settings that cannot be used; the message is one sentence that says which and what to do."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class RunSettings(_Section):
    """What to run and where. ``folder`` defaults to $OPSD_RUN_DIR, then to ``runs/NAME`` of the configuration."""

    steps: PositiveInt
    seed: NonNegativeInt = 0
    folder: str = ""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: NonNegativeInt = 0
    """Threads of a rank on the CPU; 0 shares the node's cores among its ranks."""
    deterministic: bool = False
    """Refuse operations that have no deterministic implementation (slower on a GPU, free on the CPU)."""


class ModelSettings(_Section):
    """Shape of the decoder. ``nope_every`` 4 leaves every 4th layer without rotary positions; 0 leaves none."""

    layers: PositiveInt
    width: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    ffn: PositiveInt
    vocab: PositiveInt
    rope_theta: float = Field(50_000.0, gt=0)
    nope_every: NonNegativeInt = 4
    norm_eps: float = Field(1e-6, gt=0)
    init_std: float = Field(0.02, gt=0)
    document_mask: bool = True
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation; parameters, gradients and optimiser state are float32."""

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.width // self.heads


_Steps = Annotated[tuple[PositiveInt, PositiveInt], Strict(False)]


class StageSettings(_Section):
    """From step ``start`` on, counted from 1, sources are mixed by these ``weights``, which sum to 1."""

    start: PositiveInt
    weights: dict[str, NonNegativeFloat]


class DataSettings(_Section):
    """Which token shards, in which order. ``batch`` is the global batch in sequences, the same for every world size."""

    shards: str = ""
    """Folder of the corpus; with stages, the folder in which each source has a corpus of its name."""
    fallback: str = ""
    """The same on slower storage, used file by file where ``shards`` (on the node, for instance) has none."""
    tokenizer: str = ""
    """A tokenizer.json that the shards must have been made with; empty does not compare."""
    mixture: str = ""
    """A TOML file with ``[[stages]]``, or the name of a preset (smollm3); empty for the stages given here."""
    stages: Annotated[tuple[StageSettings, ...], Strict(False)] = ()
    skip: Annotated[tuple[_Steps, ...], Strict(False)] = ()
    """Pairs of steps, first and last: the batches of these steps are left out and the next ones take their place,
    for instance after a loss spike. Each pair counts steps with the pairs before it applied."""
    sequence: PositiveInt
    batch: PositiveInt
    micro_batch: PositiveInt
    prefetch: PositiveInt = 4
    """Micro-batches that the data worker keeps ready."""
    verify: Literal["checksum", "size"] = "checksum"
    """What is compared with the index at start; ``size`` for corpora too large to be read through."""

    def problem(self, steps: int) -> str | None:
        """What is wrong with the order of the data for a run of so many ``steps``, in one sentence."""
        starts = [stage.start for stage in self.stages]
        if starts and (starts[0] != 1 or starts != sorted(set(starts))):
            return f"data.stages start at steps {starts}; the first starts at 1, each later one after it"
        if starts and starts[-1] > steps:
            return f"data.stages: a stage starts at step {starts[-1]}, and the run ends at run.steps {steps}"
        for number, stage in enumerate(self.stages, 1):
            if strange := next((name for name in stage.weights if name in ("", "..") or "/" in name), None):
                return f"data.stages: {strange!r} is not the name of a folder in data.shards"
            try:
                Stage(0, stage.weights).shares()
            except MixtureError as error:
                return f"data.stages: stage {number}, from step {stage.start}: {error}"
        if list(self.skip) != sorted(self.skip) or any(last < first for first, last in self.skip):
            return "data.skip needs pairs of a first and a last step, in ascending order"
        return None

    def position(self, step: int) -> int:
        """How many samples a run trains on before ``step``."""
        return (step - 1) * self.batch

    def mix(self, sizes: Mapping[str, int], seed: int) -> Mixture:
        """The order of the samples over ``sizes``, the number of sequences of each source; "." is the only corpus."""
        stages = [Stage(self.position(stage.start), stage.weights) for stage in self.stages]
        skips = [(self.position(first), self.position(last + 1) - self.position(first)) for first, last in self.skip]
        return Mixture(stages or [Stage(0, {".": 1.0})], sizes, seed, skips)


class OptimizerSettings(_Section):
    """AdamW. ``clip`` bounds the global gradient norm; ``z_loss`` weighs log(Z)^2 (PaLM, section 5)."""

    lr: float = Field(gt=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    weight_decay: NonNegativeFloat = 0.1
    clip: float = Field(1.0, gt=0)
    z_loss: NonNegativeFloat = 0.0


class ScheduleSettings(_Section):
    """Warm-up, stable, decay, in absolute steps. The rate falls to 0 from ``decay_start`` to ``decay_end``."""

    warmup: NonNegativeInt
    decay_start: NonNegativeInt
    decay_end: PositiveInt


class CheckpointSettings(_Section):
    """A checkpoint every ``every`` steps and at the end, the newest ``keep`` are kept."""

    every: PositiveInt
    keep: PositiveInt = 3


class MetricsSettings(_Section):
    """``peak_flops``: FLOP/s of one device in ``model.dtype``, dense; the denominator of MFU. 0 means not known."""

    peak_flops: NonNegativeFloat = 0.0


class Config(_Section):
    """All settings of a run."""

    run: RunSettings
    model: ModelSettings
    data: DataSettings
    optimizer: OptimizerSettings
    schedule: ScheduleSettings
    checkpoint: CheckpointSettings
    metrics: MetricsSettings = MetricsSettings()

    def problem(self) -> str | None:
        """What is wrong between the settings, in one sentence."""
        model, data, schedule = self.model, self.data, self.schedule
        if model.width % model.heads or model.head_dim % 2:
            return f"model.width {model.width} does not split into {model.heads} heads of an even number of channels"
        if model.heads % model.kv_heads:
            return f"model.heads {model.heads} is not a multiple of model.kv_heads {model.kv_heads}"
        if not schedule.warmup <= schedule.decay_start < schedule.decay_end:
            return "schedule needs warmup <= decay_start < decay_end"
        if not data.shards:
            return "data.shards is not set: make shards with `python -m trainer.data` and pass --set data.shards=FOLDER"
        return data.problem(self.run.steps)

    def digest(self, mixture: Mixture, shards: Mapping[str, str], position: int) -> str:
        """Identifies what the state after ``position`` samples belongs to: the model and these samples in their order.

        ``shards`` identifies the corpus of each source. Settings that may change in the middle of a run (length, batch,
        learning rate, stages to come) are left out, and so are those at their default, lest a setting that a
        later release adds orphan the checkpoints of this one.
        """
        order = mixture.identity(position)
        identity = {
            "model": self.model.model_dump(exclude={"dtype"}, exclude_defaults=True),
            "seed": self.run.seed,
            "sequence": self.data.sequence,
            "order": asdict(order),
            "shards": {name: shards[name] for name in order.sources},
        }
        return hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=16).hexdigest()


def load(source: str, overrides: Iterable[str] = (), environ: Mapping[str, str] = os.environ) -> Config:
    """Read ``source``, a TOML file or the name of a preset, and apply overrides. Raises ConfigError."""
    path = _find(source, PRESETS)
    raw = _read(path)
    for override in overrides:
        _apply(raw, override)
    _resolve_mixture(raw, path)
    raw.setdefault("run", {}).setdefault("folder", environ.get("OPSD_RUN_DIR") or f"runs/{path.stem}")
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"{path}: " + "; ".join(_sentence(detail) for detail in error.errors())) from None
    if problem := config.problem():
        raise ConfigError(f"{path}: {problem}")
    return config


def _find(source: str, presets: Path) -> Path:
    path = Path(source)
    if path.suffix != ".toml":
        path = presets / f"{source}.toml"
        if not path.is_file():
            names = ", ".join(sorted(preset.stem for preset in presets.glob("*.toml")))
            raise ConfigError(f"{source!r} is neither a .toml file nor a preset ({names})")
    return path


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path} cannot be read: {reason}") from error


def _resolve_mixture(raw: dict[str, Any], path: Path) -> None:
    """Put the stages of the file that ``data.mixture`` names in their place."""
    data = raw.get("data", {})
    if not (isinstance(data, dict) and isinstance(mixture := data.get("mixture"), str) and mixture):
        return
    if data.get("stages"):
        raise ConfigError(f"{path}: data.mixture and data.stages are both given; remove one")
    source = mixture if not mixture.endswith(".toml") else str(path.parent / mixture)
    data["stages"] = _read(_find(source, MIXTURES)).get("stages", [])
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
    raw.setdefault(section, {})[name] = value


def _sentence(error: ErrorDetails) -> str:
    where = [str(part) for part in error["loc"]]
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(where[-1], _known(where[:-1]), n=1, cutoff=0)
        return f"unknown key {'.'.join(where)}; did you mean {'.'.join([*where[:-1], *near])}?"
    if error["type"] == "missing":
        return f"{'.'.join(where)} is missing"
    return f"{'.'.join(where)}: {error['msg'][0].lower()}{error['msg'][1:]}, not {error['input']!r}"


def _known(section: list[str]) -> Iterable[str]:
    fields = Config.model_fields
    for name in section:
        fields = getattr(fields[name].annotation, "model_fields", {})
    return fields
