"""The report, its formats, the history of a node, and the burn-in."""

from __future__ import annotations

import asyncio
import io
import json
import os
import resource
import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_prometheus
from rich.console import Console

from opsd.files import write_text
from opsd.preflight import burnin, series, view
from opsd.preflight.base import Check, Finding, Measure, Verdict, quantity
from opsd.preflight.burnin import BurnIn
from opsd.preflight.history import History, HistoryError, newest, sparkline
from opsd.preflight.judge import Past
from opsd.preflight.report import Report, ReportError, Result, Value
from opsd.preflight.series import Sample
from opsd.settings.sections import PreflightSettings
from opsd.slurm.ownership import PreflightResult
from tests.fakes.preflight import ABSENT, CLOCK, DISK, GEMM, VERSIONS, good, make, report

# The report and its formats: JSON, JUnit, Markdown, OpenMetrics, the table.


ALL = report(GEMM, CLOCK, DISK, ABSENT, VERSIONS)


def test_a_report_survives_json():
    """What is written is what is read."""
    assert Report.from_json(ALL.to_json()) == ALL


@pytest.mark.parametrize(
    ("results", "interrupted", "word"),
    [
        ((VERSIONS,), False, "fit"),
        ((VERSIONS, GEMM, DISK), False, "unfit"),
        ((VERSIONS, GEMM), True, "unfit"),
        ((VERSIONS, DISK), False, "unknown"),
        ((VERSIONS, replace(DISK, optional=True)), False, "fit"),
        ((VERSIONS,), True, "unknown"),
        ((ABSENT,), False, "unknown"),
        ((), False, "unknown"),
    ],
)
def test_only_a_check_that_has_failed_calls_a_node_unfit(results: tuple[Result, ...], interrupted: bool, word: str):
    """One that could not run fails the preflight, and may have done so on every node."""
    assert replace(report(*results), interrupted=interrupted).word == word


@pytest.mark.parametrize("text", ["", "{", "[]", '{"node": "a"}', ALL.to_json().replace('"format": 1', '"format": 99')])
def test_what_is_no_report_is_refused_with_a_sentence(text: str):
    """Truncated, foreign and future files are named as such."""
    with pytest.raises(ReportError, match="report"):
        Report.from_json(text)


def test_not_knowing_fails_the_node_unless_optional():
    """A check that could not run counts like one that failed."""
    assert not report(VERSIONS, DISK).passed
    assert report(VERSIONS, replace(DISK, optional=True)).passed
    assert report(VERSIONS, CLOCK, ABSENT).passed
    assert not report(VERSIONS, interrupted=True).passed
    assert not report(ABSENT).passed


def test_every_failure_is_one_sentence_with_the_remedy_and_the_runbook():
    """What, how far from normal, what to do, where to read on."""
    assert GEMM.sentences == [
        "GPU burn: GPU 1: throughput is 540 TFLOP/s, 26% below the best; drain the node; "
        "see `opsd runbook show gpu_throttle`."
    ]
    assert DISK.sentences == ["Storage: fio is not installed; apt-get install fio."]


def test_junit_has_a_test_case_per_check_with_the_totals_ci_systems_read():
    """Failures and errors fail the build, what does not apply is skipped."""
    root = ElementTree.fromstring(view.junit(ALL))
    suite = root[0]
    assert root.tag == "testsuites" and suite.tag == "testsuite"
    assert {key: suite.get(key) for key in ("tests", "failures", "errors", "skipped")} == {
        "tests": "5",
        "failures": "1",
        "errors": "1",
        "skipped": "1",
    }
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    assert "540 TFLOP/s" in cases["gpu_burn"].find("failure").get("message")
    assert cases["storage"].find("error") is not None
    assert cases["infiniband"].find("skipped") is not None
    assert [child.tag for child in cases["clock"]] == ["system-out"]
    assert suite.get("timestamp") == "1970-01-01T00:16:40"


def test_an_optional_check_that_could_not_run_is_skipped_in_junit():
    """The build passes, as the node does."""
    suite = ElementTree.fromstring(view.junit(report(VERSIONS, replace(DISK, optional=True))))[0]
    assert (suite.get("errors"), suite.get("skipped")) == ("0", "1")


@given(st.text())
def test_whatever_a_check_says_the_formats_stay_well_formed(text: str):
    """Control characters, markup and pipes in a message break neither XML nor the Markdown table nor the metrics."""
    odd = replace(GEMM, findings=(Finding(Verdict.FAIL, text, text),), title=text or "x")
    ElementTree.fromstring(view.junit(report(odd, replace(DISK, reason=text))))
    table = [line for line in view.markdown(report(replace(DISK, reason=text))).splitlines() if line[:1] == "|"]
    assert len(table) == 3
    values = tuple(replace(value, subject=text) for value in GEMM.values[:1])
    list(parse_openmetrics(view.openmetrics(report(replace(GEMM, values=values), node=text or "n"))))


def test_openmetrics_is_read_by_both_parsers_and_says_who_passed_when():
    """node_exporter's textfile collector reads the Prometheus text format."""
    text = view.openmetrics(ALL)
    for parse in (parse_openmetrics, parse_prometheus):
        samples = {(s.name, *sorted(s.labels.values())): s.value for family in parse(text) for s in family.samples}
        assert samples["opsd_preflight_passed", "node-1", "quick"] == 0
        assert samples["opsd_preflight_check_verdict", "fail", "gpu_burn", "node-1"] == 1
        assert samples["opsd_preflight_value", "GPU 1", "flops", "gpu_burn", "node-1", "throughput"] == 540e12
    assert {family.type for family in parse_prometheus(text)} == {"gauge"}


def test_markdown_has_the_verdict_first_and_a_line_per_problem():
    """A page for a ticket."""
    lines = view.markdown(ALL).splitlines()
    assert lines[0] == (
        "## node-1 FAILED preflight (quick): 1 failed, 1 could not run, 1 with a warning, 1 passed, 1 not applicable"
    )
    assert sum(line.startswith("- ") for line in lines) == 3


def test_the_page_a_person_sees_needs_no_explanation():
    """Table, what does not apply and why, a sentence per problem, the verdict last."""
    out = io.StringIO()
    view.show(ALL, Console(file=out, width=200))
    text = out.getvalue()
    for expected in (
        "throughput 540 TFLOP/s to 730 TFLOP/s (2)",
        "not applicable (no adapter): infiniband",
        "FAIL GPU burn: GPU 1: throughput is 540 TFLOP/s, 26% below the best; drain the node",
        "could not run Storage: fio is not installed",
    ):
        assert expected in text
    assert text.rstrip().splitlines()[-1].startswith("node-1 FAILED preflight (quick): 1 failed")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (55.2e9, "bytes_per_second", "55.2 GB/s"),
        (730e12, "flops", "730 TFLOP/s"),
        (12.9e-6, "seconds", "12.9 us"),
        (235e-6, "seconds", "235 us"),
        (90, "seconds", "1 min 30 s"),
        (12_000, "seconds", "3 h 20 min"),
        (16.1 * 86_400, "seconds", "16.1 d"),
        (0.7, "ratio", "70.0%"),
        (71, "celsius", "71 °C"),
        (8, "", "8"),
        (1_234_567, "", "1,234,567"),
        (0, "seconds", "0 s"),
    ],
)
def test_quantities_are_written_as_people_say_them(value: float, unit: str, text: str):
    """Three digits and a prefix."""
    assert quantity(value, unit) == text


def test_a_report_that_does_not_fit_leaves_the_old_one_as_it_was(tmp_path: Path):
    """As on a full disk: nobody reads half a report, and no draft is left."""
    target = tmp_path / "report.json"
    write_text(target, "old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            write_text(target, "a new and longer one")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert target.read_text(encoding="utf-8") == "old"
    assert [*tmp_path.iterdir()] == [target]


def test_the_draft_of_a_dead_process_of_the_same_number_is_in_nobodys_way(tmp_path: Path):
    """After a power cut the numbers of processes begin again."""
    target = tmp_path / "report.json"
    (tmp_path / f".report.json.{os.getpid()}").write_text("half of it")
    write_text(target, "new")
    assert target.read_text(encoding="utf-8") == "new"


def test_a_line_comes_up_for_what_ran_and_in_later_rounds_only_for_what_failed():
    """What does not apply is summed up at the end; a burn-in of days does not fill the screen with passes."""
    out = io.StringIO()
    plain = view.PlainView(Console(file=out, width=200))
    for plain.brief in (False, True):
        for result in ALL.results:
            plain.finished(result)
    first = ["FAIL GPU burn 12.5 s", "warn Clock 0 s", "could not run Storage 0 s", "pass Versions 0 s"]
    assert out.getvalue().splitlines() == [*first, "FAIL GPU burn 12.5 s", "could not run Storage 0 s"]


def test_each_sentence_has_its_own_verdict():
    """A warning beside a failure of the same check is still a warning."""
    both = replace(GEMM, findings=(*GEMM.findings, Finding(Verdict.WARN, "GPU 0 is warm")))
    assert [verdict for verdict, _ in both.problems] == [Verdict.FAIL, Verdict.WARN]
    out = io.StringIO()
    view.show(report(both), Console(file=out, width=200))
    assert "\nwarn GPU burn: GPU 0 is warm" in out.getvalue()


# The history of a node: runs, trends, yardsticks from the past, and files that cannot be used.


def burn(at: float, value: float, verdict: Verdict = Verdict.PASS):
    values = (replace(GEMM.values[0], value=value, verdict=verdict),)
    return report(replace(GEMM, values=values, started=at, verdict=verdict, findings=()), started=at)


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path / "state" / "preflight.sqlite")


def test_a_history_that_does_not_exist_yet_is_empty(history: History):
    """Reading makes no file."""
    assert history.runs("node-1") == []
    assert history.past("node-1", "gpu_burn") == {}
    assert history.facts("node-1", "versions") == {}
    assert not history.path.exists()


def test_runs_come_back_newest_first_and_whole(history: History):
    """Each node has its own, and the whole report is kept."""
    for at in (1.0, 3.0, 2.0):
        history.record(burn(at, at))
    history.record(replace(burn(9.0, 9.0), node="node-2"))
    assert [run.started for run in history.runs("node-1")] == [3.0, 2.0, 1.0]
    assert history.nodes() == ["node-1", "node-2"]
    assert history.report(history.runs("node-1")[0].id) == burn(3.0, 3.0)


def test_a_run_that_cannot_be_read_is_said(history: History):
    """One of an older format, or a damaged row."""
    history.record(burn(1.0, 1.0))
    with sqlite3.connect(history.path) as db:
        db.execute("UPDATE runs SET report = '{'")
    with pytest.raises(HistoryError, match="run 1 in the history"):
        history.facts("node-1", "versions")


def test_the_past_of_a_series_is_its_last_runs_oldest_first(history: History):
    """Five by default, however many there are."""
    for at in range(1, 9):
        history.record(burn(float(at), at * 10.0))
    assert history.past("node-1", "gpu_burn") == {
        ("throughput", "GPU 0"): tuple(Past(float(at), at * 10.0) for at in range(4, 9))
    }


def test_values_that_failed_are_no_yardstick(history: History):
    """A sick node must not become its own normal."""
    history.record(burn(1.0, 730.0))
    history.record(burn(2.0, 100.0, Verdict.FAIL))
    assert history.past("node-1", "gpu_burn") == {("throughput", "GPU 0"): (Past(1.0, 730.0),)}


def test_the_last_facts_come_from_the_newest_run_that_has_any(history: History):
    """A run without the versions check does not make the node forget its versions."""
    history.record(report(VERSIONS))
    history.record(burn(2000.0, 730.0))
    assert history.facts("node-1", "versions") == {"kernel": "6.8", "NCCL": "2.27"}


def test_only_the_newest_runs_of_a_node_are_kept(history: History):
    """A node that is checked before every job does not fill its disk; other nodes' runs stay."""
    history.record(replace(burn(0.0, 1.0), node="node-2"))
    for at in range(6):
        History(history.path, kept_runs=4).record(burn(float(at), 1.0))
    assert [run.started for run in history.runs("node-1")] == [5.0, 4.0, 3.0, 2.0]
    assert [len(trend.past) for trend in history.trends("node-1")] == [4]
    assert len(history.runs("node-2")) == 1


def test_trends_have_every_series_oldest_first(history: History):
    """What `opsd preflight history` draws."""
    for at in (1.0, 2.0):
        history.record(burn(at, at))
    (trend,) = history.trends("node-1")
    assert (trend.check, trend.measure, trend.subject, trend.unit) == ("gpu_burn", "throughput", "GPU 0", "flops")
    assert trend.past == (Past(1.0, 1.0), Past(2.0, 2.0))


def test_a_file_that_is_no_database_is_an_error_with_its_name(history: History):
    """Somebody else's file, or one that a full disk has cut."""
    history.path.parent.mkdir()
    history.path.write_bytes(b"not a database" * 1000)
    with pytest.raises(HistoryError, match=r"preflight\.sqlite cannot be used"):
        history.runs("node-1")
    with pytest.raises(HistoryError, match=r"preflight\.sqlite cannot be used"):
        history.record(burn(1.0, 1.0))


def test_a_curve_has_a_bar_per_value():
    """Lowest and highest bar for lowest and highest value; equal values are a line."""
    assert sparkline([1.0, 2.0, 3.0]) == "▁▅█"
    assert sparkline([5.0, 5.0]) == "▄▄"


# Which preflight proves a node good.


CHECKS = (make("versions", good), make("infiniband", good))

WHOLE = (VERSIONS, ABSENT)


@pytest.mark.parametrize(
    ("reports", "proof"),
    [
        ([report(*WHOLE)], PreflightResult(1000.0, True)),
        ([report(*WHOLE), report(GEMM, started=2000.0)], PreflightResult(2000.0, False)),
        ([report(VERSIONS)], None),
        ([report(*WHOLE), report(VERSIONS, started=2000.0)], PreflightResult(1000.0, True)),
        ([report(*WHOLE, interrupted=True)], None),
        ([report(*WHOLE, node="another")], None),
    ],
    ids=["whole", "failed later", "with --only", "whole, then with --only", "interrupted", "another node's"],
)
def test_only_a_whole_preflight_proves_anything(
    tmp_path: Path, reports: list[Report], proof: PreflightResult | None
) -> None:
    """The newest counts; of those cut short only a failure does. A report given by hand counts like the history."""
    history = History(tmp_path / "preflight.sqlite")
    settings = PreflightSettings()
    assert newest("node-1", "quick", CHECKS, settings, history, reports) == proof
    for one in reports:
        if not one.interrupted:
            history.record(one)
    assert newest("node-1", "quick", CHECKS, settings, history) == proof


def test_a_preflight_that_is_still_to_come_proves_nothing(tmp_path: Path) -> None:
    """It was made while the clock was wrong, and would be the newest until then."""
    reports = [report(*WHOLE), report(*WHOLE, started=9_000.0)]
    history = History(tmp_path / "preflight.sqlite")
    for now, at in ((5_000.0, 1_000.0), (9_000.0, 9_000.0)):
        assert newest("node-1", "quick", CHECKS, PreflightSettings(), history, reports, now) == PreflightResult(
            at, True
        )


def test_what_the_settings_skip_is_not_required(tmp_path: Path) -> None:
    """The node's own configuration says what belongs to its profile."""
    settings = PreflightSettings(skip=("infiniband",))
    history = History(tmp_path / "preflight.sqlite")
    assert newest("node-1", "quick", CHECKS, settings, history, [report(VERSIONS)]) == PreflightResult(1000.0, True)


# The burn-in: rounds that add up to one report, resumed where they were cut off, and its time series.


ROUND = (Check("versions", "Versions"),)

HOUR = 3600.0


def hour(*results, **fields) -> Report:
    """A round that took an hour."""
    found = report(*(results or (VERSIONS,)), **fields)
    return replace(found, ended=found.started + HOUR)


def burn_in(folder: Path, rounds: Sequence[Report], hours: float = 3.0, now: float = 1e9) -> tuple[Report, list[str]]:
    """The report of a burn-in that has these ``rounds`` ahead of it, and what was said."""
    waiting, told = [*rounds], []

    async def one_round() -> Report:
        return waiting.pop(0)

    begun = burnin.begin(folder, "node-1", ROUND, hours * HOUR, now)
    return asyncio.run(burnin.go_on(begun, one_round, told.append)), told


def value_of(found: Report, measure: str) -> float:
    return next(value.value for value in found.results[-1].values if value.measure == measure)


def test_it_goes_on_until_its_hours_are_over(tmp_path: Path) -> None:
    """Three rounds of an hour, and what each took adds up."""
    found, told = burn_in(tmp_path, [hour(started=1e9 + number * HOUR) for number in range(5)])
    assert found.passed
    assert (value_of(found, "rounds"), value_of(found, "burned")) == (3, 3 * HOUR)
    assert told[-1] == "round 3 passed, 3 h of 3 h done"


def test_a_round_that_cannot_be_read_costs_no_other(tmp_path: Path) -> None:
    """It is made again, under a number of its own."""
    burn_in(tmp_path, [*(hour(started=1e9 + number * HOUR) for number in range(3)), hour(interrupted=True)], hours=5)
    (folder,) = tmp_path.iterdir()
    (folder / "round-0002.json").write_text("{")
    found, _ = burn_in(
        tmp_path, [hour(started=2e9 + number * HOUR) for number in range(3)], hours=5, now=1e9 + 4 * HOUR
    )
    assert value_of(found, "rounds") == 5
    kept = [Report.from_json((folder / f"round-000{number}.json").read_bytes()).started for number in (1, 3, 4, 5, 6)]
    assert kept == [1e9, 1e9 + 2 * HOUR, 2e9, 2e9 + HOUR, 2e9 + 2 * HOUR]


def test_what_was_cut_off_goes_on_where_it_was(tmp_path: Path) -> None:
    """After a crash or Ctrl-C only the missing rounds are run; after a finished one the next starts over."""
    cut, _ = burn_in(tmp_path, [hour(started=1e9), hour(started=1e9 + HOUR, interrupted=True)])
    assert cut.interrupted and not cut.passed
    assert cut.results[0].verdict is Verdict.PASS, "what the whole round found stays"
    found, told = burn_in(tmp_path, [hour(started=2e9), hour(started=2e9 + HOUR)], now=1e9 + 3 * HOUR)
    assert value_of(found, "rounds") == 3
    assert "of which 1 h of 3 h are done" in told[0]
    begun = burnin.begin(tmp_path, "node-1", ROUND, HOUR, 1e9 + 4 * HOUR)
    begun.report_file.write_text(found.to_json(), encoding="utf-8")
    assert burnin.begin(tmp_path, "node-1", ROUND, HOUR, 1e9 + 5 * HOUR).done == ()


@pytest.mark.parametrize(
    ("node", "checks", "later_s"),
    [
        ("node-2", ROUND, 0.0),
        ("node-1", (*ROUND, Check("cpu", "Processor")), 0.0),
        ("node-1", ROUND, 30 * 86_400.0),
    ],
)
def test_another_burn_in_is_not_resumed(tmp_path: Path, node: str, checks: tuple[Check, ...], later_s: float) -> None:
    """Another node, other checks, or one of last month."""
    burn_in(tmp_path, [hour(started=1e9), hour(interrupted=True)])
    assert burnin.begin(tmp_path, node, checks, HOUR, 1e9 + HOUR + later_s).done == ()


def test_a_round_that_fails_ends_it(tmp_path: Path) -> None:
    """Nobody has to wait three days for what is known after an hour, and the round is named."""
    found, _ = burn_in(tmp_path, [hour(VERSIONS), hour(replace(VERSIONS, verdict=Verdict.FAIL, reason="gone")), hour()])
    assert value_of(found, "rounds") == 2
    assert found.results[0].verdict is Verdict.FAIL


def test_a_round_that_cannot_be_kept_is_said(tmp_path: Path) -> None:
    """A full or broken disk does not end three days of work."""
    begun = replace(burnin.begin(tmp_path, "node-1", ROUND, HOUR, 1e9), folder=tmp_path / "gone")
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
