"""The loss of a run has become NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from opsd.collectors.base import RankFact, StepFact
from opsd.runbooks.base import Action, Cost, Culprit, Finding, Incident, Severity, View
from opsd.runbooks.lib.remedies import RunRunbook, notice
from opsd.runbooks.lib.runs import (
    leaders,
    rank_of,
    ranks_of,
    run_finding,
    run_of,
    run_recovered,
    supervised,
    world_size,
)
from opsd.runbooks.lib.signals import counted, integer, text

BACK_STEPS = 5
"""Steps with a finite loss after which the run has recovered; one skipped batch is not enough."""


def _first_bad(steps: Sequence[StepFact]) -> int | None:
    """The first of the steps without a finite loss if the last two have none; None if they have, or never had one.

    A trainer may skip one bad batch by itself, and one that reports no loss at all is not broken.
    """
    finite = next((index for index, step in enumerate(steps) if math.isfinite(step.loss)), None)
    if finite is None or any(math.isfinite(step.loss) for step in steps[-2:]):
        return None
    return next(step.step for step in steps[finite:] if not math.isfinite(step.loss))


def _bad_ranks(view: View, run: str, generation: int, step: int) -> tuple[list[RankFact], list[RankFact]]:
    """The ranks of the generation whose loss at ``step`` is no number, and those where it is one."""
    bad, good = list[RankFact](), list[RankFact]()
    for rank in ranks_of(view, run):
        record = next((s for s in rank.steps if s.step == step), None)
        if record is not None and rank.generation == generation:
            (good if math.isfinite(record.loss) else bad).append(rank)
    return bad, good


def _detect(view: View) -> Iterator[Finding]:
    for leader in leaders(view):
        candidates = [rank for rank in ranks_of(view, leader.run) if rank.generation == leader.generation]
        firsts = [(step, rank.rank, rank) for rank in candidates if (step := _first_bad(rank.steps)) is not None]
        if firsts:
            step, _, rank = min(firsts, key=lambda first: first[:2])
            yield _finding(view, leader, step, rank)


def _finding(view: View, leader: RankFact, step: int, first: RankFact) -> Finding:
    bad, good = _bad_ranks(view, leader.run, leader.generation, step)
    before, committed = [s for s in first.steps if s.step < step][-3:], leader.committed_step
    culprit = Culprit("unknown", view.node, detail="data, learning rate or hardware: a replay tells")
    if len(bad) == 1 and good:
        culprit = Culprit("gpu", view.node, bad[0].gpu, bad[0].rank, "only this rank's loss is no number")
    wasted = max(0, leader.steps[-1].step - step + 1)
    world = counted(world_size(view, leader.run), "GPU")
    finding = run_finding(
        view, leader,
        f"the loss of step {step} is no number on {len(bad)} of {len(bad) + len(good)} ranks here",
        f"the losses before were {', '.join(f'{s.loss:.4g}' for s in before)}",
        f"the gradient norms before were {', '.join(f'{s.grad_norm:.4g}' for s in before)}",
        f"the newest checkpoint is of step {committed}" if committed is not None else "",
        key=f"{leader.run}/step {step}",
        severity=Severity.CRITICAL,
        summary=f"the loss of {leader.run} is no number since step {step}",
        culprit=culprit,
        confidence=0.8 if culprit.component == "gpu" else 0.5,
        cost=Cost(1.0, text=f"{wasted} steps on {world} were for nothing"),
        step=step,
        committed=-1 if committed is None else committed,
    )  # fmt: skip
    return replace(finding, data={**finding.data, "rank": first.rank})


def _remedy(incident: Incident, view: View) -> Sequence[Action]:
    """Replay from before the first bad step: passing it speaks for hardware, failing again for data or the program."""
    data, why = incident.data, incident.summary
    run, supervisor = text(data, "run"), run_of(view, text(data, "run"))
    replayable = 0 <= integer(data, "committed") < integer(data, "step")
    if replayable and supervisor is not None and supervised(view, run):
        args: dict[str, object] = {"control": supervisor.control, "reason": f"replay: {why}"}
        return (
            Action("restart_generation", target=run, args=args, reason=f"{why}; replay to tell hardware from data"),
        )
    advice = "there is no checkpoint from before it" if not replayable else "no opsd launcher is there to replay it"
    return (notice(run, incident, f"; {advice}"),)


def _healed(incident: Incident, view: View) -> bool | None:
    """True once the run is past the step with finite losses, or has ended as planned."""
    data, step = incident.data, integer(incident.data, "step")
    if (rank := rank_of(view, text(data, "run"), integer(data, "rank"))) is None:
        return run_recovered(incident, view) or None
    last = rank.steps[-BACK_STEPS:]
    return len(last) == BACK_STEPS and last[0].step > step and all(math.isfinite(s.loss) for s in last)


RUNBOOK = RunRunbook(
    first=("opsd checkpoint list FOLDER",), detect=_detect, remedy=_remedy, healed=_healed, verify_s=900.0
)
