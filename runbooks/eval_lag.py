"""A run's evaluations are behind those of a reference run at equal tokens: it trains, and learns too little."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from opsd.collectors.base import Event, RankFact
from opsd.runbooks.base import Culprit, Finding, Incident, View
from opsd.runbooks.lib.remedies import RunRunbook
from opsd.runbooks.lib.runs import gpu_hours, live_leaders, run_events, run_finding, run_over
from opsd.runbooks.lib.signals import integer, number, text

HISTORY_S = 7 * 86_400.0
IN_A_ROW = 3
"""So many evaluations must agree that a result is behind: a single one is noisy."""

LEAST_LAG = {"loss": 0.02, "score": 0.05}
"""Shares of the reference from which a result is behind. Losses are smooth; scores of benchmarks scatter by some
percent from checkpoint to checkpoint (Madaan et al. 2024, "Quantifying variance in evaluation benchmarks")."""

LOSSES = ("loss", "bits_per_byte", "perplexity", "ppl")
"""Endings of the names of results of which less is better; of all others more is."""


@dataclass(frozen=True, slots=True)
class _Lag:
    """A result that has been behind in the last evaluations, by at least ``share``, steadily ``since`` a step."""

    name: str
    ours: float
    reference: float
    share: float
    since: int
    step: int


def _is_loss(name: str) -> bool:
    return name.lower().endswith(LOSSES)


def _compared(event: Event) -> dict[str, tuple[float, float]]:
    """Our result and the reference's by name, where there are both."""
    ours, reference = event.data.get("results"), event.data.get("reference")
    if not (isinstance(ours, Mapping) and isinstance(reference, Mapping)):
        return {}
    pairs = ((name, number(ours, name), number(reference, name)) for name in ours.keys() & reference.keys())
    return {
        name: (mine, theirs) for name, mine, theirs in pairs if mine is not None and theirs is not None and theirs > 0
    }


def _share(name: str, ours: float, reference: float) -> float:
    """By which share of the reference a result is behind; negative if it is ahead."""
    return (ours - reference if _is_loss(name) else reference - ours) / reference


def _behind(name: str, ours: float, reference: float) -> bool:
    return _share(name, ours, reference) > LEAST_LAG["loss" if _is_loss(name) else "score"]


def _evaluations(view: View, run: str) -> list[tuple[int, dict[str, tuple[float, float]]]]:
    """Step and compared results of each evaluation that has any, by step; of a step evaluated again, the last."""
    found = {integer(event.data, "step"): _compared(event) for event in run_events(view, "evaluation", run, HISTORY_S)}
    return [(step, found[step]) for step in sorted(found) if found[step]]


def _lags(view: View, run: str) -> list[_Lag]:
    """The results that are behind in each of the last evaluations, the furthest first."""
    evaluations = _evaluations(view, run)
    if len(evaluations) < IN_A_ROW:
        return []
    lags = []
    step, newest = evaluations[-1]
    for name, (ours, reference) in newest.items():
        past = [(at, results[name]) for at, results in evaluations if name in results]
        if len(past) < IN_A_ROW or not all(_behind(name, *pair) for _, pair in past[-IN_A_ROW:]):
            continue
        good = max((at for at, pair in past if not _behind(name, *pair)), default=-1)
        since = min(at for at, _ in past if at > good)
        share = min(_share(name, *pair) for _, pair in past[-IN_A_ROW:])
        lags.append(_Lag(name, ours, reference, share, since, step))
    return sorted(lags, key=lambda lag: (-lag.share, lag.name))


def _detect(view: View) -> Iterator[Finding]:
    for leader in live_leaders(view):
        if lags := _lags(view, leader.run):
            yield _finding(view, leader, lags)


def _finding(view: View, leader: RankFact, lags: Sequence[_Lag]) -> Finding:
    worst, since = lags[0], min(lag.since for lag in lags)
    compared = len(_evaluations(view, leader.run)[-1][1])
    hours = gpu_hours(leader, since)
    facts = [
        f"{lag.name} is {lag.ours:.4g} at step {lag.step}, the reference had {lag.reference:.4g} at equal tokens; "
        f"behind since step {lag.since}"
        for lag in lags
    ]
    facts.append(f"{len(lags)} of {compared} results are behind")
    everything = len(lags) == compared
    detail = "model, settings or data are not those of the reference" if everything else "the data of these tasks"
    return run_finding(
        view, leader, *facts,
        source="events of the run",
        summary=f"{leader.run} is {worst.share:.0%} behind its reference run in {worst.name}",
        culprit=Culprit("user code" if everything else "data", detail=detail),
        confidence=0.6 if everything else 0.5,
        cost=f"{hours:.1f} GPU-hours of training since it fell behind",
        step=worst.step,
        names=[lag.name for lag in lags],
    )  # fmt: skip


def _healed(incident: Incident, view: View) -> bool | None:
    """True once a later evaluation is not behind in any result that was, or the run has ended as planned."""
    run, names = text(incident.data, "run"), incident.data.get("names")
    later = [results for step, results in _evaluations(view, run) if step > integer(incident.data, "step")]
    if later and isinstance(names, list | tuple):
        again = {name: pair for name, pair in later[-1].items() if name in names}
        if again and not any(_behind(name, *pair) for name, pair in again.items()):
            return True
    return run_over(incident, view)


RUNBOOK = RunRunbook(first=("opsd checkpoint list FOLDER",), detect=_detect, healed=_healed, verify_s=3600.0)
