"""A node is gone: the run's launcher on a peer has lost it, or Slurm no longer reaches the one this agent runs on."""

from __future__ import annotations

from collections.abc import Iterator

from opsd.collectors.base import Event
from opsd.runbooks.base import Cost, Culprit, Finding, Incident, Runbook, Severity, View
from opsd.runbooks.lib.remedies import notify_run
from opsd.runbooks.lib.runs import downtime, job_of, last_step_at, live_ranks, quoted, run_recovered, unsolved_by_run
from opsd.runbooks.lib.signals import counted, latest, number, said, text

STATE, FLAG, REASON = "opsd_slurm_node_state", "opsd_slurm_node_flag", "opsd_slurm_node_reason_info"

SILENT = "not responding"
"""The reason that slurmctld itself gives a node that it sets down after SlurmdTimeout (slurm.conf); any other reason
comes from a person, a health check or a reboot, and says nothing about the network."""


PAST_S, HOLD_S = 600.0, 45.0
"""Slurm must say so for this long: two of its answers and more. One lost ping to slurmd sets the flag, too."""


def _from_launcher(view: View) -> Iterator[Finding]:
    """One incident for one generation of a run, however many nodes it has lost at once."""
    for (run, generation), events in unsolved_by_run(view, "node_lost").items():
        first, nodes = events[0], sorted({text(event.data, "lost") or "a node" for event in events})
        names, began = ", ".join(nodes), first.at - (number(first.data, "silent_s") or 0.0)
        culprit = Culprit("node", nodes[0])
        if len(nodes) > 1:
            culprit = Culprit("network", detail=f"{names} at once: look at what they share, a switch, a rack or power")
        yield Finding(
            key=f"{run}/generation {generation}",
            severity=Severity.CRITICAL,
            summary=f"{run} has lost {names}",
            culprit=culprit,
            confidence=0.9 if len(nodes) == 1 else 0.95,
            evidence=tuple(evidence for event in events for evidence in quoted(event, "launcher", _sentence(event))),
            cost=downtime(view, first, last_step_at(first.data, began)),
            job=job_of(view, run),
            data={"run": run, "generation": generation, "nodes": nodes},
        )


def _sentence(event: Event) -> str:
    silent, why = number(event.data, "silent_s"), text(event.data, "reason")
    heard = f" for {silent:.1f} s" if silent is not None else ""
    return f"nothing heard of {text(event.data, 'lost') or 'a node'}{heard}" + (f": {why}" if why else "")


def _unreached(view: View) -> bool | None:
    """Whether Slurm cannot reach this node; None while Slurm does not answer."""
    down, silent = latest(view, STATE, state="down"), latest(view, FLAG, flag="not_responding")
    if down is None or silent is None:
        return None
    return bool(silent) or (bool(down) and SILENT in _reason(view).lower())


def _since(view: View) -> float:
    """For how many seconds without a break Slurm has had the node as down or silent."""
    bad: dict[float, bool] = {}
    for series in (*view.select(STATE, state="down"), *view.select(FLAG, flag="not_responding")):
        for at, value in series.values(PAST_S):
            bad[at] = bad.get(at, False) or value > 0
    reached = max((at for at, down in bad.items() if not down), default=0.0)
    return view.now - min((at for at, down in bad.items() if down and at > reached), default=view.now)


def _reason(view: View) -> str:
    return next((series.labels["reason"] for series in view.select(REASON) if series.last is not None), "")


def _from_slurm(view: View) -> Iterator[Finding]:
    if not _unreached(view) or _since(view) < HOLD_S:
        return
    ranks, down, reason = live_ranks(view), bool(latest(view, STATE, state="down")), _reason(view)
    costs = "Slurm ends the node's jobs after SlurmdTimeout, 300 s unless slurm.conf says otherwise"
    if down:
        costs = "Slurm has given its jobs up: what they compute here is for nothing"
    yield Finding(
        key=view.node,
        severity=Severity.CRITICAL if down and ranks else Severity.WARNING,
        summary=f"Slurm cannot reach {view.node}, which is up",
        culprit=Culprit("node", view.node, detail="slurmd, or the management network"),
        confidence=0.8,
        evidence=said(
            view, "Slurm",
            f"Slurm has this node as {'down' if down else 'not responding'}" + (f": {reason}" if reason else ""),
            f"opsd runs on it, and so {'do' if len(ranks) != 1 else 'does'} {counted(len(ranks), 'rank')}",
        ),
        cost=Cost(text=costs if ranks else "no rank runs here; the node is missing from the cluster"),
        job=ranks[0].job if ranks else "",
    )  # fmt: skip


def _detect(view: View) -> Iterator[Finding]:
    yield from _from_launcher(view)
    yield from _from_slurm(view)


def _healed(incident: Incident, view: View) -> bool | None:
    """True once the run trains without the lost node, or Slurm reaches this one again."""
    if text(incident.data, "run"):
        return run_recovered(incident, view)
    unreached = _unreached(view)
    return None if unreached is None else not unreached


RUNBOOK = Runbook(
    told_by_runs=True,
    first=("scontrol show node NODE",),
    detect=_detect,
    remedy=notify_run(),
    healed=_healed,
    clear_after_s=10.0,
    verify_s=900.0,
)
