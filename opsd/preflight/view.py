"""The forms of a report: live and whole on the terminal, JUnit for CI systems, Markdown for tickets, OpenMetrics.

Live output is a line per check that fills up while it runs, then one table and a sentence per problem. OpenMetrics are
gauges for the textfile collector of node_exporter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Final
from xml.etree import ElementTree

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.openmetrics.exposition import generate_latest
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from opsd.preflight.base import Check, Verdict, duration, quantity
from opsd.preflight.report import Report, Result, Value

_NOT_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 (section 2.2) cannot hold, not even escaped."""


def junit(report: Report) -> str:
    """JUnit XML, one test case per check: failed and could-not-run checks fail it, inapplicable ones skip it."""
    counts = report.counts
    failed = sum(r.failed for r in report.results if r.verdict is Verdict.FAIL)
    errors = sum(r.failed for r in report.results if r.verdict is Verdict.COULD_NOT_RUN)
    optional = counts[Verdict.COULD_NOT_RUN] - errors
    totals = {
        "tests": str(len(report.results)),
        "failures": str(failed),
        "errors": str(errors),
        "skipped": str(counts[Verdict.NOT_APPLICABLE] + optional),
        "time": f"{report.ended - report.started:.3f}",
    }
    root = ElementTree.Element("testsuites", {"name": "opsd preflight", **totals})
    stamp = datetime.fromtimestamp(report.started, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    suite = ElementTree.SubElement(
        root,
        "testsuite",
        {"name": f"preflight.{report.profile}", "hostname": report.node, "timestamp": stamp, **totals},
    )
    for result in report.results:
        _test_case(suite, report, result)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _test_case(suite: ElementTree.Element, report: Report, result: Result) -> None:
    case = ElementTree.SubElement(
        suite,
        "testcase",
        {"name": result.check, "classname": f"preflight.{report.node}", "time": f"{result.seconds:.3f}"},
    )
    text = _NOT_XML.sub("?", "\n".join(result.sentences))
    first = text.partition("\n")[0]
    if result.failed:
        kind = "failure" if result.verdict is Verdict.FAIL else "error"
        ElementTree.SubElement(case, kind, {"message": first, "type": result.verdict.value}).text = text
    elif result.verdict in (Verdict.NOT_APPLICABLE, Verdict.COULD_NOT_RUN):
        ElementTree.SubElement(case, "skipped", {"message": first})
    output = "\n".join([*([text] if text and not result.failed else []), *(value_line(v) for v in result.values)])
    if output:
        ElementTree.SubElement(case, "system-out").text = _NOT_XML.sub("?", output)


def value_line(value: Value) -> str:
    """A judged value in one line: "gpu3 throughput 731 TFLOP/s (normal 740 TFLOP/s)"."""
    normal = f" (normal {quantity(value.normal, value.unit)})" if value.normal is not None else ""
    return f"{value.subject} {value.measure} {quantity(value.value, value.unit)}{normal}".strip()


def markdown(report: Report) -> str:
    """A page for tickets and chats: the verdict, a table, one sentence per problem."""
    lines = [
        f"## {_cell(report.summary)}",
        "",
        f"{datetime.fromtimestamp(report.started, UTC):%Y-%m-%d %H:%M:%S} UTC, took "
        f"{duration(report.ended - report.started)}, opsd {report.version}",
        "",
        "| check | verdict | measured | took |",
        "|---|---|---|---|",
    ]
    for result in report.results:
        measured = "; ".join(headlines(result)) or result.reason
        verdict = result.verdict.value.replace("_", " ")
        lines.append(f"| {result.check} | {verdict} | {_cell(measured)} | {duration(round(result.seconds, 1))} |")
    problems = [_cell(text) for r in report.results if r.verdict is not Verdict.NOT_APPLICABLE for text in r.sentences]
    if problems:
        lines += ["", *(f"- {text}" for text in problems)]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def headlines(result: Result) -> list[str]:
    """One phrase per measure: the value, or the range and how many subjects it spans."""
    grouped: dict[str, list[Value]] = {}
    for value in result.values:
        grouped.setdefault(value.measure, []).append(value)
    phrases = []
    for measure, values in grouped.items():
        numbers = [value.value for value in values]
        low, high = quantity(min(numbers), values[0].unit), quantity(max(numbers), values[0].unit)
        span = low if low == high else f"{low} to {high}"
        name = measure.replace("_", " ")
        phrases.append(f"{name} {span}" + (f" ({len(values)})" if len(values) > 1 else ""))
    return phrases


def openmetrics(report: Report) -> str:
    """Gauges for node_exporter's textfile collector; this subset of OpenMetrics is valid Prometheus text format too."""
    registry = CollectorRegistry()
    labels = ("node", "profile")
    passed = Gauge("opsd_preflight_passed", "1 if the node passed its last preflight.", labels, registry=registry)
    passed.labels(report.node, report.profile).set(report.passed)
    ended = Gauge("opsd_preflight_end_timestamp_seconds", "When the last preflight ended.", labels, registry=registry)
    ended.labels(report.node, report.profile).set(report.ended)
    verdict = Gauge(
        "opsd_preflight_check_verdict",
        "1 for the verdict of each check in the last preflight, 0 for the others.",
        ("node", "check", "verdict"),
        registry=registry,
    )
    took = Gauge("opsd_preflight_check_seconds", "How long each check took.", ("node", "check"), registry=registry)
    measured = Gauge(
        "opsd_preflight_value",
        "What each check measured, in the base unit that the label names.",
        ("node", "check", "measure", "subject", "unit"),
        registry=registry,
    )
    for result in report.results:
        for kind in Verdict:
            verdict.labels(report.node, result.check, kind.value).set(result.verdict is kind)
        took.labels(report.node, result.check).set(result.seconds)
        for value in result.values:
            measured.labels(report.node, result.check, value.measure, value.subject, value.unit).set(value.value)
    text: bytes = generate_latest(registry)  # type: ignore[no-untyped-call]
    return text.decode()


_STYLES: Final = {
    Verdict.PASS: "[green]pass[/]",
    Verdict.WARN: "[yellow]warn[/]",
    Verdict.FAIL: "[bold red]FAIL[/]",
    Verdict.COULD_NOT_RUN: "[bold red]could not run[/]",
    Verdict.NOT_APPLICABLE: "[dim]not applicable[/]",
}
_PHRASES: Final = 6


class LiveView:
    """Progress bars, one per check and one below it for each GPU or other subject that reports for itself.

    With ``brief``, only checks that fail leave a line behind.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.brief = False
        self._tasks: dict[tuple[str, str], TaskID] = {}

    def started(self, check: Check) -> None:
        self._tasks[check.name, ""] = self._progress.add_task(check.title, total=1.0)

    def progress(self, check: Check, share: float, subject: str) -> None:
        key = (check.name, subject)
        if key not in self._tasks:
            self._tasks[key] = self._progress.add_task(f"  {subject}", total=1.0)
        self._progress.update(self._tasks[key], completed=share)

    def finished(self, result: Result) -> None:
        for key in [key for key in self._tasks if key[0] == result.check]:
            self._progress.remove_task(self._tasks.pop(key))
        if _worth_a_line(result, self.brief):
            self._progress.console.print(line(result))


class PlainView:
    """One line per finished check, for logs and pipes; with ``brief``, only for failed ones."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.brief = False

    def started(self, check: Check) -> None:
        """Prints nothing."""

    def progress(self, check: Check, share: float, subject: str) -> None:
        """Prints nothing."""

    def finished(self, result: Result) -> None:
        if _worth_a_line(result, self.brief):
            self._console.print(line(result))


View = LiveView | PlainView


def _worth_a_line(result: Result, brief: bool) -> bool:
    """Whether the result gets a line; inapplicable checks are summarised at the end."""
    return result.failed or not (brief or result.verdict is Verdict.NOT_APPLICABLE)


@contextmanager
def watching(console: Console) -> Iterator[View]:
    """The view for ``console``: bars on a terminal, lines elsewhere."""
    if not console.is_terminal:
        yield PlainView(console)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield LiveView(progress)


def line(result: Result) -> str:
    """One finished check in rich's markup."""
    return f"{_STYLES[result.verdict]} {escape(result.title)} [dim]{duration(round(result.seconds, 1))}[/]"


def show(report: Report, console: Console) -> None:
    """The table, a sentence per problem, and the verdict."""
    table = Table(title_justify="left", box=None, pad_edge=False)
    for heading in ("check", "verdict", "measured", "took"):
        table.add_column(heading, justify="right" if heading == "took" else "left", overflow="fold")
    for result in report.results:
        if result.verdict is Verdict.NOT_APPLICABLE:
            continue
        measured = "; ".join(headlines(result)[:_PHRASES]) or ("" if not result.reason else "-")
        table.add_row(result.check, _STYLES[result.verdict], escape(measured), duration(round(result.seconds, 1)))
    console.print(table)
    _absent(report, console)
    for result in report.results:
        if result.verdict in (Verdict.FAIL, Verdict.COULD_NOT_RUN, Verdict.WARN):
            for verdict, sentence in result.problems:
                _say(console, f"{_STYLES[verdict]} {escape(sentence)}")
            if result.failed and result.log:
                _say(console, f"     [dim]its output: {escape(result.log)}[/]")
    color = "green" if report.passed else "bold red"
    console.print(
        f"[{color}]{escape(report.summary)}, {duration(round(report.ended - report.started))}[/]", highlight=False
    )


def _say(console: Console, sentence: str) -> None:
    """A sentence in rich's markup: wrapped on a terminal, one line in a log, so that it can be searched."""
    console.print(sentence, highlight=False, soft_wrap=not console.is_terminal)


def _absent(report: Report, console: Console) -> None:
    reasons: dict[str, list[str]] = {}
    for result in report.results:
        if result.verdict is Verdict.NOT_APPLICABLE:
            reasons.setdefault(result.reason, []).append(result.check)
    for reason, checks in reasons.items():
        _say(console, f"[dim]not applicable ({escape(reason)}): {', '.join(checks)}[/]")
