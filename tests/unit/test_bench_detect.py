"""The detection benchmark: its shares count what they say, and a healthy node is healthy."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.bench.detect import PREDICTIONS, false_alarms, fetched_sets, highest_rate, interval, score, shares
from opsd.bench.outside import FOLDER
from opsd.bench.outside.fetched import BATCHES, DUMPS
from opsd.bench.timelines import FAULTS, timeline
from opsd.runbooks import RUNBOOKS
from opsd.scenarios.model import Scenario, ScenarioError
from opsd.scenarios.player import Hit, ScenarioResult, judge, play


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


def test_an_interval_holds_the_share_and_is_narrow_only_with_many_cases() -> None:
    """Values of Wilson's interval and of exact Poisson limits from tables."""
    assert interval(0, 0) == (0.0, 1.0)
    assert interval(10, 10) == pytest.approx((0.722, 1.0), abs=1e-3)
    assert interval(50, 100) == pytest.approx((0.404, 0.596), abs=1e-3)
    assert highest_rate(0, 1.0) == pytest.approx(3.69, rel=0.02)
    assert highest_rate(4, 2.0) == pytest.approx(10.24 / 2, rel=0.02)


def test_shares_of_outside_material_count_what_was_missed_and_what_was_too_much() -> None:
    """A hang that was judged afterwards has no latency."""
    results = [
        ScenarioResult((Hit("collective_hang", None, True),), (), (), ()),
        ScenarioResult((Hit("disk_errors", 2.0, False),), ("oom_kill",), ("gpu_xid",), ()),
    ]
    found = shares(results)
    assert (found["cases"], found["expected"], found["found"], found["unexpected"]) == (2, 3, 2, 1)
    assert (found["precision"], found["recall"], found["culprit_accuracy"]) == pytest.approx((2 / 3, 2 / 3, 0.5))
    assert (found["latency_s"], found["worst_latency_s"]) == (2.0, 2.0)


@given(seed=st.integers(0, 10**9), faults=st.integers(0, 3))
def test_a_random_timeline_is_the_same_each_time_and_has_its_faults(seed: int, faults: int) -> None:
    """Each fault has a GPU of its own, and what disturbs the agent ends again."""
    scenario = timeline(seed, faults=faults, seconds=400.0)
    assert scenario == timeline(seed, faults=faults, seconds=400.0)
    assert len(scenario.expect) == min(faults, scenario.gpus)
    assert len({wanted.culprit.get("gpu", wanted.culprit.get("rank")) for wanted in scenario.expect}) == len(
        scenario.expect
    )
    gone = sum(len(moment.blind) + len(moment.hung) for moment in scenario.at)
    assert gone == sum(len(moment.sighted) for moment in scenario.at)


def test_every_fault_of_the_generator_can_be_played_and_is_found() -> None:
    """Each alone on a node without disturbances."""
    for fault in FAULTS:
        scenario = Scenario.model_validate({
            "title": fault.kind, "duration": 120, "allow": fault.allow, "at": [{"t": 20} | fault.begin(1)],
            "expect": [{"kind": fault.kind, "culprit": fault.culprit(1), "at": 20, "within": fault.within}],
        })  # fmt: skip
        result = judge(scenario, play(scenario, "observe"))
        assert ([hit.culprit_right for hit in result.hits], result.false_alarms) == ([True], ()), fault.kind


def test_an_incident_outlives_a_restart_of_the_agent_in_a_scenario() -> None:
    """What the journal remembers is not opened a second time."""
    scenario = Scenario.model_validate({
        "title": "a restart", "duration": 60,
        "at": [{"t": 10, "gpu": 1, "set": {"DCGM_FI_DEV_ROW_REMAP_FAILURE": 1}}, {"t": 30, "agent_restart": True}],
    })  # fmt: skip
    incidents = play(scenario, "observe").incidents.values()
    assert [incident.kind for incident in incidents] == ["gpu_row_remap"]


def test_sets_that_were_fetched_are_judged_where_they_lie(tmp_path: Path) -> None:
    """Dumps of hangs, and batch times: a worker that is always slow is no false alarm, one that is for a moment is."""
    with pytest.raises(ScenarioError, match="no clone that is known"):
        fetched_sets(tmp_path)
    (tmp_path / DUMPS).parent.mkdir(parents=True)
    (tmp_path / DUMPS).symlink_to(FOLDER / "fr_traces")
    (tmp_path / BATCHES).mkdir(parents=True)
    for name, slow in {"job_1_norm": range(60), "job_2_norm": range(30, 37)}.items():
        rows = [f"0,{w},25,{t},{200 if w == 2 and t in slow else 100 + w}" for t in range(60) for w in range(8)]
        (tmp_path / BATCHES / f"{name}.csv").write_text("\n".join([",worker,gpu,time,batch_time_norm", *rows]) + "\n")
    found = fetched_sets(tmp_path)
    assert (found["nvidia-resiliency-ext"]["cases"], found["nvidia-resiliency-ext"]["culprit_accuracy"]) == (4, 1.0)
    always, moment = (found["clusterdata"][name] for name in ("job_1_norm", "job_2_norm"))
    assert always == {"windows": 55, "announced": 55, "false": 0}
    assert moment["announced"] == moment["false"] > 0
