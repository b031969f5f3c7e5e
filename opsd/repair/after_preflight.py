"""Which preflights order the node's repair. Apart from ``order``, which the agent loads."""

from __future__ import annotations

from opsd.config import Settings
from opsd.preflight.base import Verdict
from opsd.preflight.checks import leftovers
from opsd.preflight.command import Drain
from opsd.preflight.report import Report, Result
from opsd.repair.case_file import CaseFile, Ordering
from opsd.repair.retest import curable


def ordering(report: Report, settings: Settings, drain: Drain) -> Drain:
    """``drain``, which also orders the node's repair if that may be done and can cure what has failed."""
    if settings.policy.repair == "observe" or not _curable(report):
        return drain
    return Ordering(drain, settings.agent.state_dir, acting=settings.policy.repair == "act")


def order_for_refused_job(report: Report, settings: Settings) -> None:
    """Order the repair of a node that refuses a job in Slurm's prolog, for which Slurm drains it. Raises CaseError."""
    policy = settings.policy
    if policy.drain and policy.repair == "act" and report.word == "unfit" and _curable(report):
        CaseFile(settings.agent.state_dir).order(report.failures)


def _curable(report: Report) -> bool:
    failed = [result for result in report.results if result.failed]
    return curable(result.check for result in failed) and not any(_fills_memory(result) for result in failed)


def _fills_memory(result: Result) -> bool:
    """Whether old files in /dev/shm are what was left behind, or nobody could look: no remedy removes files."""
    left = result.check == leftovers.CHECK.name
    return left and (
        result.verdict is not Verdict.FAIL or any(value.verdict is Verdict.FAIL for value in result.values)
    )
