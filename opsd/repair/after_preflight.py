"""Which preflights order the node's repair. Apart from ``order``, which the agent loads."""

from __future__ import annotations

from opsd.config import Settings
from opsd.preflight.quarantine import Drain
from opsd.preflight.report import Report
from opsd.repair.case_file import CaseFile
from opsd.repair.faults import curable
from opsd.repair.order import Ordering


def ordering(report: Report, settings: Settings, drain: Drain) -> Drain:
    """``drain``, which also orders the node's repair if that may be done and can cure what has failed."""
    if settings.policy.repair == "observe" or not _curable(report):
        return drain
    return Ordering(drain, settings.agent.state_dir, acting=settings.policy.repair == "act")


def order_for_refused_job(report: Report, settings: Settings) -> None:
    """Order the repair of a node that refuses a job in Slurm's prolog, for which Slurm drains it. Raises CaseError."""
    policy = settings.policy
    if policy.drain and policy.repair == "act" and report.word == "unfit" and _curable(report):
        CaseFile(settings.agent.state_dir).order(refused=True)


def _curable(report: Report) -> bool:
    return curable(result.check for result in report.results if result.failed)
