"""A node's newest preflight that ran the whole of a profile."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from opsd.preflight.base import Check
from opsd.preflight.engine import select
from opsd.preflight.history import History
from opsd.preflight.report import Report
from opsd.settings.preflight import PreflightSettings
from opsd.slurm.ownership import PreflightResult

_SEARCHED = 100
SKEW_S: Final = 300.0
"""A run that began later than this from now began by a clock that was wrong, and says nothing of when."""


def newest(
    node: str,
    profile: str,
    checks: Iterable[Check],
    settings: PreflightSettings,
    history: History,
    reports: Iterable[Report] = (),
    now: float | None = None,
) -> PreflightResult | None:
    """The newest preflight ``profile`` of ``node`` in ``history`` and ``reports``, None if there is none.

    One that was restricted by --only or --skip, or interrupted, is left out unless it failed, and so is one that has
    not begun yet at the epoch second ``now``, by default the clock's: it would be the newest for long. Raises
    SelectionError for settings that leave no check, and HistoryError.
    """
    known = tuple(checks)
    runs = [run for run in history.runs(node, _SEARCHED) if run.profile == profile]
    kept = (history.report(run.id) for run in runs)
    given = (report for report in reports if report.node == node and report.profile == profile)
    latest = (time.time() if now is None else now) + SKEW_S
    begun = (report for report in (*given, *kept) if report.started <= latest)
    whole = (r for r in begun if not r.interrupted and (not r.passed or is_whole(r, known, settings)))
    last = max(whole, key=lambda report: report.started, default=None)
    return PreflightResult(last.started, last.passed) if last else None


def is_whole(report: Report, checks: Iterable[Check], settings: PreflightSettings) -> bool:
    """Whether it has all of its profile, but what preflight.skip leaves out. Raises SelectionError."""
    required = {check.name for check in select(tuple(checks), report.profile, skip=settings.skip)}
    return required <= {result.check for result in report.results}
