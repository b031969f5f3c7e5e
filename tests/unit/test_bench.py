"""The benchmarks: their figures count what they say."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from opsd.bench import BenchError
from opsd.bench.data import _alone, _growing, _ours
from opsd.bench.detect import (
    FAULTS,
    PREDICTIONS,
    false_alarms,
    fetched_sets,
    highest_rate,
    interval,
    score,
    shares,
    timeline,
)
from opsd.bench.outside import BATCHES, DUMPS, FOLDER
from opsd.bench.wording import REASONS, run
from opsd.commands.bench import bench
from opsd.runbooks import RUNBOOKS
from opsd.scenarios.model import Scenario, ScenarioError
from opsd.scenarios.player import Hit, ScenarioResult, judge, play
from opsd.simulate.faults import Effect
from tests.fakes.tree import ROOT
from tests.integration.slurm.lifelike import EVERY, LAST_S, STEP_S, Strike, draw, simulated
from tests.integration.slurm.lifelike_times import fitted
from tests.integration.slurm.sequences import ACTIVE, KINDS, MOST
from tests.integration.slurm.sequences import draw as drawn_faults
from tests.integration.slurm.trials import Trial, summary

# The benchmark of the order of the samples.


def test_memory_does_not_grow_with_the_samples() -> None:
    """From 1e3 to 1e13 samples the mixture takes no memory, and at both ends a sample costs about the same."""
    ours = _alone(_ours)
    assert ours["ours_memory_mib_1e3_to_1e13"] < 2
    assert ours["ours_flat_ratio"] < 3
    assert ours["ours_sample_us"] < 50


def test_the_growing_index_grows() -> None:
    """What the mixture is compared with keeps 16 bytes a sample."""
    small, large = (_alone(lambda size=size: _growing(size)) for size in (10**5, 10**6))
    assert large["growing_memory_mib_1e6"] > 15
    assert small["growing_memory_mib_1e5"] < large["growing_memory_mib_1e6"]


# The detection benchmark: its shares count what they say, and a healthy node is healthy.


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


# The benches on the test cluster: what is drawn from a seed, what trials come to, and whose options are whose.


@given(st.integers(0, 2**32))
def test_a_sequence_is_drawn_from_its_seed(seed: int) -> None:
    """Two to four faults that differ, the first not before the run has settled, and the same each time."""
    faults = drawn_faults(seed)
    assert 2 <= len(faults) <= MOST
    assert len({fault.kind for fault in faults} & KINDS.keys()) == len(faults)
    assert faults[0].after > 0
    assert all(fault.place < ACTIVE for fault in faults)
    assert drawn_faults(seed) == faults


def test_the_bench_plays_every_kind() -> None:
    """In twenty sequences each kind comes up, and some while the run recovers."""
    faults = [fault for seed in range(1, 21) for fault in drawn_faults(seed)]
    assert {fault.kind for fault in faults} == KINDS.keys()
    assert any(fault.after == 0 for fault in faults)


def test_a_trial_that_failed_counts_and_is_not_timed() -> None:
    """The largest of few is their 99th percentile."""
    trials = [Trial(2.0, 3), Trial(0.0, 0, "nothing happened"), Trial(4.0, 5), Trial(2.5, 0)]
    assert summary(trials) == {"p50_s": 2.5, "p99_s": 4.0, "lost_steps_max": 5, "trials": 4, "failed": 1}
    assert summary([Trial(0.0, 0, "nothing happened")])["p50_s"] is None


def test_options_go_with_the_bench_that_has_them() -> None:
    """One that a bench does not know is refused with those that do."""
    refused = CliRunner().invoke(bench, ["restart", "--trials", "3"])
    assert refused.exit_code == 2
    assert "--trials goes with the benchmark simulate and swap only" in refused.output


# What the benchmark of the simulator measures on the cluster is what the simulator then takes.


MEANS_S = {
    "hot process": 0.3, "hot lost": 1.8, "hot leader": 1.7, "hot hardware": 0.4, "hot launcher": 0.35,
    "requeue lost": 13.0, "requeue leader": 41.0, "pool lost": 6.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "effect", "node", "name"),
    [
        ("hot", "process", 1, "hot process"),
        ("hot", "lost", 1, "hot lost"),
        ("hot", "lost", 0, "hot leader"),
        ("hot", "hardware", 1, "hot hardware"),
        ("hot", "launcher", 1, "hot launcher"),
        ("requeue", "lost", 1, "requeue lost"),
        ("pool", "lost", 1, "pool lost"),
    ],
)
def test_a_single_fault_takes_as_long_as_it_was_measured(policy: str, effect: Effect, node: int, name: str) -> None:
    """And costs the steps since the last checkpoint."""
    at_s = 1.3 * EVERY * STEP_S
    played = simulated(policy, [Strike(at_s, effect, node)], fitted(MEANS_S))
    assert played.standstill_s == pytest.approx(MEANS_S[name], abs=0.05)
    assert played.lost_steps == pytest.approx(0.3 * EVERY)


def test_the_batch_host_is_waited_for_as_long_as_it_was_measured() -> None:
    """Its loss without a spare; the two seconds for which a new leader looks around may be part of it."""
    played = simulated("requeue", [Strike(9.0, "lost", 0)], fitted(MEANS_S))
    assert played.standstill_s == pytest.approx(MEANS_S["requeue leader"], abs=2.5)


def test_sequences_differ_and_come_again() -> None:
    """Each seed has its own, which ends before the time to recover from its last fault."""
    drawn = [draw(seed) for seed in range(30)]
    assert drawn == [draw(seed) for seed in range(30)]
    assert len({strikes for _, strikes in drawn}) > 25
    assert all(strike.at_s < LAST_S for _, strikes in drawn for strike in strikes)
    assert {strike.effect for _, strikes in drawn for strike in strikes} == {
        "process", "hardware", "lost", "launcher", "degraded",
    }  # fmt: skip


# The comparison with other monitors finds their patterns and lines, and each silence has a reason.


CODE = """package x

const efaPrefix = `infiniband (rdmap|efa_)\\S*:`

var patternDefinitions = map[string]patternDefinition{
	"tx_timeout": {
		// A comment.
		re:      regexp.MustCompile(`mlx5_core.*TX timeout detected`),
		isFatal: true,
	},
	"efa_admin_cmd_failed": {
		re: regexp.MustCompile(
			efaPrefix + `.*Failed to process` + ` command`),
		isFatal: false,
	},
	newPatternName: {
		re:      regexp.MustCompile(`mlx5_core.*is unhappy`),
		isFatal: false,
	},
}
"""

TESTS = """package x

var lines = []string{
	"kernel: [ 12.3] mlx5_core 0000:65:00.0 eth0: TX timeout detected",
	`mlx5_core 0000:65:00.0 eth0: TX timeout detected`,
	"infiniband rdmap0s6: Failed to process command CREATE_QP (opcode 6) comp_status 1 err -22",
	"mlx5_core 0000:65:00.0: it is unhappy",
}
"""


def put(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_patterns_that_opsd_does_not_hear_are_named_unless_there_is_a_reason(tmp_path: Path) -> None:
    """In each of the three ways in which they are written."""
    nic = tmp_path / "NVSentinel/health-monitors/syslog-health-monitor/pkg/nicdriver"
    put(nic / "config.go", CODE)
    put(nic / "efa_test.go", TESTS)
    rules = [
        {"reason": "OOMKilling", "pattern": r"Killed process \d+ (.+) total-vm"},
        {"reason": "UnregisterNetDevice", "pattern": r"unregister_netdevice: waiting"},
    ]
    put(
        tmp_path / "node-problem-detector/config/kernel-monitor.json",
        json.dumps({"plugin": "kmsg", "logPath": "/dev/kmsg", "rules": rules}),
    )
    put(
        tmp_path / "node-problem-detector/test/problems/all",
        "[1.2] Killed process 7 (python) total-vm:1kB, anon-rss:1kB, file-rss:1kB\n"
        "[1.3] unregister_netdevice: waiting for lo to become free. Usage count = 1\n",
    )
    put(tmp_path / "gpud/components/os/kmsg_matcher.go", "regexNever = `nobody says this`\n")
    found = run(tmp_path)
    assert found["NVSentinel"] == {
        "patterns": 3, "heard": 1, "explained": 1, "unexplained": "newPatternName", "without a line of theirs": "",
    }  # fmt: skip
    assert found["node-problem-detector"]["explained"] == found["node-problem-detector"]["heard"] == 1
    assert found["gpud"]["without a line of theirs"] == "Never"


def test_each_silence_has_a_row_in_the_guide_of_operations() -> None:
    """The reasons stand there only."""
    guide = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    rows = [row["message"] for row in tomllib.loads(REASONS.read_text(encoding="utf-8"))["row"]]
    assert [row for row in rows if f"\n| {row} | " not in guide] == []


def test_a_folder_without_clones_is_refused(tmp_path: Path) -> None:
    """With their names."""
    with pytest.raises(BenchError, match="no clone of gpud, node-problem-detector, NVSentinel"):
        run(tmp_path)
