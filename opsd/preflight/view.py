"""Terminal output: a line per check that fills up while it runs, then one table and a sentence per problem."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from opsd.preflight.base import Check, Verdict
from opsd.preflight.formats import headlines
from opsd.preflight.report import Report, Result
from opsd.preflight.units import duration

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
