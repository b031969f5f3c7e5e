"""Which drains by a preflight order the node's repair. Apart from ``order``, which the agent loads."""

from __future__ import annotations

from opsd.config import Settings
from opsd.preflight.quarantine import Drain
from opsd.preflight.report import Report
from opsd.repair.faults import curable
from opsd.repair.order import Ordering


def ordering(report: Report, settings: Settings, drain: Drain) -> Drain:
    """``drain``, which also orders the node's repair if that may be done and can cure what has failed."""
    if settings.policy.repair == "observe" or not curable(result.check for result in report.results if result.failed):
        return drain
    return Ordering(drain, settings.agent.state_dir, acting=settings.policy.repair == "act")
