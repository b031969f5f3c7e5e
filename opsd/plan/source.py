"""What is to be planned: a run's TOML file, a preset, or a ``config.json`` of Hugging Face.

The last has no batch and no rate: scaling laws suggest them. A layout that was planned is put back into the TOML file.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from opsd.files import read_settings
from opsd.trainer import counts
from opsd.trainer.config import Config, ConfigError, complete, load
from opsd.trainer.hf.config import settings_of
from opsd.trainer.model_settings import ModelSettings

_UNREAD: Final = "data.shards=unread"
"""A plan reads no data, and so needs none yet."""
_LONGEST: Final = 8192
"""Sequence of a ``config.json`` that allows longer ones, which are trained last and briefly."""
_OF_WEIGHTS: Final = frozenset({"quantization_config", "aux_loss_alpha", "seq_aux", "ep_size"})
"""Fields of DeepSeek's files that say how weights are stored or were trained, and nothing of the shape."""
_PLACEHOLDER: Final = 100
"""Steps, where only the tokens are known."""


def read(
    source: str,
    overrides: Sequence[str],
    tokens: float | None,
    gpus: int | None,
    note: Callable[[str], None] = lambda sentence: None,
) -> Config:
    """The run that ``source`` describes; ``note`` gets the parts that are not planned. Raises ConfigError."""
    path = Path(source)
    if path.is_dir():
        path /= "config.json"
    if path.suffix == ".json":
        return _of_json(path, overrides, tokens, gpus, note)
    config = load(source, [*overrides, _UNREAD])
    if config.data.lengthens:
        raise ConfigError(
            f"{source}: data.stages change sequences, batch or positions, and a plan is of one shape: plan each stage "
            "by itself, with --set data.stages=[], its data.sequence and data.batch, and --tokens"
        )
    return config


def _of_json(
    path: Path, overrides: Sequence[str], tokens: float | None, gpus: int | None, note: Callable[[str], None]
) -> Config:
    """With bf16, AdamW, and the batch that scaling laws suggest; the overrides change what is not so."""
    try:
        fields = json.loads(read_settings(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is no JSON of a model: it is nested too deeply") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} has no settings of a model")
    if isinstance(text := fields.get("text_config"), dict):
        note(f"{path}: the plan is of text_config alone, not of what else the model has")
        fields = text
    if tokens is None:
        raise ConfigError(f"{path} does not say how long to train: add --tokens, for instance --tokens 1e12")
    model = settings_of({name: value for name, value in fields.items() if name not in _OF_WEIGHTS})
    longest = fields.get("max_position_embeddings") or _LONGEST
    if not isinstance(longest, int) or longest < 1:
        raise ConfigError(f"{path} has max_position_embeddings {longest!r}, which is no number of tokens")
    sequence = min(longest, _LONGEST)
    raw: dict[str, Any] = {
        "run": {"steps": _PLACEHOLDER},
        "model": model.model_dump() | {"dtype": "bfloat16"},
        "data": {"sequence": sequence, "batch": _batch(model, sequence, tokens, gpus), "micro_batch": 1},
        "optimizer": {"lr": suggest(model, tokens).rate[0]},
        "schedule": {"warmup": 1, "decay_start": 2, "decay_end": 3},
        "checkpoint": {"minutes": 10.0},
    }
    return complete(raw, path, [*overrides, _UNREAD])


def _batch(model: ModelSettings, sequence: int, tokens: float, gpus: int | None) -> int:
    """Sequences: near the smaller suggestion, and a number that many layouts divide."""
    wanted = max(1.0, suggest(model, tokens).batch[0] / sequence)
    if gpus is None:
        return int(2 ** round(math.log2(wanted)))
    unit = max(size for size in range(1, int(wanted) + 1) if not gpus % size)
    return round(wanted / unit) * unit


def tokens_of(config: Config) -> int:
    """Those that the run's own number of steps has."""
    return config.data.tokens(config.data.position(config.run.steps + 1))


_HEADER = re.compile(r"\s*\[+\s*([^\]\s]+)\s*\]+")


def with_settings(text: str, settings: Mapping[str, Any]) -> str:
    """``text`` with these settings, by ``section.key``. Raises ValueError if it cannot be changed so."""
    lines = text.splitlines()
    for name, value in settings.items():
        section, _, key = name.partition(".")
        _set(lines, section, key, f'"{value}"' if isinstance(value, str) else str(value))
    changed = "\n".join(lines) + "\n"
    expected = tomllib.loads(text)
    for name, value in settings.items():
        section, _, key = name.partition(".")
        expected.setdefault(section, {})[key] = value
    try:
        if tomllib.loads(changed) == expected:
            return changed
    except tomllib.TOMLDecodeError:
        pass
    raise ValueError("its sections are written in a way that cannot be changed line by line")


def _set(lines: list[str], section: str, key: str, value: str) -> None:
    begin = next((at for at, line in enumerate(lines) if _section(line) == section), None)
    if begin is None:
        lines += ["", f"[{section}]", f"{key} = {value}"]
        return
    end = next((at for at in range(begin + 1, len(lines)) if _section(lines[at])), len(lines))
    for at in range(begin + 1, end):
        if match := re.match(rf"(\s*{key}\s*=\s*)[^#]*?(\s*(?:#.*)?)$", lines[at]):
            lines[at] = f"{match[1]}{value}{match[2]}"
            return
    last = max(at for at in range(begin, end) if lines[at].strip())
    lines.insert(last + 1, f"{key} = {value}")


def _section(line: str) -> str | None:
    match = _HEADER.match(line)
    return match[1] if match else None


SOURCES: Final = (
    "DeepSeek LLM, arXiv 2401.02954, 3.1 (from the FLOP of the run)",
    "Step Law, arXiv 2503.04715 (from parameters and tokens)",
)


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Batch in tokens and peak of the learning rate, each from the smaller to the larger of the two laws."""

    batch: tuple[float, float]
    rate: tuple[float, float]


def suggest(model: ModelSettings, tokens: float) -> Suggestion:
    """What both laws say. They were fitted to runs far smaller than a month on hundreds of GPUs."""
    size = counts.active_parameters(model) - counts.embedding_parameters(model)
    flops = 6.0 * max(size, 1) * tokens
    batches = sorted((0.2920 * flops**0.3271, 0.58 * tokens**0.571))
    rates = sorted((0.3118 * flops**-0.1250, 1.79 * max(size, 1) ** -0.713 * tokens**0.307))
    return Suggestion((batches[0], batches[1]), (rates[0], rates[1]))
