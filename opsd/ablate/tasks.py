"""Early signals of a study: tasks, and which of them say something.

Whether a task is a good early signal, from the scores of checkpoints.

The four criteria are those of FineTasks (Hugging Face 2024): monotonic, low noise, not random, stable order.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike

from opsd.ablate.cells import EVALUATIONS, LARGEST, Found
from opsd.ablate.study import BASELINE, StudyError, is_higher_better
from opsd.ablate.verdict import Floats, t_limit
from opsd.ledger.ledger import open_run_file, read_lines


@dataclass(frozen=True)
class Probe:
    """What the baseline's checkpoints say of one task. ``low`` and ``high`` are the interval of ``above_chance``."""

    monotonic: float
    signal_to_noise: float
    above_chance: float
    low: float
    high: float

    @property
    def random(self) -> bool:
        """Whether the last score may be chance."""
        return self.low <= 0 <= self.high


def probe(steps: Sequence[int], scores: Sequence[Sequence[float]], *, chance: float, alpha: float = 0.05) -> Probe:
    """Judge a task by ``scores``: one row for each seed, one column for each of the checkpoints ``steps``.

    ``chance`` is the score of guessing. Raises ValueError if rows and steps differ in length, or a score is not finite.
    """
    table = np.asarray(scores, np.float64)
    if table.ndim != 2 or table.shape[1] != len(steps) or len(steps) < 2 or not np.isfinite(table).all():
        raise ValueError(f"a probe needs two checkpoints, and of each seed a finite score at all {len(steps)}")
    above, low, high = above_chance(table[:, -1], chance, alpha=alpha)
    return Probe(monotonic(steps, table.mean(axis=0)), signal_to_noise(table), above, low, high)


def monotonic(steps: ArrayLike, scores: ArrayLike) -> float:
    """The rank correlation of step and score (Spearman 1904), from -1 to 1; 0 if the score is constant."""
    first, second = _ranks(steps), _ranks(scores)
    first, second = first - first.mean(), second - second.mean()
    scale = math.sqrt(float(first @ first) * float(second @ second))
    return float(first @ second) / scale if scale else 0.0


def signal_to_noise(scores: Floats) -> float:
    """The rise of the mean score from first to last checkpoint, over its standard deviation between seeds.

    Rows are seeds. Not a number with one seed; infinite if all seeds agree.
    """
    if len(scores) < 2:
        return math.nan
    rise = float(scores[:, -1].mean() - scores[:, 0].mean())
    noise = math.sqrt(float(scores.var(axis=0, ddof=1).mean()))
    return rise / noise if noise else math.copysign(math.inf, rise) if rise else 0.0


def above_chance(scores: Sequence[float] | Floats, chance: float, *, alpha: float = 0.05) -> tuple[float, float, float]:
    """How far the mean of the seeds' scores is above ``chance``, and its interval at 1 - alpha (Student's t)."""
    values = np.asarray(scores, np.float64) - chance
    mean = float(values.mean())
    if len(values) < 2:
        return mean, -math.inf, math.inf
    half = float(values.std(ddof=1) / math.sqrt(len(values)) * t_limit(alpha / 2, len(values) - 1))
    return mean, mean - half, mean + half


def stable_order(scores: Mapping[str, Sequence[float]]) -> float:
    """How well arms keep their order: the mean of Kendall's tau between consecutive checkpoints, from -1 to 1.

    ``scores`` has the same checkpoints for each arm. Raises ValueError with fewer than two arms or checkpoints.
    """
    table = np.array(list(scores.values()), np.float64).T
    if table.ndim != 2 or min(table.shape) < 2:
        raise ValueError("an order needs two arms and two checkpoints")
    return float(_tau(table[:-1], table[1:]).mean())


def order_predicted(
    early: Mapping[str, Mapping[int, float]],
    late: Mapping[str, Mapping[int, float]],
    *,
    alpha: float = 0.05,
    draws: int = 2000,
) -> tuple[float, float, float]:
    """Whether the arms' order early in training was their order at the end: Kendall's tau with its interval.

    Mappings are from arm to seed to score. The interval is a percentile bootstrap over the seeds that all arms have at
    both times (Efron 1979); it is from -1 to 1 with fewer than three. It is of these arms, not of arms in general.
    Raises ValueError with fewer than two arms or without a shared seed.
    """
    arms = sorted(early.keys() & late.keys())
    sides = [[side[arm] for arm in arms] for side in (early, late)]
    shared = sorted(set.intersection(*({*each} for side in sides for each in side))) if arms else []
    if len(arms) < 2 or not shared:
        raise ValueError("an order needs two arms with a seed that all of them have, early and late")
    first, last = (np.array([[each[seed] for seed in shared] for each in side], np.float64) for side in sides)
    tau = float(_tau(first.mean(axis=1), last.mean(axis=1)))
    if len(shared) < 3:
        return tau, -1.0, 1.0
    drawn = np.random.default_rng(0).integers(0, len(shared), (draws, len(shared)))
    again = _tau(first[:, drawn].mean(axis=-1).T, last[:, drawn].mean(axis=-1).T)
    low, high = np.quantile(again, [alpha / 2, 1 - alpha / 2])
    return tau, float(low), float(high)


def _ranks(values: ArrayLike) -> Floats:
    """The rank of each value from 1; equal values share the mean of their ranks."""
    _, which, counts = np.unique(np.asarray(values, np.float64), return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[which])


def _tau(first: Floats, second: Floats) -> Floats:
    """Kendall's tau-b (Kendall 1945) between orders; arms are the last axis. 0 if one side has no order."""
    one, other = np.triu_indices(first.shape[-1], 1)
    a, b = np.sign(first[..., one] - first[..., other]), np.sign(second[..., one] - second[..., other])
    scale = np.sqrt((a != 0).sum(axis=-1) * (b != 0).sum(axis=-1))
    return np.asarray(np.where(scale > 0, (a * b).sum(axis=-1) / np.maximum(scale, 1), 0.0))


# The evaluations of a study as probes: of each task, whether its early scores say anything, from all checkpoints.


EARLY: Final = 0.1
"""Share of the tokens at which the order of the arms is compared with that at the end."""
_SCORES: Final = "scores"
"""In the folder of a run: a folder for each checkpoint, with the scores of single items."""

Scores = Mapping[str, Mapping[int, Mapping[float, float]]]
"""By arm, seed and share of the steps: the score of one task."""


@dataclass(frozen=True, slots=True)
class Task:
    """A task as a probe. Numbers that cannot be had are None, and ``reasons`` say why.

    ``order`` is how well arms keep their order between checkpoints. ``predicted`` is Kendall's tau between their order
    at the share ``early`` and at the end, with its interval.
    """

    name: str
    seeds: int
    checkpoints: int
    chance: float | None
    probe: Probe | None
    order: float | None
    early: float | None
    predicted: tuple[float, float, float] | None
    reasons: tuple[str, ...]


def tasks_of(found: Sequence[Found], *, early: float = EARLY) -> list[Task]:
    """Each evaluation of the cells as a probe. Raises StudyError without any."""
    scores = _scores(found)
    if not scores:
        raise StudyError(
            "no cell has an evaluation: set evaluation.cloze, multiple_choice or perplexity, and checkpoint.every, "
            "in the study's set"
        )
    return [_task(name, scores[name], _chance(name, found), early) for name in sorted(scores)]


def _scores(found: Sequence[Found]) -> dict[str, Scores]:
    """By task; of a checkpoint that was evaluated again the newest score."""
    scores: dict[str, Any] = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    for each in found:
        with suppress(OSError):
            for line in read_lines(each.cell.folder / EVALUATIONS, ("step", "results")):
                results = line["results"] if isinstance(line["results"], dict) else {}
                share = round(line["step"] / each.cell.steps, 6)
                for name, score in results.items():
                    if isinstance(score, int | float) and abs(score) < LARGEST:
                        scores[name][each.cell.arm.name][each.cell.seed][share] = float(score)
    return scores


def _chance(name: str, found: Sequence[Found]) -> float | None:
    """The accuracy of guessing, from the items that were scored; None for what is no accuracy, or not known."""
    if not is_higher_better(name):
        return None
    letters = name.endswith("_mc_accuracy")
    stem = name.removesuffix("_mc_accuracy") + "_mc" if letters else name.rpartition("_accuracy")[0]
    for each in found:
        for path in sorted((each.cell.folder / _SCORES).glob(f"step-*/{stem}.jsonl")):
            with suppress(OSError, ValueError, LookupError, TypeError, ZeroDivisionError):
                return fmean(1 / len(item["log_likelihoods"]) for item in _items(path))
    return None


def _items(path: Path) -> list[Any]:
    with open(path, encoding="utf-8", opener=open_run_file) as file:
        return [json.loads(line) for line in file]


def _task(name: str, scores: Scores, chance: float | None, early: float) -> Task:
    sign = 1.0 if is_higher_better(name) else -1.0
    own = scores.get(BASELINE, {})
    shares = _shared(own.values())
    reasons, judged = [], None
    if len(shares) < 2:
        reasons.append(f"the baseline's seeds share {len(shares)} of its checkpoints, and two are needed")
    else:
        rows = [[sign * curve[share] for share in shares] for curve in own.values()]
        judged = probe(range(len(shares)), rows, chance=math.nan if chance is None else chance)
    complete = {arm: {seed: curve for seed, curve in seeds.items() if 1.0 in curve} for arm, seeds in scores.items()}
    complete = {arm: seeds for arm, seeds in complete.items() if seeds}
    common = _shared(curve for seeds in complete.values() for curve in seeds.values())
    order = at = predicted = None
    if len(complete) < 2 or len(common) < 2:
        reasons.append("an order needs two arms that have ended, with two checkpoints in common")
    else:
        order = stable_order({arm: [_mean(seeds, share) for share in common] for arm, seeds in complete.items()})
        at = next((share for share in common if share >= early - 1e-9), common[0])
        sides = ({arm: {seed: curve[share] for seed, curve in seeds.items()} for arm, seeds in complete.items()}
                 for share in (at, 1.0))  # fmt: skip
        try:
            predicted = order_predicted(*sides)
        except ValueError as error:
            reasons.append(str(error))
    return Task(name, len(own), len(shares), chance, judged, order, at, predicted, tuple(reasons))


def _shared(curves: Any) -> list[float]:
    """The shares of the steps that all curves have, in their order."""
    found = [set(curve) for curve in curves]
    return sorted(set.intersection(*found)) if found else []


def _mean(seeds: Mapping[int, Mapping[float, float]], share: float) -> float:
    return fmean(curve[share] for curve in seeds.values())


def task_dict(task: Task) -> dict[str, Any]:
    """For ``--json``. Numbers that are not finite are null."""
    judged, predicted = task.probe, task.predicted or (None, None, None)
    told = {
        "task": task.name, "seeds": task.seeds, "checkpoints": task.checkpoints, "chance": task.chance,
        "monotonic": judged and judged.monotonic, "signal_to_noise": judged and judged.signal_to_noise,
        "above_chance": judged and judged.above_chance, "low": judged and judged.low, "high": judged and judged.high,
        "random": judged.random if judged and task.chance is not None else None,
        "order": task.order, "early": task.early,
        "predicted": predicted[0], "predicted_low": predicted[1], "predicted_high": predicted[2],
        "reasons": list(task.reasons),
    }  # fmt: skip
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in told.items()
    }
