"""The detection benchmark: its shares count what they say, and a healthy node is healthy."""

from __future__ import annotations

import pytest

from opsd.bench.detect import PREDICTIONS, false_alarms, score
from opsd.runbooks import RUNBOOKS
from opsd.scenarios.verdict import Hit, ScenarioResult


def test_shares_are_of_incidents_and_not_of_scenarios() -> None:
    """Three found of four, one false alarm, one wrong culprit."""
    results = [
        ScenarioResult((Hit("gpu_xid", 1.0, True), Hit("gpu_xid", 4.0, False)), ("gpu_lost",), (), ("late",)),
        ScenarioResult((Hit("straggler", 30.0, True),), (), ("loss_spike",), ("false alarm",)),
        ScenarioResult((), (), (), ()),
    ]
    result = score(results)
    assert (result["precision"], result["recall"]) == (0.75, 0.75)
    assert result["culprit_accuracy"] == pytest.approx(2 / 3)
    assert (result["scenarios"], result["flawed"]) == (3, 2)
    assert result["latency_s"] == {"gpu_xid": 2.5, "straggler": 30.0}
    assert result["worst_latency_s"]["gpu_xid"] == 4.0


def test_predictions_have_shares_of_their_own() -> None:
    """Two failures foreseen of three, and one foretold that did not come; what is no prediction does not count."""
    results = [
        ScenarioResult((Hit("fan_failing", 60.0, True), Hit("gpu_lost", 1.0, True)), ("nvme_failing",), (), ()),
        ScenarioResult((Hit("gpu_ecc_trend", 60.0, True),), ("straggler",), ("nic_degrading", "loss_nan"), ()),
    ]
    result = score(results)
    assert result["prediction_precision"] == result["prediction_recall"] == pytest.approx(2 / 3)


def test_what_is_called_a_prediction_is_a_kind() -> None:
    """A kind that is renamed would leave the score in silence."""
    assert {runbook.kind for runbook in RUNBOOKS} >= PREDICTIONS


def test_a_quarter_of_an_hour_without_a_fault_has_no_incident() -> None:
    """With an evaluation and a planned restart in it."""
    assert false_alarms(seed=1, hours=0.25) == []
