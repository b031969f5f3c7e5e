"""The gradient norm of a run has grown to many times its own past."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from opsd.collectors.base import RankFact
from opsd.runbooks.base import Culprit, Finding, Incident, Runbook, View
from opsd.runbooks.lib.remedies import notify_run
from opsd.runbooks.lib.runs import finding_of_run, leaders, rank_of, recovered
from opsd.runbooks.lib.signals import integer, number, text
from opsd.runbooks.loss_spike import MOST, RECENT, began_anew, past_level

FACTOR, OUTLIER = 10.0, 10.0
"""An explosion is ten times the past level, and as many robust standard deviations away from it."""

CALM_FACTOR = 3.0


def _detect(view: View) -> Iterator[Finding]:
    for leader in leaders(view):
        norms = [step.grad_norm for step in leader.steps[-RECENT:]]
        if not leader.live or (past := past_level(view, leader, "opsd_rank_grad_norm")) is None:
            continue
        middle, noise = past
        limit = max(FACTOR * middle, middle + OUTLIER * noise)
        if sum(norm > limit or math.isinf(norm) for norm in norms) >= MOST and not began_anew(view, leader):
            yield _finding(view, leader, norms, middle)


def _finding(view: View, leader: RankFact, norms: Sequence[float], before: float) -> Finding:
    losses = [step.loss for step in leader.steps[-RECENT:]]
    facts = [
        f"gradient norms of the last steps: {', '.join(f'{norm:.4g}' for norm in norms)}",
        f"the median of the last ten minutes is {before:.4g}",
        f"losses of the same steps: {', '.join(f'{loss:.4g}' for loss in losses)}",
    ]
    return finding_of_run(
        view,
        leader,
        *facts,
        kind="gradient_explosion",
        summary=f"the gradient norm of {leader.run} is {max(norms) / before:.0f} times what it was",
        culprit=Culprit("unknown", view.node, detail="learning rate, data, or an unstable layer"),
        confidence=0.5,
        cost="clipped steps hardly move the model; unclipped ones may ruin it",
        before=before,
    )


def _healed(incident: Incident, view: View) -> bool | None:
    """True once the norm is back near its level, or a later generation trains, or the run has ended as planned."""
    data = incident.data
    run, before = text(data, "run"), number(data, "before")
    over = recovered(view, run, integer(data, "generation"))
    leader = rank_of(view, run, integer(data, "rank"))
    if over is not False or leader is None or before is None:
        return over
    norms = [step.grad_norm for step in leader.steps[-RECENT:]]
    return len(norms) == RECENT and all(norm < CALM_FACTOR * before for norm in norms)


RUNBOOK = Runbook(
    kind="gradient_explosion",
    first=("opsd report RUN_FOLDER --text",),
    detect=_detect,
    remedy=notify_run(),
    healed=_healed,
    proved_by="run",
    needs=("ranks",),
    clear_after_s=10.0,
    verify_s=1800.0,
)
