"""Why a run hangs or trains slowly, checked in the usual order: hang, data, network, kernels.

It uses rank pages only, and needs neither an agent nor more history than the steps that a page holds. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from opsd.agent.window import Window
from opsd.attribution import attribute_hang
from opsd.collectors.base import RankFact, Reading, StepFact
from opsd.runbooks.lib.losses import training_seconds
from opsd.runbooks.rank_hang import FACTOR, FLOOR_S, SLOW_PHASE_LIMIT_S, SLOW_PHASES, state_of
from opsd.runbooks.straggler import SLOW, compute_seconds, stragglers_of
from opsd.runbooks.throughput_drop import DROP

LEAST_STEPS = 6
"""Steps that a rank needs before its recent half can be compared with the earlier half."""
COSTLY = 0.1
"""A share of a step above this is reported even if it has not grown."""

HANGS = "does it hang?"
AS_BEFORE = "as fast as before"


@dataclass(frozen=True, slots=True)
class DiagnosisStep:
    """The answer to one question. ``suspect`` is True if the run is slower because of it, None if unknown.

    ``share`` is the part of a step that is spent on it, whether the run is slower or not.
    """

    question: str
    suspect: bool | None
    facts: tuple[str, ...]
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All answers about one run on this node, in the order of the questions, and a conclusion in one sentence."""

    run: str
    job: str
    findings: tuple[DiagnosisStep, ...]
    conclusion: str


@dataclass(frozen=True, slots=True)
class _Spent:
    """Seconds per step that one rank spends in a phase, before and now, and in its whole steps now (medians)."""

    rank: int
    before: float
    now: float
    step_now: float

    @property
    def growth(self) -> float:
        return self.now - self.before

    @property
    def share(self) -> float:
        return self.now / self.step_now if self.step_now else 0.0

    def __str__(self) -> str:
        now = f"{self.now:.3f} s of a step of {self.step_now:.3f} s ({self.share:.0%})"
        return f"rank {self.rank}: {now}, {self.before:.3f} s before"


def diagnose(ranks: Sequence[RankFact], node: str, now: float) -> list[Diagnosis]:
    """One diagnosis for each run with live ranks among ``ranks``; ``now`` is on the monotonic clock of the pages."""
    runs = sorted({rank.run for rank in ranks if rank.live})
    return [_diagnose(run, [rank for rank in ranks if rank.run == run], node, now) for run in runs]


def _diagnose(run: str, ranks: Sequence[RankFact], node: str, now: float) -> Diagnosis:
    ranks = sorted(ranks, key=lambda rank: rank.rank)
    moving, culprit = _moving(ranks, now)
    if moving.suspect:
        return Diagnosis(run, ranks[0].job, (moving,), culprit)
    steady = [rank for rank in ranks if rank.live and len(rank.steps) >= LEAST_STEPS]
    if not steady:
        told = f"too early to tell: no rank has completed {LEAST_STEPS} steps"
        return Diagnosis(run, ranks[0].job, (moving,), told)
    whole = [_spent(rank, training_seconds) for rank in steady]
    total = max(spent.growth for spent in whole)
    slower = total > DROP * max(spent.before for spent in whole)
    data = _phase("data loading", [_spent(rank, _in("data")) for rank in steady], max, total, slower)
    network = _phase("network", [_spent(rank, _in("collective")) for rank in steady], min, total, slower)
    kernels = _kernels(steady, node, now, total, slower)
    findings = (moving, _speed(whole, slower), data, network, kernels)
    return Diagnosis(run, ranks[0].job, findings, _conclusion(findings[2:], slower))


def _moving(ranks: Sequence[RankFact], now: float) -> tuple[DiagnosisStep, str]:
    """Whether any rank makes progress, and which rank blocks the others if none does."""
    states = [state_of(rank, now) for rank in ranks if rank.live or rank.state == "running"]
    facts = tuple(
        f"rank {s.rank}: {s.phase} for {s.stuck_s:.1f} s, process {s.process or 'gone'}, step {s.step}" for s in states
    )
    limit = max(_patience(rank) for rank in ranks)
    if not states or min(state.stuck_s for state in states) < limit:
        return DiagnosisStep(HANGS, False, facts), ""
    found = attribute_hang(states)
    sure = f"{found.confidence:.0%} sure"
    return DiagnosisStep(HANGS, True, facts), f"it hangs: rank {found.rank} holds it up, {found.reason} ({sure})"


def _patience(rank: RankFact) -> float:
    """Seconds that a rank may stay in one phase without hanging, by the runbook's rule."""
    if rank.phase in SLOW_PHASES or not rank.steps:
        return SLOW_PHASE_LIMIT_S
    return max(FLOOR_S, FACTOR * max(step.duration_s for step in rank.steps))


def _in(phase: str) -> Callable[[StepFact], float]:
    return lambda step: step.phase_s.get(phase, 0.0)


def _spent(rank: RankFact, seconds: Callable[[StepFact], float]) -> _Spent:
    half = len(rank.steps) // 2
    before, now = rank.steps[:half], rank.steps[half:]
    return _Spent(
        rank.rank, median(map(seconds, before)), median(map(seconds, now)), median(map(training_seconds, now))
    )


def _speed(whole: Sequence[_Spent], slower: bool) -> DiagnosisStep:
    facts = (f"rank {s.rank}: {s.now:.3f} s a step, {s.before:.3f} s before" for s in whole)
    return DiagnosisStep("is it slower than before?", slower, tuple(facts))


def _phase(
    name: str, spent: Sequence[_Spent], among: Callable[[Sequence[float]], float], total: float, slower: bool
) -> DiagnosisStep:
    """Whether the time is spent in a phase.

    One rank that waits for data is enough (``among`` is max). The network is suspect only if all ranks spend longer in
    collectives (min), as all ranks but the slowest wait there for the slowest.
    """
    grown, share = among([s.growth for s in spent]), among([s.share for s in spent])
    return DiagnosisStep(f"is it {name}?", slower and grown >= 0.5 * total, tuple(map(str, spent)), share)


def _kernels(ranks: Sequence[RankFact], node: str, now: float, total: float, slower: bool) -> DiagnosisStep:
    spent = [_spent(rank, compute_seconds) for rank in ranks]
    window = Window(node)
    window.begin(now, 0.0)
    window.add("ranks", Reading(facts=tuple(ranks)))
    late = stragglers_of(window, ranks[0].run)
    facts = [
        f"rank {s.rank.rank} computes {s.share:.0%} longer than its peers: {s.compute_s:.3f} s, they {s.peers_s:.3f} s"
        for s in late
    ] or [f"no rank computes {SLOW:.0%} longer than its peers"]
    grown = slower and median(s.growth for s in spent) >= 0.5 * total
    return DiagnosisStep("is it kernels?", bool(late) or grown, (*map(str, spent), *facts))


def _conclusion(findings: Sequence[DiagnosisStep], slower: bool) -> str:
    how = "slower than before" if slower else AS_BEFORE
    suspect = next((finding for finding in findings if finding.suspect), None)
    if suspect is None and (costly := max(findings, key=lambda step: step.share)).share >= COSTLY:
        return f"it trains {how}; {costly.share:.0%} of each step is spent in {_name(costly)}"
    if suspect is None:
        return f"it trains {how}; neither data, network nor kernels stand out"
    if not slower:
        return f"it trains {how}; a rank is slower than its peers in {_name(suspect)}"
    return f"it trains {how}; most of what it loses is in {_name(suspect)}"


def _name(step: DiagnosisStep) -> str:
    return step.question.removeprefix("is it ").removesuffix("?")


def to_rank(document: Mapping[str, Any]) -> RankFact:
    """The rank that the API's ``/api/v1/ranks`` describes. Raises TypeError for anything else."""
    steps = tuple(
        StepFact(**{**step, "loss": _number(step["loss"]), "grad_norm": _number(step["grad_norm"])})
        for step in document["steps"]
    )
    workers = tuple((pid, role) for pid, role in document["workers"])
    return RankFact(
        **{**document, "steps": steps, "workers": workers, "worker_process": tuple(document["worker_process"])}
    )


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
