"""The evaluations of a study as probes: of each task, whether its early scores say anything, from all checkpoints."""

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

from opsd.ablate.cells import EVALUATIONS, LARGEST, Found
from opsd.ablate.probes import Probe, order_predicted, probe, stable_order
from opsd.ablate.study import BASELINE, StudyError, is_higher_better
from opsd.ledger.records import open_run_file, read_lines

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
