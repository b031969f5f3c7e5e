"""The burn-in: rounds that add up to one report, resumed where they were cut off, and its time series."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from opsd.preflight import burnin, series
from opsd.preflight.base import Check, Measure, Verdict
from opsd.preflight.burnin import BurnIn
from opsd.preflight.report import Report, Value
from opsd.preflight.series import Sample
from tests.fakes.preflight_reports import CLOCK, GEMM, VERSIONS, report

CHECKS = (Check("versions", "Versions"),)
HOUR = 3600.0


def hour(*results, **fields) -> Report:
    """A round that took an hour."""
    found = report(*(results or (VERSIONS,)), **fields)
    return replace(found, ended=found.started + HOUR)


def burn(folder: Path, rounds: Sequence[Report], hours: float = 3.0, now: float = 1e9) -> tuple[Report, list[str]]:
    """The report of a burn-in that has these ``rounds`` ahead of it, and what was said."""
    waiting, told = [*rounds], []

    async def one_round() -> Report:
        return waiting.pop(0)

    begun = burnin.begin(folder, "node-1", CHECKS, hours * HOUR, now)
    return asyncio.run(burnin.go_on(begun, one_round, told.append)), told


def value_of(found: Report, measure: str) -> float:
    return next(value.value for value in found.results[-1].values if value.measure == measure)


def test_it_goes_on_until_its_hours_are_over(tmp_path: Path) -> None:
    """Three rounds of an hour, and what each took adds up."""
    found, told = burn(tmp_path, [hour(started=1e9 + number * HOUR) for number in range(5)])
    assert found.passed
    assert (value_of(found, "rounds"), value_of(found, "burned")) == (3, 3 * HOUR)
    assert told[-1] == "round 3 passed, 3 h of 3 h done"


def test_a_round_that_cannot_be_read_costs_no_other(tmp_path: Path) -> None:
    """It is made again, under a number of its own."""
    burn(tmp_path, [*(hour(started=1e9 + number * HOUR) for number in range(3)), hour(interrupted=True)], hours=5)
    (folder,) = tmp_path.iterdir()
    (folder / "round-0002.json").write_text("{")
    found, _ = burn(tmp_path, [hour(started=2e9 + number * HOUR) for number in range(3)], hours=5, now=1e9 + 4 * HOUR)
    assert value_of(found, "rounds") == 5
    kept = [Report.from_json((folder / f"round-000{number}.json").read_bytes()).started for number in (1, 3, 4, 5, 6)]
    assert kept == [1e9, 1e9 + 2 * HOUR, 2e9, 2e9 + HOUR, 2e9 + 2 * HOUR]


def test_what_was_cut_off_goes_on_where_it_was(tmp_path: Path) -> None:
    """After a crash or Ctrl-C only the missing rounds are run; after a finished one the next starts over."""
    cut, _ = burn(tmp_path, [hour(started=1e9), hour(started=1e9 + HOUR, interrupted=True)])
    assert cut.interrupted and not cut.passed
    assert cut.results[0].verdict is Verdict.PASS, "what the whole round found stays"
    found, told = burn(tmp_path, [hour(started=2e9), hour(started=2e9 + HOUR)], now=1e9 + 3 * HOUR)
    assert value_of(found, "rounds") == 3
    assert "of which 1 h of 3 h are done" in told[0]
    begun = burnin.begin(tmp_path, "node-1", CHECKS, HOUR, 1e9 + 4 * HOUR)
    begun.report_file.write_text(found.to_json(), encoding="utf-8")
    assert burnin.begin(tmp_path, "node-1", CHECKS, HOUR, 1e9 + 5 * HOUR).done == ()


@pytest.mark.parametrize(
    ("node", "checks", "later_s"),
    [("node-2", CHECKS, 0.0), ("node-1", (*CHECKS, Check("cpu", "Processor")), 0.0), ("node-1", CHECKS, 30 * 86_400.0)],
)
def test_another_burn_in_is_not_resumed(tmp_path: Path, node: str, checks: tuple[Check, ...], later_s: float) -> None:
    """Another node, other checks, or one of last month."""
    burn(tmp_path, [hour(started=1e9), hour(interrupted=True)])
    assert burnin.begin(tmp_path, node, checks, HOUR, 1e9 + HOUR + later_s).done == ()


def test_a_round_that_fails_ends_it(tmp_path: Path) -> None:
    """Nobody has to wait three days for what is known after an hour, and the round is named."""
    found, _ = burn(tmp_path, [hour(VERSIONS), hour(replace(VERSIONS, verdict=Verdict.FAIL, reason="gone")), hour()])
    assert value_of(found, "rounds") == 2
    assert found.results[0].verdict is Verdict.FAIL


def test_a_round_that_cannot_be_kept_is_said(tmp_path: Path) -> None:
    """A full or broken disk does not end three days of work."""
    begun = replace(burnin.begin(tmp_path, "node-1", CHECKS, HOUR, 1e9), folder=tmp_path / "gone")
    told: list[str] = []

    async def one_round() -> Report:
        return hour()

    assert asyncio.run(burnin.go_on(begun, one_round, told.append)).passed
    assert "round 1 was not kept" in told[0]


def test_the_worst_of_all_rounds_counts(tmp_path: Path) -> None:
    """Verdict, values and sentences of each check, with the round in which it was."""
    good = replace(GEMM, verdict=Verdict.PASS, findings=(), values=(replace(GEMM.values[0], value=735e12),))
    begun = BurnIn(tmp_path, (Check("gpu_burn", ""), Check("clock", "")), HOUR)
    found = burnin.merged([hour(good, CLOCK), hour(GEMM, CLOCK), hour(good, CLOCK)], begun)
    burned, clock, _ = found.results
    assert burned.verdict is Verdict.FAIL
    assert {(v.subject, v.value) for v in burned.values} == {("GPU 0", 730e12), ("GPU 1", 540e12)}
    assert burned.findings[0].summary.endswith("(round 2 of 3)")
    assert clock.verdict is Verdict.WARN


def test_a_speed_that_declines_over_the_hours_is_told() -> None:
    """Each round by itself was above every floor; scatter within the measure's noise is nothing."""
    check = Check("gpu_burn", "", measures=(Measure("throughput", "flops", "GEMM throughput", "higher", noise=0.03),))

    def rounds(speeds: Sequence[float]) -> list[Report]:
        values = [Value("throughput", "GPU 1", speed, "flops", Verdict.PASS, better="higher") for speed in speeds]
        return [hour(replace(GEMM, values=(value,))) for value in values]

    [found] = burnin.declines(rounds([730e12, 731e12, 720e12, 710e12, 690e12, 689e12]), [check])
    assert found.summary == "GPU 1: GEMM throughput fell from 730 TFLOP/s to 690 TFLOP/s"
    assert [*burnin.declines(rounds([730e12, 731e12, 720e12, 731e12, 722e12, 729e12]), [check])] == []


def sample(t: float, **values: float) -> Sample:
    return Sample(t, {"GPU 0": values})


def test_errors_that_came_during_the_hours_are_told() -> None:
    """By how much the counters grew, whatever they had before; after a reset of the driver they count on."""
    samples = [sample(0, uncorrected_errors=5), sample(1, uncorrected_errors=6), sample(2, uncorrected_errors=0)]
    [found] = series.outcome([*samples, sample(3, uncorrected_errors=2)]).findings
    assert (found.verdict, found.summary) == (Verdict.FAIL, "GPU 0 had 3 uncorrected errors during the burn-in")
    [lost] = series.outcome([sample(0, lost=0.0), sample(1, lost=1.0)]).findings
    assert lost.summary == "GPU 0 was lost during the burn-in"
    assert series.outcome([sample(0, corrected_errors=0.0), sample(1, corrected_errors=90.0)]).findings == ()
    assert series.outcome([sample(0, corrected_errors=0.0), sample(1, corrected_errors=900.0)]).findings != ()


def test_the_extremes_of_clock_and_temperature_are_kept() -> None:
    """And a curve is thinned by medians, so that one outlier does not draw it."""
    samples = [sample(t, clock=1.98e9 - t, temperature=40.0 + t) for t in range(50)]
    extremes = {m.measure: m.value for m in series.outcome(samples).measurements}
    assert extremes == {"lowest_clock": 1.98e9 - 49, "highest_temperature": 89.0}
    clock = next(trend for trend in series.trends(samples) if trend.measure == "temperature")
    assert [past.value for past in series.thinned(clock, 10).past] == [42.0 + 5 * part for part in range(10)]


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    """As a crash leaves it."""
    file = tmp_path / "series.jsonl"
    assert series.read(file) == []
    whole = json.dumps({"t": 1.0, "values": {"GPU 0": {"clock": 1e9}}})
    file.write_text(f"{whole}\n{whole[:20]}", encoding="utf-8")
    assert series.read(file) == [Sample(1.0, {"GPU 0": {"clock": 1e9}})]
