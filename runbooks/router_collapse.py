"""The routers of a mixture of experts send most tokens to a few experts, or tokens are dropped because of it."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Final

from opsd.collectors.base import RankFact
from opsd.runbooks.base import Culprit, Finding, Incident, View
from opsd.runbooks.lib.remedies import RunRunbook
from opsd.runbooks.lib.runs import healed_by, live_leaders, run_finding

LOAD, LIMIT, ENTROPY, DROPPED_SHARE = (
    f"opsd_rank_router_{name}_ratio" for name in ("load", "load_limit", "entropy", "dropped")
)
RECENT_S, LEAST_SAMPLES = 30.0, 15
"""The values of so many seconds are judged by their median: one odd batch is not a collapse."""

SETTLED_STEPS: Final = 200
"""The routers of a new model are uneven before they have learned anything."""

COLLAPSED, RECOVERED = 0.6, 0.4
"""How far the fullest expert is on the way from an even load to all tokens."""

DROPPED, FEW_DROPPED = 0.25, 0.1
"""Share of the tokens that find no place at an expert."""


def _recent(view: View, leader: RankFact, metric: str) -> float | None:
    """The median of the last seconds, None if there are too few."""
    labels = {"run": leader.run, "rank": str(leader.rank)}
    values = [value for series in view.select(metric, **labels) for _, value in series.values(RECENT_S)]
    return median(values) if len(values) >= LEAST_SAMPLES else None


def _collapse(view: View, leader: RankFact) -> float | None:
    """0 with even loads, 1 with all tokens at the same experts; None if the trainer reports none."""
    load, limit = (_recent(view, leader, metric) for metric in (LOAD, LIMIT))
    return None if load is None or limit is None or limit <= 1 else (load - 1) / (limit - 1)


def _detect(view: View) -> Iterator[Finding]:
    for leader in live_leaders(view):
        if leader.steps[-1].step < SETTLED_STEPS:
            continue
        collapse, dropped = _collapse(view, leader), _recent(view, leader, DROPPED_SHARE)
        if (collapse is not None and collapse > COLLAPSED) or (dropped is not None and dropped > DROPPED):
            yield _finding(view, leader, collapse or 0.0, dropped or 0.0)


def _finding(view: View, leader: RankFact, collapse: float, dropped: float) -> Finding:
    load, limit = (_recent(view, leader, metric) or 0.0 for metric in (LOAD, LIMIT))
    entropy = _recent(view, leader, ENTROPY)
    what = "send most tokens to few experts" if collapse > COLLAPSED else f"drop {dropped:.0%} of the tokens"
    return run_finding(
        view, leader,
        f"the fullest expert of the worst layer has {load:.3g} times the mean load, of at most {limit:.3g}",
        f"{dropped:.1%} of the tokens are dropped",
        f"the entropy of the routers' weights is {entropy:.0%} of the greatest" if entropy is not None else "",
        f"step {leader.steps[-1].step}, loss {leader.steps[-1].loss:.4g}",
        summary=f"the routers of {leader.run} {what}",
        culprit=Culprit("unknown", view.node, detail="balance loss, learning rate, or data of one kind"),
        confidence=0.7,
        cost="experts without tokens learn nothing, and the ranks that have them wait for the others",
    )  # fmt: skip


@healed_by
def _healed(_incident: Incident, view: View, leader: RankFact) -> bool | None:
    """True once loads are even again."""
    collapse, dropped = _collapse(view, leader), _recent(view, leader, DROPPED_SHARE)
    if collapse is None and dropped is None:
        return None
    return (collapse or 0.0) < RECOVERED and (dropped or 0.0) < FEW_DROPPED


RUNBOOK = RunRunbook(
    first=("opsd report RUN_FOLDER --text",), detect=_detect, healed=_healed, clear_after_s=10.0, verify_s=1800.0
)
