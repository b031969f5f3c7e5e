"""What ``--act`` does: drain a node that failed, with its evidence, and return one that passed."""

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
"""Follows opsd's prefix in the reasons of these drains; only such nodes are returned here."""


def reason_for(report: Report, evidence: Path) -> str:
    """The reason of the drain on one line: the failed checks, and where the evidence is."""
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
    """Drain or return the node of ``report``; returns what was done, "" for nothing. Raises SlurmError.

    An interrupted preflight does nothing. A node is returned only if an earlier preflight of the same profile drained
    it, so never if someone else or an incident did, and not if it relapses too often.
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
