"""Implements ``--act``: drain a node that failed, with its evidence, and return one that passed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final

from rich.console import Console

from opsd.config import Settings
from opsd.preflight.checks import CHECKS, gpu_inventory
from opsd.preflight.command import keep, say
from opsd.preflight.engine import SelectionError
from opsd.preflight.history import is_whole
from opsd.preflight.report import Report
from opsd.slurm.connect import choose
from opsd.slurm.deferred import SlurmDrainer
from opsd.slurm.drain import OWN_PREFIX
from opsd.slurm.ownership import PreflightResult, Rules, give_back, note_test
from opsd.slurm.port import Slurm, SlurmError

DEFAULT: Final = Rules()
MARK: Final = "preflight"
"""Follows opsd's prefix in the reasons of these drains; only such nodes are returned here."""
Drain = Callable[[str, str], str]
"""Drains a node for a reason, and says what was done. Raises SlurmError."""


def reason_for(report: Report, evidence: Path) -> str:
    """The reason of the drain on one line: the failed checks, and where the evidence is."""
    return f"{MARK} {report.failures}; see {evidence}"


def act(
    report: Report,
    evidence: Path,
    drain: Drain,
    slurm: Callable[[], Slurm],
    rules: Rules = DEFAULT,
    *,
    whole: bool = False,
) -> str:
    """Drain or return the node of ``report``; returns what was done, "" for nothing. Raises SlurmError.

    An interrupted preflight does nothing. A node is returned only if an earlier preflight of the same profile drained
    it and it does not relapse too often. A drain by a person or an incident stays. One that is in service and has
    passed the ``whole`` of ``rules.profile`` counts as tested in its history, which then has its NVLink domain.
    """
    if report.interrupted:
        return ""
    if not report.passed:
        return drain(report.node, reason_for(report, evidence))
    try:
        found = slurm().nodes([report.node])
        if not found or not found[0].reason.startswith(f"{OWN_PREFIX} {MARK} {report.profile} "):
            proved = bool(found) and found[0].usable and whole and report.profile == rules.profile
            noted = proved and note_test(slurm(), report.node, report.started, _domain(report))
            return f"{report.node} counts as tested" if noted else ""
        rules = replace(rules, profile=report.profile)
        passed = {report.node: PreflightResult(report.ended, passed=True)}
        back = give_back(slurm(), [report.node], passed, rules, now=report.ended)
        return f"gave {report.node} back to Slurm" if back else ""
    except SlurmError as error:
        raise SlurmError(f"Slurm: {error}") from error


def _domain(report: Report) -> str:
    """The NVLink domain that the node shares, "" if the driver told none."""
    facts = [result.facts for result in report.results if result.check == gpu_inventory.CHECK.name]
    return facts[0].get(gpu_inventory.DOMAIN, "") if facts else ""


def quarantine(
    report: Report,
    settings: Settings,
    written: Path | None,
    console: Console,
    ordering: Callable[[Drain], Drain] = lambda drain: drain,
) -> None:
    """Tell Slurm the verdict, within the limits of the policy, and print what was done.

    ``written`` is the report as JSON if that was requested; otherwise a copy is stored in the state folder as evidence.
    ``ordering`` makes a drain that orders the node's repair as well.
    """
    evidence = written
    if evidence is None or str(evidence) == "-":
        evidence = settings.agent.state_dir / f"preflight-{report.node}-{report.started:.0f}.json"
        keep(report, {"json": evidence}, None, console)
    slurm = cache(lambda: choose().slurm)
    rules = Rules.of(settings.policy)
    drainer = ordering(SlurmDrainer(slurm, report.node, rules))
    try:
        whole = is_whole(report, CHECKS, settings.preflight)
        done = act(report, evidence.absolute(), drainer, slurm, rules, whole=whole)
    except (SlurmError, SelectionError) as error:
        say(console, f"{report.node} was left as it is: {error}")
    else:
        if done:
            console.print(done, highlight=False, markup=False, soft_wrap=True)
