"""The verdicts of a study, their cost, the seeds that an effect needs, and the promotion of an arm."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from opsd import durable
from opsd.ablate.cells import ORIGIN, Found, cell_dict, cost_of_all, metric_of, read_origin, to_toml
from opsd.ablate.study import BASELINE, LOSS, Cost, Study, StudyError, changes, facts_of
from opsd.ablate.verdict import Verdict, judge, paired_spread, seeds_needed
from opsd.ledger.ledger import PLAN, read_lines, read_plan
from opsd.plan.forecast import BadPlan, Planned
from opsd.trainer.config import ConfigError, complete, read

PROMOTIONS: Final = "promotions.jsonl"
"""Beside the study files: one line for each promotion, which makes other studies of the same baseline stale."""
POWER: Final = 0.8


@dataclass(frozen=True, slots=True)
class Compared:
    """An arm beside the baseline. ``flops`` and ``tokens`` are its own over the baseline's."""

    verdict: Verdict
    changed: tuple[str, ...]
    equal: str
    differ: tuple[str, ...]
    tokens: float
    flops: float


@dataclass(frozen=True, slots=True)
class Report:
    """The results of a study. ``stale`` says why its baseline is no longer the newest, "" if it is."""

    study: Study
    arms: tuple[Compared, ...]
    found: tuple[Found, ...]
    look: int
    stale: str
    origin: Mapping[str, Any]
    planned_gpu_hours: float | None = None
    """Of the main run, if its plan is known."""

    @property
    def complete(self) -> bool:
        """Whether every cell has a value, or has failed."""
        return all(metric_of(each, self.study.settings.metric) is not None for each in self.found)

    @property
    def doubts(self) -> list[str]:
        """What speaks against the verdicts beside their own reasons, a sentence each."""
        told = [self.stale] if self.stale else []
        if dirty := self.origin.get("dirty"):
            told.append(f"uncommitted changes in {', '.join(dirty)}")
        if not self.origin.get("libraries") and any(each.state != "new" for each in self.found):
            told.append(f"{ORIGIN} is missing: nothing tells whether all cells had the same code and libraries")
        refused = {each.cell.name: each.reason for each in self.found if each.state == "refused"}
        told += [f"cell {name} does not count: {reason}" for name, reason in refused.items()]
        return told + [
            f"the cost of cell {each.cell.name} is not whole: {each.unread}" for each in self.found if each.unread
        ]

    @property
    def unit(self) -> str:
        """Of the effects."""
        metric = self.study.settings.metric
        return "nats per token" if metric == LOSS or metric.endswith("_loss") else metric

    @property
    def cost(self) -> Cost:
        """Of all cells."""
        return cost_of_all(self.found)


def make_report(
    study: Study, found: Sequence[Found], root: Path, look: int = 1, main_run: Path | None = None
) -> Report:
    """Judge the finished cells of a study.

    ``main_run`` is the folder of the main run, by default that of the study file. If it is given here, it must have a
    plan. Raises StudyError.
    """
    values = values_of(study, found)
    settings = study.settings
    try:
        verdicts = judge(
            values[BASELINE], {name: each for name, each in values.items() if name != BASELINE}, alpha=settings.alpha,
            margin=settings.margin, higher_is_better=study.higher_is_better, look=look, looks=settings.looks,
        )  # fmt: skip
    except ValueError as error:
        raise StudyError(f"{error}; see looks in {study.path}") from error
    before = facts_of(study.baseline.config)
    arms = []
    for arm, verdict in zip(study.arms[1:], verdicts, strict=True):
        after = facts_of(arm.config)
        shares = (after[word] / before[word] for word in ("tokens", "FLOPs"))
        changed = tuple(changes(study.baseline.config, arm.config))
        arms.append(Compared(verdict, changed, arm.settings.equal, arm.settings.differ, *shares))
    hours, beside = None, main_run or study.main_run
    if beside is not None:
        hours = planned_hours(beside) if main_run is not None or (beside / PLAN).exists() else None
    return Report(study, tuple(arms), tuple(found), look, stale(study), read_origin(root), hours)


def planned_hours(folder: Path) -> float:
    """The GPU-hours of the run whose plan is in ``folder``. Raises StudyError."""
    try:
        plan = Planned.parse(read_plan(folder))
    except OSError as error:
        raise StudyError(f"{folder} has no plan ({error.strerror}); `opsd plan --run {folder}` makes one") from error
    except BadPlan as error:
        raise StudyError(str(error)) from error
    return plan.gpu_hours


def values_of(study: Study, found: Sequence[Found]) -> dict[str, dict[int, float]]:
    """The metric of each arm by seed, of all arms, also those without a value."""
    values: dict[str, dict[int, float]] = {arm.name: {} for arm in study.arms}
    for each in found:
        if (value := metric_of(each, study.settings.metric)) is not None:
            values[each.cell.arm.name][each.cell.seed] = value
    return values


def as_dict(report: Report) -> dict[str, Any]:
    """For ``--json``; the keys are part of the interface (docs/ablations.md). Numbers that are not finite are null."""
    settings = report.study.settings
    return {
        "baseline": settings.baseline,
        "metric": settings.metric,
        "unit": report.unit,
        "higher_is_better": report.study.higher_is_better,
        "alpha": settings.alpha,
        "margin": settings.margin,
        "look": report.look,
        "looks": settings.looks,
        "seeds": list(report.study.seeds),
        "arms": [_arm_dict(arm) for arm in report.arms],
        "cells": [cell_dict(each) for each in report.found],
        "cost_gpu_hours": report.cost.gpu_hours,
        "lost_gpu_hours": report.cost.lost,
        "preempted_gpu_hours": report.cost.preempted,
        "recomputed_gpu_hours": report.cost.recomputed,
        "planned_gpu_hours": report.planned_gpu_hours,
        "complete": report.complete,
        "stale": report.stale or None,
        "libraries": report.origin.get("libraries"),
        "commit": report.origin.get("commit"),
        "dirty": report.origin.get("dirty"),
    }


def _arm_dict(arm: Compared) -> dict[str, Any]:
    told = asdict(arm.verdict) | {
        "changed": arm.changed, "equal": arm.equal, "differ": arm.differ, "tokens": arm.tokens, "flops": arm.flops
    }  # fmt: skip
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in told.items()
    }


@dataclass(frozen=True, slots=True)
class Power:
    """How many ``seeds`` an effect needs, None if more than 1,000, and what all arms with them would cost.

    ``runs`` of the baseline have told the spread, 0 if it was given. ``gpu_hours`` is None if no cost is known.
    """

    effect: float
    runs: int
    spread: float
    seeds: int | None
    gpu_hours: float | None


def power_of(
    study: Study, found: Sequence[Found], effect: float, *, spread: float | None = None, seed_hours: float | None = None
) -> Power:
    """From the spread between the baseline's own runs, with its upper bound, or from a ``spread`` that is known.

    ``seed_hours`` are the GPU-hours of one seed of all arms. By default they are those of the baseline's runs, in
    proportion to the FLOPs of the arms. Raises StudyError.
    """
    done = [each for each in found if each.cell.arm.name == BASELINE and each.state == "done"]
    if spread is None:
        try:
            spread = paired_spread(list(values_of(study, done)[BASELINE].values())).high
        except ValueError as error:
            raise StudyError(f"{error}; `opsd ablate pilot` runs the baseline alone") from error
        runs = len(done)
    else:
        runs = 0
    arms = len(study.arms) - 1
    settings = study.settings
    seeds = seeds_needed(effect, spread, alpha=settings.alpha, power=POWER, arms=max(1, arms), looks=settings.looks)
    if seed_hours is None and done:
        flops = [float(facts_of(arm.config)["FLOPs"]) for arm in study.arms]
        seed_hours = cost_of_all(done).gpu_hours / len(done) * sum(flops) / flops[0]
    return Power(effect, runs, spread, seeds, None if seed_hours is None else (seeds or 0) * seed_hours)


def over_budget(study: Study, power: Power) -> str:
    """Why the answer cannot be had for the budget, "" if it can."""
    budget = study.settings.budget_gpu_hours
    if power.seeds is None:
        return f"no 1,000 seeds show an effect of {power.effect:g} in this noise; look for a larger one"
    if budget is None or power.gpu_hours is None or power.gpu_hours <= budget:
        return ""
    return (
        f"an effect of {power.effect:g} needs {power.seeds} seeds and {power.gpu_hours:,.2f} GPU-hours, more than "
        f"budget_gpu_hours {budget:g}: look for a larger effect, or with fewer arms"
    )


def promote(report: Report, name: str, out: Path, reason: str) -> None:
    """Write the baseline with the change of an arm to ``out``, with its evidence. Raises StudyError, OSError.

    The settings that the study has for all its runs are left out: they make its runs small.
    """
    study = report.study
    found = next((arm for arm in report.arms if arm.verdict.name == name), None)
    if found is None:
        names = ", ".join(arm.verdict.name for arm in report.arms) or "none"
        raise StudyError(f"{study.path} has no arm {name}; its arms are {names}")
    if found.verdict.verdict != "better" and not reason:
        raise StudyError(
            f"arm {name} is {found.verdict.verdict}, not better; --reason says why it is promoted all the same"
        )
    if out.exists():
        raise StudyError(f"{out} exists; name another file with --out")
    arm = next(arm for arm in study.arms if arm.name == name)
    evidence = _evidence(report, found, reason)
    durable.create(out, _baseline(study, arm.settings.set, evidence).encode())
    told = {"t": time.time(), "baseline": study.identity, "arm": name, "new": str(out.absolute()), "evidence": evidence}
    try:
        durable.append(study.path.absolute().parent / PROMOTIONS, json.dumps(told).encode() + b"\n")
    except OSError:
        out.unlink()  # a baseline of which no study would know
        raise


def _evidence(report: Report, arm: Compared, reason: str) -> list[str]:
    verdict, settings = arm.verdict, report.study.settings
    told = [
        f"Promoted from arm {verdict.name} of {report.study.path.name}, {time.strftime('%Y-%m-%d')}.",
        f"Verdict {verdict.verdict} on {settings.metric} at alpha {settings.alpha:g}: effect {verdict.effect:+.6g} "
        f"({verdict.low:+.6g} to {verdict.high:+.6g}) {report.unit}, {verdict.pairs} pairs.",
        f"Baseline {settings.baseline} at equal {arm.equal}; FLOPs {arm.flops:.3f} of its own.",
        *[f"Measured with set = {json.dumps(list(settings.set))}, which is not in this file."] * bool(settings.set),
        f"Cost of the study: {report.cost.gpu_hours:.2f} GPU-hours.",
    ]
    return told + [f"Reason: {reason}"] * bool(reason)


def _baseline(study: Study, overrides: Sequence[str], evidence: Sequence[str]) -> str:
    """The settings of the baseline's file with ``overrides``, as TOML. Raises StudyError."""
    raw = read(study.source)
    unread = [] if "shards" in raw.get("data", {}) else ["data.shards=unread"]
    try:
        config = complete(read(study.source), study.source, [*unread, *overrides], {})
    except ConfigError as error:
        raise StudyError(f"the change does not stand without what {study.path} sets: {error}") from error
    given = {"run": {"folder": None}, "data": {} if "shards" in raw.get("data", {}) else {"shards": None}}
    return to_toml(config, evidence, given)


def stale(study: Study) -> str:
    """The promotion that has replaced the study's baseline, or why that is not known; "" if none has."""
    path, unread = study.path.absolute().parent / PROMOTIONS, list[str]()
    try:
        read = list(read_lines(path, ("baseline", "arm", "new"), unread=unread))
    except FileNotFoundError:
        return ""
    except OSError as error:
        unread, read = [f"{path} cannot be read: {error.strerror}"], []
    lines = [line for line in read if line["baseline"] == study.identity]
    if unread and not lines:
        return f"{unread[0]}: nothing tells whether a promotion has replaced this baseline"
    if not lines:
        return ""
    return f"{lines[-1]['new']} has replaced this baseline, by a promotion of arm {lines[-1]['arm']}: compare with it"
