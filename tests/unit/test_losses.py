"""What a slow run loses: one figure for each quantity, and what is measured beats what is modelled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from opsd.agent import lifecycle
from opsd.collectors.base import StepFact
from opsd.runbooks.base import Cost
from opsd.runbooks.lib.losses import FLOPS, TOKENS, followed, lost, lost_by, since_first_growth
from tests.fakes.facts import rank
from tests.fakes.incidents import finding
from tests.fakes.noise import Tracks

LABELS = {"run": "smol", "rank": "0"}
SECONDS = 400
"""How long the run has trained, a step a second."""


def trained(slow_s: int, loss: float, *, job: str = "4242", seconds: int = SECONDS, flops: float = 1.0) -> Tracks:
    """A run that has lost ``loss`` of its tokens per second in the last ``slow_s``; a token costs ``flops`` then."""
    view = Tracks(1)
    tokens, costs, done = view.track(TOKENS, **LABELS), view.track(FLOPS, **LABELS), []
    for number in range(seconds):
        view.now += 1.0
        slow = number >= seconds - slow_s
        trained_tokens = round(100_000 * (1 - loss if slow else 1))
        tokens.add(view.now, float(trained_tokens))
        costs.add(view.now, flops if slow else 1.0)
        done.append(StepFact(number, view.now, 1.0, trained_tokens, 2.5, 1.0, {"forward": 1.0}))
    view.ranks = [rank(0, job=job, steps=tuple(done[-64:]), steps_reported=seconds)]
    return view


@pytest.mark.parametrize(
    ("view", "estimate", "lasting_s", "says"),
    [
        (trained(40, 0.12), 0.34, 40.0, "job 4242 loses 12% (4 GPUs, measured)"),
        (trained(40, 0.12, job=""), 0.34, 40.0, "run smol loses 12% (4 GPUs, measured)"),
        (trained(40, 0.0), 0.15, 40.0, "job 4242 loses less than 1% (4 GPUs, measured)"),
        (trained(3, 0.12), 0.34, 3.0, "job 4242 loses 34% (4 GPUs, estimated)"),
        (trained(40, 0.12, seconds=100), 0.34, 40.0, "job 4242 loses 34% (4 GPUs, estimated)"),
        (trained(400, 0.12), 0.34, 400.0, "job 4242 loses 34% (4 GPUs, estimated)"),
        (trained(40, 0.12, flops=1.2), 0.34, 40.0, "job 4242 loses 34% (4 GPUs, estimated)"),
        (trained(40, 0.12), 0.15, None, "job 4242 loses 12% (4 GPUs, measured)"),
        (trained(400, 0.12), 0.15, None, "job 4242 loses 15% (4 GPUs, estimated)"),
    ],
    ids=[
        "measured", "a run without a job", "it costs nothing", "too few steps since", "too short a past", "no past",
        "tokens cost more", "an unknown beginning", "perhaps it was never faster",
    ],
)  # fmt: skip
def test_what_is_measured_beats_the_estimate(view: Tracks, estimate: float, lasting_s: float | None, says: str) -> None:
    """And an estimate says that it is one."""
    cost = lost(view, view.ranks[0], estimate, lasting_s=lasting_s, counted_s=10.0)
    assert cost.text == says
    assert cost.gpu_seconds == pytest.approx(cost.throughput_ratio * 4 * 10.0)


def test_the_run_is_measured_by_what_was_usual_when_the_fault_began() -> None:
    """Later its past is as slow as its present, and the figure stays; as the run recovers it becomes less."""
    began = trained(40, 0.2)
    cost = lost(began, began.ranks[0], 0.34, lasting_s=40.0)
    for view, says in (
        (trained(400, 0.2), "job 4242 loses 20% (4 GPUs, measured)"),
        (trained(400, 0.06), "job 4242 loses 6% (4 GPUs, measured)"),
    ):
        cost = followed(cost, lost(view, view.ranks[0], 0.34, lasting_s=400.0))
        assert cost.text == says
    other = replace(lost(view, view.ranks[0], 0.34, lasting_s=400.0), whose="job 4243")
    assert followed(cost, other) == other


def test_an_incident_adds_up_what_is_measured() -> None:
    """The share that is shown is the share that is counted."""
    began, later = trained(40, 0.2), trained(400, 0.2)
    incident = lifecycle.opened(finding(cost=lost(began, began.ranks[0], 0.34, lasting_s=40.0)), 1000.0)
    told = lost(later, later.ranks[0], 0.34, lasting_s=400.0)
    after = lifecycle.merged(incident, finding(cost=told), 1002.0)
    assert after.cost.text == "job 4242 loses 20% (4 GPUs, measured)"
    assert after.cost.gpu_seconds == pytest.approx(0.2 * 4 * 2.0)


def test_what_nobody_measures() -> None:
    """Work without a run is estimated, and costs in words stay as they are."""
    assert lost_by("this GPU's work", 0.154, 1, 60.0).text == "this GPU's work loses 15% (1 GPU, estimated)"
    said = Cost(1.0, 8.0, "8 GPUs stood still for 1.0 s")
    assert followed(Cost(), said) == said


def test_a_fault_is_as_old_as_the_first_growth_of_its_counter() -> None:
    """In the window."""
    view = Tracks(1)
    spent = view.track("spent")
    for second in range(100):
        view.now += 1.0
        spent.add(view.now, float(max(0, second - 69)))
    (series,) = view.select("spent")
    assert since_first_growth(series, view.now) == 29.0
