"""The gradient norm of a run has grown to many times its own past."""

from __future__ import annotations

import math
from collections.abc import Iterator

from opsd.collectors.base import RankFact
from opsd.runbooks.base import Culprit, Finding, Incident, View
from opsd.runbooks.lib.remedies import RunRunbook
from opsd.runbooks.lib.runs import healed_by, live_leaders, run_finding
from opsd.runbooks.lib.signals import number
from opsd.runbooks.loss_spike import MOST, RECENT, began_anew, past_level

FACTOR, OUTLIER = 10.0, 10.0
"""An explosion is ten times the past level, and as many robust standard deviations away from it."""

CALM_FACTOR = 3.0


def _detect(view: View) -> Iterator[Finding]:
    for leader in live_leaders(view):
        norms = [step.grad_norm for step in leader.steps[-RECENT:]]
        if (past := past_level(view, leader, "opsd_rank_grad_norm")) is None:
            continue
        middle, noise = past
        limit = max(FACTOR * middle, middle + OUTLIER * noise)
        if sum(norm > limit or math.isinf(norm) for norm in norms) >= MOST and not began_anew(view, leader):
            yield run_finding(
                view, leader,
                f"gradient norms of the last steps: {', '.join(f'{norm:.4g}' for norm in norms)}",
                f"the median of the last ten minutes is {middle:.4g}",
                f"losses of the same steps: {', '.join(f'{step.loss:.4g}' for step in leader.steps[-RECENT:])}",
                summary=f"the gradient norm of {leader.run} is {max(norms) / middle:.0f} times what it was",
                culprit=Culprit("unknown", view.node, detail="learning rate, data, or an unstable layer"),
                confidence=0.5,
                cost="clipped steps hardly move the model; unclipped ones may ruin it",
                before=middle,
            )  # fmt: skip


@healed_by
def _healed(incident: Incident, _view: View, leader: RankFact) -> bool:
    """True once the norm is back near its level."""
    before, norms = number(incident.data, "before"), [step.grad_norm for step in leader.steps[-RECENT:]]
    return before is not None and len(norms) == RECENT and all(norm < CALM_FACTOR * before for norm in norms)


RUNBOOK = RunRunbook(
    first=("opsd report RUN_FOLDER --text",), detect=_detect, healed=_healed, clear_after_s=10.0, verify_s=1800.0
)
