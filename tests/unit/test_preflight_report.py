"""The report and its formats: JSON, JUnit, Markdown, OpenMetrics, the table."""

from __future__ import annotations

import io
import os
import resource
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
from opsd.preflight import view
from opsd.preflight.base import Finding, Verdict, quantity
from opsd.preflight.report import Report, ReportError, Result
from tests.fakes.preflight_reports import ABSENT, CLOCK, DISK, GEMM, VERSIONS, report

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
