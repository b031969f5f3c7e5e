"""The verdict on measured values, by limits, peers, fleet and past."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.preflight.base import Bounds, Check, Finding, Measure, Measurement, Outcome, Peers, Verdict
from opsd.preflight.checks import gpu_inventory
from opsd.preflight.fleet import Fleet, FleetError, deviations, facts_of, fleet_of
from opsd.preflight.judge import Past, Yardsticks, judge, mad, nearest_rank
from tests.fakes.preflight import GEMM, VERSIONS, good, report

# The verdict on measured values: limits, peers, fleet, own past, counters, and values that are missing.


DAY = 86_400.0

NOW = 10 * DAY


def check(measure: Measure, stable: bool = False) -> Check:
    return Check("burn", "GPU burn", good, {"quick": 1}, measures=(measure,), advice="replace it", stable=stable)


def throughput(**options) -> Measure:
    return Measure("throughput", "flops", "bf16 throughput", better="higher", **options)


def outcome(*values: float) -> Outcome:
    return Outcome(tuple(Measurement("throughput", value, f"GPU {i}") for i, value in enumerate(values)))


def past(*values: float, every: float = DAY) -> tuple[Past, ...]:
    return tuple(Past(NOW - (len(values) - i) * every, value) for i, value in enumerate(values))


def test_a_value_within_every_yardstick_passes():
    """Nothing to say means pass, and the value is kept with its unit."""
    verdict = judge(check(throughput(limits=Bounds(fail=600e12), peers=Peers(0.05, 0.1))), outcome(730e12, 728e12), NOW)
    assert verdict.verdict is Verdict.PASS
    assert [(v.subject, v.value, v.unit) for v in verdict.values] == [
        ("GPU 0", 730e12, "flops"),
        ("GPU 1", 728e12, "flops"),
    ]


def test_an_absolute_limit_names_the_value_the_distance_and_the_remedy():
    """The sentence says what, how far from normal, and the check's advice goes with it."""
    verdict = judge(check(throughput(limits=Bounds(warn=700e12, fail=600e12))), outcome(540e12), NOW)
    assert verdict.findings == (
        Finding(
            Verdict.FAIL,
            "GPU 0: bf16 throughput is 540 TFLOP/s, 10% below the limit of 600 TFLOP/s",
            "replace it",
            "GPU 0",
        ),
    )


def test_a_value_between_warning_and_failure_warns():
    """The milder limit alone is a warning."""
    limits = Bounds(warn=700e12, fail=600e12)
    assert judge(check(throughput(limits=limits)), outcome(650e12), NOW).verdict is Verdict.WARN


def test_configured_limits_replace_those_of_the_check():
    """The site knows its hardware better."""
    yardsticks = Yardsticks(limits={"throughput": Bounds(fail=500e12)})
    strict = check(throughput(limits=Bounds(fail=600e12)))
    assert judge(strict, outcome(540e12), NOW, yardsticks).verdict is Verdict.PASS


def test_a_gpu_that_lags_its_neighbours_fails_though_no_limit_is_known():
    """One GPU 12 % below the best of the node fails, its seven neighbours do not."""
    verdict = judge(check(throughput(peers=Peers(0.05, 0.10))), outcome(*[730e12] * 7, 642e12), NOW)
    assert verdict.verdict is Verdict.FAIL
    assert [v.subject for v in verdict.values if v.verdict is not Verdict.PASS] == ["GPU 7"]
    assert "12% below the best on this node, 730 TFLOP/s" in verdict.findings[0].summary


def test_a_gpu_slightly_below_the_median_of_its_neighbours_warns():
    """6 % below the median is a warning at a tolerance of 5 %."""
    assert (
        judge(check(throughput(peers=Peers(0.05, 0.10))), outcome(*[730e12] * 7, 686e12), NOW).verdict is Verdict.WARN
    )


def test_the_fleets_median_is_a_yardstick_for_all_gpus_of_a_slow_node():
    """A node whose GPUs agree with each other may still lag all other nodes."""
    yardsticks = Yardsticks(fleet={"throughput": 730e12})
    verdict = judge(check(throughput(peers=Peers(0.05, 0.10))), outcome(*[650e12] * 8), NOW, yardsticks)
    assert verdict.verdict is Verdict.WARN
    assert "the fleet's median of 730 TFLOP/s" in verdict.findings[0].summary


def test_a_regression_against_the_own_past_is_reported_above_every_floor():
    """The node's own last runs are the finest yardstick."""
    yardsticks = Yardsticks(past={("throughput", "GPU 0"): past(730e12, 731e12, 729e12, 730e12, 732e12)})
    limits = Bounds(fail=600e12)
    verdict = judge(check(throughput(limits=limits, noise=0.02)), outcome(690e12), NOW, yardsticks)
    assert verdict.verdict is Verdict.WARN
    assert "5% below the median of its last 5 runs, 730 TFLOP/s" in verdict.findings[0].summary


def test_scatter_of_the_own_past_widens_what_counts_as_normal():
    """A measure that jumps from run to run is not called a regression for jumping again."""
    yardsticks = Yardsticks(past={("throughput", "GPU 0"): past(730e12, 650e12, 790e12, 690e12, 760e12)})
    assert judge(check(throughput(noise=0.02)), outcome(655e12), NOW, yardsticks).verdict is Verdict.PASS


def test_two_earlier_runs_are_too_few_to_call_a_regression():
    """A median of two says nothing."""
    yardsticks = Yardsticks(past={("throughput", "GPU 0"): past(730e12, 730e12)})
    assert judge(check(throughput()), outcome(400e12), NOW, yardsticks).verdict is Verdict.PASS


def test_smaller_is_better_where_the_measure_says_so():
    """A latency above its limit fails, one below passes."""
    latency = Measure("latency", "seconds", "latency", better="lower", limits=Bounds(fail=50e-6))
    for value, verdict in ((235e-6, Verdict.FAIL), (13e-6, Verdict.PASS)):
        assert judge(check(latency), Outcome((Measurement("latency", value),)), NOW).verdict is verdict


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_gpu_without_throughput_never_passes(value: float):
    """0 GFLOP/s has been called healthy by others; here it fails with no yardstick at all."""
    assert judge(check(throughput()), outcome(value), NOW).verdict is Verdict.FAIL


def test_a_required_measure_without_a_value_is_a_check_that_could_not_run():
    """A missing metric is never a pass."""
    verdict = judge(check(throughput()), Outcome(), NOW)
    assert verdict.verdict is Verdict.COULD_NOT_RUN
    assert verdict.findings[0].summary == "bf16 throughput was not measured"


def test_a_counter_is_judged_by_its_growth_since_the_last_run():
    """Five lost links in a day fail, one warns, an unchanged count passes; no past means no verdict."""
    flaps = Measure("flaps", "", "number of lost links", growth=Bounds(warn=1, fail=5))
    for last, now, verdict in ((2, 7, Verdict.FAIL), (2, 3, Verdict.WARN), (2, 2, Verdict.PASS)):
        yardsticks = Yardsticks(past={("flaps", "mlx5_0"): past(last)})
        assert judge(check(flaps), Outcome((Measurement("flaps", now, "mlx5_0"),)), NOW, yardsticks).verdict is verdict
    assert judge(check(flaps), Outcome((Measurement("flaps", 99, "mlx5_0"),)), NOW).verdict is Verdict.PASS


def test_a_counter_that_was_reset_counts_from_zero():
    """After a reboot the counter starts at 0; 6 since then is growth by 6."""
    flaps = Measure("flaps", "", "number of lost links", growth=Bounds(fail=5))
    yardsticks = Yardsticks(past={("flaps", ""): past(100)})
    assert judge(check(flaps), Outcome((Measurement("flaps", 6),)), NOW, yardsticks).verdict is Verdict.FAIL


def test_growth_over_many_days_is_taken_per_day():
    """Five lost links in ten days are half a link a day."""
    flaps = Measure("flaps", "", "number of lost links", growth=Bounds(warn=1))
    yardsticks = Yardsticks(past={("flaps", ""): past(0, every=10 * DAY)})
    assert judge(check(flaps), Outcome((Measurement("flaps", 5),)), NOW, yardsticks).verdict is Verdict.PASS


def test_a_stable_check_warns_about_facts_that_changed_since_the_last_run():
    """A kernel that was updated behind one's back is named with both versions, a new fact is none of it."""
    versions = check(Measure("known", "", "number of versions"), stable=True)
    found = Outcome((Measurement("known", 2),), facts={"kernel": "6.8.2", "NCCL": "2.27"})
    verdict = judge(versions, found, NOW, Yardsticks(facts={"kernel": "6.8.1", "torch": "2.11"}))
    assert [finding.summary for finding in verdict.findings] == [
        "kernel was 6.8.1 in the last run and is 6.8.2 now",
        "torch was 2.11 in the last run and is not there now",
    ]


@given(st.lists(st.floats(1e-3, 1e15), min_size=1, max_size=16))
def test_the_worst_verdict_of_a_value_is_the_verdict_of_the_check(values: list[float]):
    """Whatever is measured, no value is worse than the check's verdict and a failure comes with a sentence."""
    verdict = judge(check(throughput(limits=Bounds(warn=1e6, fail=1e3), peers=Peers(0.05, 0.1))), outcome(*values), NOW)
    assert verdict.verdict is max((v.verdict for v in verdict.values), key=lambda v: v.rank)
    assert len(verdict.findings) == sum(v.verdict is not Verdict.PASS for v in verdict.values)


@given(st.lists(st.floats(1e-3, 1e15), min_size=1), st.floats(1e-3, 1e3))
def test_scatter_scales_with_the_values(values: list[float], factor: float):
    """The median absolute deviation has the unit of the values, and is 0 when more than half are equal."""
    rounding = 8 * math.ulp(max(values) * factor)
    assert mad([v * factor for v in values]) == pytest.approx(mad(values) * factor, rel=1e-6, abs=rounding)
    assert mad([*values, *[median(values)] * (len(values) + 1)]) == 0


@given(st.lists(st.floats(allow_nan=False), min_size=1), st.floats(0, 1))
def test_the_nearest_rank_is_one_of_the_values_and_enough_do_not_exceed_it(values: list[float], share: float):
    """By definition at least ``share`` of the values are not above it."""
    rank = nearest_rank(values, share)
    assert rank in values
    assert sum(value <= rank for value in values) >= share * len(values) - 1e-9


# Many nodes side by side: majorities and medians.


def node(name: str, at: float = 1000.0, **facts: str):
    return report(replace(VERSIONS, facts=facts), GEMM, node=name, started=at)


def test_the_nodes_that_differ_are_named_beside_the_majority():
    """One node with another kernel, one without NCCL."""
    reports = [node(f"n{i}", kernel="6.8", NCCL="2.27") for i in range(6)]
    reports += [node("n6", kernel="6.5", NCCL="2.27"), node("n7", kernel="6.8")]
    assert [str(deviation) for deviation in deviations(facts_of(reports))] == [
        "NCCL is absent on n7; 7 of 8 nodes have 2.27",
        "kernel is 6.5 on n6; 7 of 8 nodes have 6.8",
    ]


def test_gpus_that_are_wired_otherwise_than_elsewhere_are_named():
    """Their layout is compared; UUIDs and NVLink domains differ by nature and are not."""

    def gpus(name: str, links: str):
        facts = {"NVLinks of the GPUs": links, "GPU 0": f"NVIDIA H100 GPU-{name} at 0000:1b:00.0"}
        facts[gpu_inventory.DOMAIN] = f"5e797fc6-0f46-421a-8724-0e102c0f723c.{ord(name)}"
        return report(replace(VERSIONS, check="gpu_inventory", facts=facts), node=name)

    found = deviations(facts_of([gpus("a", "18 18"), gpus("b", "18 18"), gpus("c", "18 12")]))
    assert [str(deviation) for deviation in found] == ["NVLinks of the GPUs is 18 12 on c; 2 of 3 nodes have 18 18"]


def test_only_the_newest_report_of_a_node_counts():
    """A node that was repaired is not held to its old report."""
    reports = [node("a", 2.0, kernel="6.8"), node("a", 1.0, kernel="6.5"), node("b", kernel="6.8")]
    assert deviations(facts_of(reports)) == []


@given(st.dictionaries(st.text(min_size=1, max_size=3), st.sampled_from(["6.8", "6.5", "6.1"]), min_size=1))
def test_the_majority_is_never_smaller_than_what_deviates(kernels: dict[str, str]):
    """Whatever the distribution and order, each deviating group is at most as large as the majority, and all add up."""
    found = deviations({name: {"kernel": kernel} for name, kernel in kernels.items()})
    reverse = deviations({name: {"kernel": kernel} for name, kernel in reversed(kernels.items())})
    assert found == reverse
    assert all(len(deviation.nodes) <= deviation.majority_count for deviation in found)
    if found:
        assert sum(len(deviation.nodes) for deviation in found) + found[0].majority_count == len(kernels)


def test_medians_go_to_a_file_and_back(tmp_path: Path):
    """What `opsd preflight merge --fleet` writes is what preflight.fleet reads."""
    fleet = fleet_of([node("a"), node("b")])
    assert fleet.medians("gpu_burn") == {"throughput": 635e12}
    path = tmp_path / "fleet.json"
    path.write_text(fleet.to_json(), encoding="utf-8")
    assert Fleet.read(path) == fleet


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_fleet_file_that_cannot_be_used_is_refused_with_a_sentence(tmp_path: Path, content: str | None):
    """Missing or foreign: the sentence names the command that writes one."""
    path = tmp_path / "fleet.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(FleetError, match="opsd preflight merge"):
        Fleet.read(path)
