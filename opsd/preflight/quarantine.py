"""What ``--act`` does with a verdict: a node that failed is drained with its evidence, one that passed given back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from opsd.preflight.report import Report
from opsd.slurm.drain import OWN_PREFIX
from opsd.slurm.ownership import PreflightResult, Rules, give_back
from opsd.slurm.port import Slurm, SlurmError

DEFAULT: Final = Rules()
MARK: Final = "preflight"
"""The reasons of these drains begin with it, after opsd's prefix: only such nodes are given back here."""


def reason_for(report: Report, evidence: Path) -> str:
    """Why the node is out of service, in one line: the checks that failed, and where to read more."""
    failed = [result.check for result in report.results if result.failed]
    names = ", ".join(failed[:3]) + (f" and {len(failed) - 3} more" if len(failed) > 3 else "")
    return f"{MARK} {report.profile} failed: {names or 'no check ran'}; see {evidence}"


def act(
    report: Report,
    evidence: Path,
    drain: Callable[[str, str], str],
    slurm: Callable[[], Slurm],
    rules: Rules = DEFAULT,
) -> str:
    """Drain or give back the node of ``report`` and say what was done, "" if nothing. Raises SlurmError.

    An interrupted preflight knows nothing and does nothing. A node is given back only if it was an earlier preflight of
    the same profile that took it out, and never if somebody else or an incident did, or if it comes back too often.
    """
    if report.interrupted:
        return ""
    if not report.passed:
        return drain(report.node, reason_for(report, evidence))
    try:
        found = slurm().nodes([report.node])
        if not found or not found[0].reason.startswith(f"{OWN_PREFIX} {MARK} {report.profile} "):
            return ""
        rules = replace(rules, profile=report.profile)
        passed = {report.node: PreflightResult(report.ended, passed=True)}
        back = give_back(slurm(), [report.node], passed, rules, now=report.ended)
        return f"gave {report.node} back to Slurm" if back else ""
    except SlurmError as error:
        raise SlurmError(f"Slurm: {error}") from error
