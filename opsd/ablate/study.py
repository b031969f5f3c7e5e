"""A study: its file, the settings of its arms, and why an arm cannot be compared with the baseline.

A study file is TOML. Its ``baseline`` is a preset or the TOML file of a run. All runs have the settings of ``set``.
Each arm runs with the same ``seeds``, and ``metric`` decides. ``[arm.NAME] set = [...]`` is one change. An arm without
a change is an A/A arm, whose difference from the baseline should be nothing but noise.

An arm must differ from the baseline in its own settings only. Other differences are confounds, and are refused by name:

===========  ===========================================================================================
word         what must be equal
===========  ===========================================================================================
changes      the arm has one change: settings that could each be an arm of their own are several changes
tokens       tokens of the whole run
FLOPs        FLOP of the whole run within 1 %, if the arm says ``equal = "flops"`` in place of tokens
warm-up      tokens after which the learning rate has its peak
decay        tokens at which the learning rate begins and ends to fall
mixture      sources and their weights, and the tokens at which they change
data         content of the corpora
tokenizer    tokenizer of the corpora, because nats per token depend on it
evaluation   the settings of evaluations, because they are the yardstick
===========  ===========================================================================================

Settings that an arm changes alone are its change: ``schedule.warmup`` may alter the warm-up. ``differ = ["tokens"]``
permits a difference, and the report says so.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import combinations, pairwise
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt, Strict, ValidationError

from opsd.ledger.ledger import repeated_share
from opsd.rundir import RUN_NAME
from opsd.trainer import counts
from opsd.trainer.config import Config, ConfigError, complete, locate, read, sentence
from opsd.trainer.model_settings import Section
from opsd.trainer.settings import EvaluationSettings

# What the runs of a study cost, from the files that each has left. Pure.
#
# A cell holds its devices from the start of a job, or of a launcher on this machine, until that ends. As in Slurm's
# accounting, a job that is preempted ends with the signal that tells it so. Those hours are all paid for. Some of them
# bring nothing:
#
# ===========  =========================================================================================================
# preempted    from a start after the first until its first step, and from the last step before it until that start
#              ended
# recomputed   in steps that had been done before
# failures     between two generations of one start: a rank died or hung
# ===========  =========================================================================================================


Record = Mapping[str, Any]
LEAST: Final = 0.005
"""GPU-hours below this are shown as 0.00, or left out."""


@dataclass(frozen=True, slots=True)
class Cost:
    """GPU-hours in all, and those of them that brought nothing. Each rank counts as a GPU where there are none."""

    gpu_hours: float = 0.0
    preempted: float = 0.0
    recomputed: float = 0.0
    failures: float = 0.0

    @property
    def lost(self) -> float:
        """The hours that brought nothing."""
        return self.preempted + self.recomputed + self.failures


def sum_of(costs: Iterable[Cost]) -> Cost:
    """Their sum."""
    costs = list(costs)
    return Cost(*(sum(getattr(cost, field.name) for cost in costs) for field in fields(Cost)))


def cost_line(cost: Cost) -> str:
    """The cost in words."""
    parts = [
        f"{hours:,.2f} {what}"
        for hours, what in (
            (cost.preempted, "to preemptions"), (cost.recomputed, "to recomputed steps"), (cost.failures, "to failures")
        )
        if hours >= LEAST
    ]  # fmt: skip
    lost = f", of which {', '.join(parts)} were lost" if parts else ""
    return f"{cost.gpu_hours:,.2f} GPU-hours{lost}"


@dataclass(slots=True)
class _Generation:
    """The ranks between two restarts; times in epoch seconds. ``first`` is the begin of its first step."""

    began: float
    gpus: int
    ended: float
    first: float | None = None
    last: float | None = None


def cost_of(
    events: Sequence[Record], metrics: Sequence[Record], starts: Sequence[float], ends: Sequence[float] = ()
) -> Cost:
    """The cost of a run from its records, which are in the order of time.

    ``starts`` and ``ends`` are the epoch seconds at which it got its devices and gave them back. Without starts each
    generation is one. A start whose end is not known ended with its last record.
    """
    generations = _generations(events, metrics)
    if not generations:
        return Cost()
    began = [generation.began for generation in generations]
    starts = sorted({*starts, began[0]}) if starts and min(starts) > began[0] else sorted(starts) or began
    spans: dict[int, list[_Generation]] = {}
    for generation in generations:
        spans.setdefault(bisect_right(starts, generation.began) - 1, []).append(generation)
    hours = preempted = failures = 0.0
    for number, (at, span) in enumerate(spans.items()):
        gpus, following = span[-1].gpus, starts[at + 1] if at + 1 < len(starts) else math.inf
        known = [end for end in ends if starts[at] <= end <= following]
        ended = min(known) if known else max(generation.ended for generation in span)
        hours += gpus * (ended - starts[at])
        if number:
            preempted += gpus * ((span[0].ended if span[0].first is None else span[0].first) - starts[at])
        if number < len(spans) - 1 and span[-1].last is not None:
            preempted += gpus * max(0.0, ended - span[-1].last)
        failures += sum(gpus * _gap(before, after) for before, after in pairwise(span))
    return Cost(hours / 3600, preempted / 3600, _recomputed(metrics, generations) / 3600, failures / 3600)


def _generations(events: Sequence[Record], metrics: Sequence[Record]) -> list[_Generation]:
    found: dict[int, _Generation] = {}
    for event in events:
        t, number = float(event["t"]), int(event["generation"])
        if event["event"] == "generation_started" and number not in found:
            found[number] = _Generation(t, int(event.get("gpus") or event.get("world_size") or 0), t)
        elif number in found:
            found[number].ended = max(found[number].ended, t)
    for line in metrics:
        if (own := found.get(int(line["generation"]))) is not None:
            t = float(line["t"])
            own.first = t - float(line["step_s"]) if own.first is None else own.first
            own.last, own.ended = t, max(own.ended, t)
    return sorted(found.values(), key=lambda generation: generation.began)


def _gap(before: _Generation, after: _Generation) -> float:
    """Seconds without a step between two generations of a start."""
    from_ = before.began if before.last is None else before.last
    return max(0.0, (after.ended if after.first is None else after.first) - from_)


def _recomputed(metrics: Sequence[Record], generations: Sequence[_Generation]) -> float:
    """GPU-seconds in steps that had been done before."""
    began = [generation.began for generation in generations]
    highest, seconds = -1, 0.0
    for line in metrics:
        gpus = generations[max(0, bisect_right(began, float(line["t"])) - 1)].gpus
        seconds += gpus * float(line["step_s"]) * repeated_share(line, highest)
        highest = max(highest, int(line["step"]))
    return seconds


BASELINE: Final = "baseline"
"""The name of the baseline among the arms."""
SAME_FLOPS: Final = 0.01
"""Relative difference up to which FLOPs count as equal."""
LOSS: Final = "loss"
"""The metric that every run has: the mean of the last tenth of the training losses."""
PLACES: Final = frozenset({"run.folder", "data.shards", "data.fallback"})
"""Settings that say where files are. Runs are the same if the files are."""
_RESERVED: Final = {"run.seed": "the seeds of a study are its seeds", "run.folder": "each run has its own folder"}
_DATA: Final = ("data.shards", "data.fallback", "data.mixture", "data.stages", "data.skip")
_OWN: Final[Mapping[str, tuple[str, ...]]] = {
    "warm-up": ("schedule.",),
    "decay": ("schedule.",),
    "mixture": _DATA,
    "data": _DATA,
}
"""Settings whose change is this difference, if the arm changes nothing else."""
_HIGHER: Final = ("accuracy", "accuracy_norm", "accuracy_raw", "acc", "acc_norm", "exact_match", "f1")

_MOST_SEEDS: Final = 10_000


def _overrides(value: object) -> object:
    if not (isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)):
        raise ValueError('give a list of settings, for instance ["optimizer.lr=1e-3"]')
    return value


def _seeds(value: object) -> object:
    listed = isinstance(value, list | tuple)
    given: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
    if not given or not all(type(each) is int and each >= 1 - listed for each in given):
        raise ValueError("give the number of seeds, from 1 on, or a list of seeds from 0 on")
    if (len(given) if listed else given[0]) > _MOST_SEEDS:
        raise ValueError(f"a study has {_MOST_SEEDS:,} seeds at most")
    return value


Overrides = Annotated[tuple[str, ...], Strict(False), BeforeValidator(_overrides)]
Word = Literal["changes", "tokens", "FLOPs", "warm-up", "decay", "mixture", "data", "tokenizer", "evaluation"]
_Settings = TypeVar("_Settings", bound=Section)


class StudyError(ValueError):
    """The study cannot be used; the message is one sentence that says what to do."""


class ArmSettings(Section):
    """``[arm.NAME]``."""

    set: Overrides = ()
    """Overrides of the baseline, as of ``opsd train --set``: one change."""
    equal: Literal["tokens", "flops"] = "tokens"
    """The quantity that the arm and the baseline have the same amount of."""
    differ: Annotated[tuple[Word, ...], Strict(False)] = ()
    """Differences from the baseline that are permitted."""


class StudySettings(Section):
    """The study file without its arms."""

    baseline: str
    set: Overrides = ()
    seeds: Annotated[int | Annotated[tuple[int, ...], Strict(False)], BeforeValidator(_seeds)]
    metric: str = LOSS
    higher_is_better: bool | None = None
    alpha: float = Field(0.01, gt=0, lt=1)
    margin: PositiveFloat | None = None
    budget_gpu_hours: NonNegativeFloat | None = None
    looks: PositiveInt = 1
    main_run: str | None = None
    """Folder of the run that the study is for. Its report and the pages of agents show what the study costs."""


@dataclass(frozen=True, slots=True)
class Arm:
    """An arm with the settings of its runs; their seed is that of the file they come from."""

    name: str
    settings: ArmSettings
    config: Config


@dataclass(frozen=True)
class Study:
    """A study file: ``arms`` has the baseline first."""

    path: Path
    settings: StudySettings
    source: Path
    arms: tuple[Arm, ...]

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds; a number of them is that many from 1 on."""
        seeds = self.settings.seeds
        return tuple(range(1, seeds + 1)) if isinstance(seeds, int) else seeds

    @property
    def baseline(self) -> Arm:
        """The arm that all others are compared with."""
        return self.arms[0]

    @property
    def main_run(self) -> Path | None:
        """Its folder; a relative one is below that of the study file."""
        return self.path.parent / self.settings.main_run if self.settings.main_run else None

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger value of the metric is better."""
        told = self.settings.higher_is_better
        return told if told is not None else is_higher_better(self.settings.metric)

    @cached_property
    def identity(self) -> str:
        """Identifies the baseline as its file has it, whatever the study sets in all runs."""
        return digest_of(_leaves(complete(read(self.source), self.source, ["data.shards=unread"], {})))

    def with_changes(self, overrides: Sequence[str]) -> Config:
        """The baseline of the study with ``overrides``. Raises ConfigError."""
        return complete(read(self.source), self.source, [*self.settings.set, *overrides], {})


def is_higher_better(metric: str) -> bool:
    """Whether a larger value is better, as far as the name of the metric tells."""
    return metric.endswith(_HIGHER)


def read_study(path: Path) -> Study:
    """Read a study file and check that its arms can be compared. Raises StudyError."""
    try:
        raw = read(path)
        arms = raw.pop("arm", {})
        settings = _validated(StudySettings, raw, path)
        try:
            source = locate(_beside(path, settings.baseline))
        except ConfigError as error:
            raise StudyError(f"{path}: baseline: {error}") from error
        if not isinstance(arms, dict):
            raise StudyError(f'{path}: an arm is a section, for instance [arm.nope] set = ["model.nope_every=4"]')
        told = {name: _validated(ArmSettings, each, f"{path}: arm.{name}") for name, each in arms.items()}
        if problem := _problem(settings, told):
            raise StudyError(f"{path}: {problem}")
    except ConfigError as error:
        raise StudyError(str(error)) from error
    study = Study(path, settings, source, ())
    found = []
    for name, arm in {BASELINE: ArmSettings(), **told}.items():
        try:
            found.append(Arm(name, arm, study.with_changes(arm.set)))
        except ConfigError as error:
            where = f"arm.{name}" if arm.set else "set"
            raise StudyError(f"{path}: {where}: {str(error).removeprefix('--set ')}") from error
    study = replace(study, arms=tuple(found))
    for each in study.arms:
        try:
            _contents(each.config)
        except StudyError as error:
            where = "" if each.name == BASELINE else "arm."
            raise StudyError(f"{path}: {where}{each.name}: {error}") from error
    if problem := _metric_problem(settings.metric, study.baseline.config.evaluation):
        raise StudyError(f"{path}: {problem}")
    if problems := list(confounds(study)):
        raise StudyError(f"{path}: {'; '.join(problems)}")
    return study


def _beside(path: Path, source: str) -> str:
    """``source``, a path relative to the folder of the study file if it is there."""
    near = path.parent / source
    return str(near) if source.endswith(".toml") and near.is_file() else source


def _validated(model: type[_Settings], raw: object, where: object) -> _Settings:
    """Raises StudyError."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        details = error.errors(include_url=False)
        first = next((each for each in details if each["type"] == "extra_forbidden"), details[0])
        raise StudyError(f"{where}: {sentence(first, model)}") from None


def _problem(settings: StudySettings, arms: Mapping[str, ArmSettings]) -> str | None:
    """What is inconsistent in the file, in one sentence."""
    for name in arms:
        if name == BASELINE or not RUN_NAME.fullmatch(name):
            return f"arm.{name}: call it something other than baseline, of letters, digits, dots and dashes"
    if isinstance(settings.seeds, tuple) and len(set(settings.seeds)) < len(settings.seeds):
        return "seeds has the same seed twice, and a seed counts once"
    sets = {"set": settings.set, **{f"arm.{name}.set": arm.set for name, arm in arms.items()}}
    for where, overrides in sets.items():
        if taken := next((key for key in map(key_of, overrides) if key in _RESERVED), None):
            return f"{where} has {taken}, but {_RESERVED[taken]}; remove it"
    return None


def _metric_problem(metric: str, evaluation: EvaluationSettings) -> str | None:
    """Why no run will have the ``metric``, in one sentence; results of a harness have names of its own."""
    if metric == LOSS or evaluation.harness:
        return None
    names = [f"{name}_{result}" for name in evaluation.perplexity for result in ("loss", "bits_per_byte")]
    names += [f"{name}_accuracy{kind}" for name in evaluation.cloze for kind in ("", "_norm", "_raw")]
    names += [f"{name}_mc_accuracy" for name in evaluation.multiple_choice]
    if metric in names:
        return None
    near = difflib.get_close_matches(metric, [LOSS, *names], n=1, cutoff=0)
    return f"metric {metric} is not among {', '.join([LOSS, *names])}; did you mean {near[0]}?"


def key_of(override: str) -> str:
    """``section.key`` of an override."""
    return override.partition("=")[0].strip()


def _leaves(config: Config, *, exclude_defaults: bool = False) -> dict[str, Any]:
    """The settings by ``section.key``, without places."""
    sections = config.model_dump(mode="json", exclude_defaults=exclude_defaults)
    found = {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}
    return {key: value for key, value in found.items() if key not in PLACES}


def digest_of(value: object) -> str:
    """Identifies ``value``, which JSON can have."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()


def identity_of(config: Config) -> dict[str, Any]:
    """What decides the outcome of a run, as far as settings and data do. Raises StudyError.

    Settings at their default are left out, so that a later release with new settings goes on with the same cells.
    """
    return {**_leaves(config, exclude_defaults=True), "data": _contents(config)}


def _contents(config: Config) -> dict[str, list[str]]:
    """By source, the digests of its tokens and of its tokenizer. Raises StudyError."""
    from opsd.trainer.data.shards import DataError, find_index  # needs numpy

    data, found = config.data, {}
    for source in data.sources:
        fallback = Path(data.fallback, source) if data.fallback else None
        try:
            index = find_index(Path(data.shards, source), fallback)
        except DataError as error:
            raise StudyError(str(error)) from error
        found[source] = [digest_of(index.digest), index.tokenizer.checksum]
    return found


def facts_of(config: Config) -> dict[Word, Any]:
    """What must be equal between an arm and the baseline, by its word. Raises StudyError."""
    data, schedule, contents = config.data, config.schedule, _contents(config)

    def tokens(step: int) -> int:
        return data.tokens(data.position(step + 1))

    ends = {"wsd": (schedule.decay_start, schedule.decay_end), "cosine": (schedule.decay_end,)}
    stages = [(tokens(stage.start - 1), stage.weights, stage.long_documents) for stage in data.stages]
    return {
        "tokens": tokens(config.run.steps),
        "FLOPs": data.flops(config.run.steps, lambda sequence: counts.flops_per_token(config.model, sequence)),
        "warm-up": tokens(schedule.warmup),
        "decay": [tokens(step) for step in ends.get(schedule.kind, schedule.milestones)],
        "mixture": [stages, [(tokens(first - 1), tokens(last)) for first, last in data.skip]],
        "data": {source: told[0] for source, told in contents.items()},
        "tokenizer": sorted({told[1] for told in contents.values()}),
        "evaluation": config.evaluation.model_dump(),
    }


def confounds(study: Study) -> Iterator[str]:
    """Why arms cannot be compared with the baseline, one sentence for each arm that cannot. Raises StudyError."""
    before = facts_of(study.baseline.config)
    for arm in study.arms[1:]:
        if problem := _confound(study, arm, before):
            yield f"arm {arm.name}: {problem}"
    changed = [arm for arm in study.arms[1:] if arm.settings.set]
    for one, other in combinations(changed, 2):
        if one.config == other.config:
            yield f"arm {other.name} has the settings of arm {one.name}; remove one of them"


def _confound(study: Study, arm: Arm, before: Mapping[Word, Any]) -> str | None:
    keys = list(dict.fromkeys(map(key_of, arm.settings.set)))
    changed = changes(study.baseline.config, arm.config)
    if idle := [key for key in keys if key not in changed]:
        return f"{idle[0]} is what the baseline has; remove it"
    if found := _differences(arm, before, keys):
        named = ", ".join(f"{word} ({told})" for word, told in found.items())
        words = ", ".join(f'"{word}"' for word in found)
        return f"{named} would differ from the baseline too; keep it equal, or permit it with differ = [{words}]"
    if "changes" in arm.settings.differ:
        return None
    if (apart := _separable(study, arm, keys, before)) is not None:
        others = " and ".join(key for key in keys if key != apart)
        return f'{apart} and {others} are two changes; make two arms, or permit it with differ = ["changes"]'
    return None


def changes(baseline: Config, config: Config) -> dict[str, tuple[Any, Any]]:
    """Settings that differ, with both values. Places count here: other corpora may lie there."""
    one, other = ({**_leaves(each), **_places(each)} for each in (baseline, config))
    return {key: (one[key], other[key]) for key in one if one[key] != other[key]}


def _places(config: Config) -> dict[str, str]:
    return {"data.shards": config.data.shards, "data.fallback": config.data.fallback}


def _differences(arm: Arm, before: Mapping[Word, Any], keys: Sequence[str]) -> dict[Word, str]:
    """What differs beyond the arm's own settings and what it permits, with both values."""
    after, found = facts_of(arm.config), dict[Word, str]()
    exempt = {*arm.settings.differ, "FLOPs" if arm.settings.equal == "tokens" else "tokens"}
    for word, value in after.items():
        own = _OWN.get(word)
        if word in exempt or (own and all(key.startswith(own) for key in keys)):
            continue
        same = value == before[word]
        if word == "FLOPs":
            same = abs(value / before[word] - 1) <= SAME_FLOPS
        if not same:
            found[word] = f"{_shown(before[word])} and {_shown(value)}"
    return found


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    text = f"{value:,}" if isinstance(value, int) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _separable(study: Study, arm: Arm, keys: Sequence[str], before: Mapping[Word, Any]) -> str | None:
    """A setting that could be an arm of its own, and so could the others without it; None if there is none.

    Settings that need each other are one change: those that the trainer refuses one without the other, or a batch with
    the number of steps that keeps the tokens.
    """
    for key in keys if len(keys) > 1 else ():
        alone = [each for each in arm.settings.set if key_of(each) == key]
        others = [each for each in arm.settings.set if key_of(each) != key]
        if all(_stands(study, arm, part, before) for part in (alone, others)):
            return key
    return None


def _stands(study: Study, arm: Arm, overrides: Sequence[str], before: Mapping[Word, Any]) -> bool:
    """Whether an arm of these overrides could be compared."""
    try:
        config = study.with_changes(overrides)
        return not _differences(replace(arm, config=config), before, [*map(key_of, overrides)])
    except (ConfigError, StudyError):
        return False
