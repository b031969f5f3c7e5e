"""Losses that are frozen, and runs that begin again under the same id."""

from __future__ import annotations

from dataclasses import replace

import pytest

from opsd.collectors.base import RankFact, StepFact
from opsd.runbooks.loss_plateau import RUNBOOK as PLATEAU
from opsd.runbooks.loss_spike import RUNBOOK as SPIKE
from tests.fakes.facts import rank, steps
from tests.fakes.noise import Tracks

LABELS = {"run": "smol", "rank": "0"}


def trained(losses: list[float], *, norms: bool = True, numbers: list[int] | None = None) -> Tracks:
    """A rank that has done a step a second with these losses; with ``norms`` its gradient norm changes as well."""
    view, numbers = Tracks(1), numbers or list(range(len(losses)))
    loss, step = view.track("opsd_rank_loss", **LABELS), view.track("opsd_rank_step", **LABELS)
    done: list[StepFact] = []
    for number, value in zip(numbers, losses, strict=True):
        view.now += 1.0
        loss.add(view.now, value)
        step.add(view.now, float(number))
        norm = 1.0 + 1e-3 * view.now if norms else float("nan")
        done.append(replace(steps(1, until=view.now, forward=1.0)[0], step=number, loss=value, grad_norm=norm))
    view.ranks = [page(done)]
    return view


def page(done: list[StepFact]) -> RankFact:
    """What the rank's page shows of its steps: the last 64."""
    return rank(0, world_size=1, steps=tuple(done[-64:]), steps_reported=len(done))


def falling(count: int) -> list[float]:
    """A loss that changes with each step."""
    return [3.0 - 1e-3 * number for number in range(count)]


@pytest.mark.parametrize("value", [0.0, 2.25])
@pytest.mark.parametrize("norms", [True, False])
def test_a_frozen_loss_is_found_in_thirty_steps(value: float, norms: bool) -> None:
    """Not after 29 steps; whether the gradient norm is known or not."""
    assert list(PLATEAU.detect(trained(falling(100) + [value] * 29, norms=norms))) == []
    (finding,) = PLATEAU.detect(trained(falling(100) + [value] * 30, norms=norms))
    assert "frozen" in finding.summary and finding.severity == "critical"


def test_a_loss_that_is_zero_from_the_first_step_is_found() -> None:
    """There is nothing to compare it with, and nothing that it could be but wrong."""
    (finding,) = PLATEAU.detect(trained([0.0] * 30, norms=False))
    assert "exactly 0" in finding.summary


def test_a_loss_that_is_only_logged_now_and_then_is_not_frozen() -> None:
    """Some trainers repeat the last loss that they have logged until the next one."""
    losses = [3.0 - 1e-3 * (number // 50) for number in range(400)]
    assert list(PLATEAU.detect(trained(losses, norms=False))) == []


def test_a_loss_nobody_reports_is_not_frozen() -> None:
    """It is nan in each step."""
    assert list(PLATEAU.detect(trained([float("nan")] * 60))) == []


def test_a_run_that_begins_again_has_no_spike() -> None:
    """The id of a run is used again from step 0: a loss like at the first steps is no jump."""
    again = [8.0 - 0.01 * number for number in range(40)]
    view = trained(falling(300) + again, numbers=[*range(300), *range(40)])
    assert list(SPIKE.detect(view)) == []


def test_a_spike_after_a_restart_from_a_checkpoint_is_still_one() -> None:
    """Going back some steps is no new beginning."""
    view = trained(falling(300) + falling(60) + [9.0] * 5, numbers=[*range(300), *range(250, 310), *range(310, 315)])
    assert len(list(SPIKE.detect(view))) == 1
