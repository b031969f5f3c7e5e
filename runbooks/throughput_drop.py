"""A run trains slower than it did: the diagnosis goes through data, then network, then kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median

from opsd.attribution import STOPPED
from opsd.collectors.base import RankFact
from opsd.runbooks.base import Cause, Culprit, Evidence, Finding, Incident, Severity, View
from opsd.runbooks.gpu_throttle import unfit_gpus
from opsd.runbooks.lib.losses import (
    BUT_LAST_S,
    PAST_S,
    PAUSES,
    RECENT_S,
    SETTLED_STEPS,
    lost,
    past_rate,
    rate,
    recent_steps,
    settled,
)
from opsd.runbooks.lib.remedies import RunRunbook
from opsd.runbooks.lib.runs import live_leaders, live_ranks, run_finding, run_recovered
from opsd.runbooks.lib.signals import number, text
from opsd.runbooks.straggler import stragglers_of

DROP, BACK, COSTLY = 0.1, 0.05, 0.2

_CAUSES = {"data": "data", "collective": "network"}
"""The resource of a phase; all other phases are kernels."""

SLOW_LINKS = ("nic_failed", "nic_degrading", "pcie_error", "pcie_degraded", "nvlink_errors")
"""Incidents of links: each makes the collectives of all ranks slower, however healthy the others are."""


@dataclass(frozen=True, slots=True)
class _Growth:
    """By how many seconds per step a rank has become slower, split by what it spends them on."""

    rank: RankFact
    data: float
    network: float
    kernels: float

    @property
    def total(self) -> float:
        return self.data + self.network + self.kernels

    def __str__(self) -> str:
        return f"data {self.data:+.3f} s, collectives {self.network:+.3f} s, computing {self.kernels:+.3f} s"


def _drop(view: View, rank: RankFact) -> tuple[float, float] | None:
    """Tokens per second before and now if the difference is a drop."""
    before = past_rate(view, rank)
    if before is None:
        return None
    now = median(rate(step) for step in recent_steps(rank, view.now))
    return (before, now) if now <= (1 - DROP) * before else None


def _explained(view: View, run: str) -> bool:
    """True if a single rank or GPU is known to hold the run up: then that is the incident, and this its symptom."""
    ranks = live_ranks(view, run)
    stuck = any(rank.process in STOPPED or view.now - rank.changed > RECENT_S for rank in ranks)
    unfit = unfit_gpus(view)
    return stuck or any(rank.gpu in unfit for rank in ranks) or bool(stragglers_of(view, run))


def _detect(view: View) -> Iterator[Finding]:
    for leader in live_leaders(view):
        drop = _drop(view, leader) if leader.phase not in PAUSES else None
        if drop is not None and not _explained(view, leader.run):
            (before, now), share = drop, 1 - drop[1] / drop[0]
            yield run_finding(
                view, leader, f"{now:.0f} tokens/s on rank {leader.rank}, {before:.0f} in the ten minutes before",
                severity=Severity.CRITICAL if share >= COSTLY else Severity.WARNING,
                summary=f"{leader.run} trains {share:.0%} slower than before",
                culprit=Culprit("unknown", view.node),
                confidence=0.3,
                cost=settled(replace(lost(view, leader, share), before=before, now=now)),
                before=before,
            )  # fmt: skip


def _growth(view: View, rank: RankFact) -> _Growth | None:
    """How a rank's steps have grown since the minutes before, None if its phases then are not known."""
    labels = {"run": rank.run, "rank": str(rank.rank)}
    counted = view.select("opsd_rank_step", **labels)
    until = view.now - BUT_LAST_S
    numbers = [value for at, value in counted[0].values(PAST_S) if at <= until] if counted else []
    steps = numbers[-1] - numbers[0] if numbers else 0.0
    if steps <= 0:
        return None
    grown = {"data": 0.0, "network": 0.0, "kernels": 0.0}
    for series in view.select("opsd_rank_phase_seconds_total", **labels):
        phase = series.labels["phase"]
        spent = [value for at, value in series.values(PAST_S) if at <= until]
        if spent and phase not in PAUSES:
            now = median(step.phase_s.get(phase, 0.0) for step in recent_steps(rank, view.now))
            grown[_CAUSES.get(phase, "kernels")] += now - (spent[-1] - spent[0]) / steps
    return _Growth(rank, **grown)


def _diagnose(finding: Finding, view: View) -> Finding:
    """In the order in which a person would look: data, then network, then kernels."""
    ranks = [rank for rank in live_ranks(view, text(finding.data, "run")) if rank.steps]
    growths = [growth for growth in (_growth(view, rank) for rank in ranks) if growth is not None]
    if not growths:
        return finding
    half = 0.5 * max(growth.total for growth in growths)
    late = [growth for growth in growths if growth.data >= half]
    if late:
        culprit = Culprit("data", view.node, detail="every loader" if len(late) > 1 else "its loader is slow")
        if len(late) == 1 and len(growths) > 1:
            culprit = replace(culprit, gpu=late[0].rank.gpu, rank=late[0].rank.rank)
    elif min(growth.network for growth in growths) >= half:
        culprit = Culprit("network", view.node, detail="collectives: the network, or a slow rank of another node")
    elif median(growth.kernels for growth in growths) >= half:
        culprit = Culprit("node", view.node, detail="computing takes longer on every rank")
    else:
        return finding
    worst = max(growths, key=lambda growth: growth.total)
    said = Evidence(f"per step on rank {worst.rank.rank}: {worst}", "rank pages", view.wall)
    return replace(finding, culprit=culprit, confidence=0.7, evidence=(*finding.evidence, said))


def _healed(incident: Incident, view: View) -> bool | None:
    """True once the run is within 5 % of what it did before, or has ended as planned."""
    run, before = text(incident.data, "run"), number(incident.data, "before") or 0.0
    leader = next((rank for rank in live_leaders(view) if rank.run == run), None)
    if leader is None:
        return run_recovered(incident, view) or None
    recent = recent_steps(leader, view.now)
    if leader.steps_reported < SETTLED_STEPS or view.now - recent[-1].end > RECENT_S:
        return False
    return median(rate(step) for step in recent) >= (1 - BACK) * before


def _of_collectives(symptom: Incident, _cause: Incident) -> bool:
    return symptom.culprit.component == "network"


RUNBOOK = RunRunbook(
    first=("opsd diagnose --job JOB", "opsd diagnose"),
    detect=_detect,
    diagnose=_diagnose,
    healed=_healed,
    open_after_s=20.0,
    clear_after_s=20.0,
    verify_s=900.0,
    causes=(
        Cause("gpu_throttle", "gpu", lag_s=60.0),
        Cause("pcie_degraded", "gpu", lag_s=60.0),
        Cause("straggler", "run", lag_s=60.0),
        Cause("ib_link", "node", lag_s=60.0),
        *(Cause(kind, "node", lag_s=60.0, fits=_of_collectives) for kind in SLOW_LINKS),
        Cause("storage_slow", "node", lag_s=60.0),
        Cause("clock_unstable", "node", lag_s=60.0),
    ),
)
