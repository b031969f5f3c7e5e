"""``opsd undrain``: a node back into service."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from opsd.commands.node_service import Sentences, node_options, node_service, write_evidence
from opsd.commands.options import exit_codes, option
from opsd.commands.settings import BadConfig, load
from opsd.config import Settings
from opsd.preflight.checks import CHECKS
from opsd.preflight.command import HISTORY
from opsd.preflight.engine import SelectionError
from opsd.preflight.history import History, HistoryError, newest
from opsd.preflight.report import Report, ReportError
from opsd.slurm.deferred import DeferredUpdate
from opsd.slurm.ownership import PreflightResult


@click.command(
    "undrain",
    epilog=exit_codes(
        {
            0: "the nodes are in service",
            1: "a rule forbids it, or Slurm refused or does not answer",
            2: "the command line is wrong",
        }
    ),
)
@node_options
@option("--report", "reports", multiple=True, type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Preflight report (--json) of a node that is not this one. Repeatable.")  # fmt: skip
@option("--force", is_flag=True, help="Without a passed preflight, and in spite of relapses.")
@option("--reason", "text", help="Why, with --force.")
def undrain(
    nodes: tuple[str, ...],
    file: Path | None,
    overrides: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
    reports: tuple[Path, ...],
    force: bool,
    text: str | None,
) -> int:
    """Give NODE... that opsd has drained back to Slurm.

    Each must have passed the preflight of policy.return_profile since its drain; a node that fails again and again
    soon after its return is left to people. If Slurm does not answer, the agent of this machine does it later, once,
    provided it may: it runs as root, or policy.drain is on.
    """
    if force != (text is not None):
        raise click.UsageError("--force and --reason belong together: say why the checks are passed over")
    settings, say = load(file, overrides), Sentences(as_json)
    service = node_service(settings, say)
    proved = proofs(settings, nodes, [_read_report(path) for path in reports])
    by_force = force and not dry_run
    evidence = write_evidence(settings, file, nodes, f"given back by force: {text}", None, service) if by_force else ""
    update = DeferredUpdate("return", nodes, service.now, "", force, proved)
    return say.conclude(update, service.apply(update, dry_run, evidence))


def proofs(settings: Settings, nodes: Sequence[str], reports: Sequence[Report]) -> dict[str, PreflightResult]:
    """The newest preflight of the required profile of each node, from ``reports`` and from this node's history."""
    profile, history = settings.policy.return_profile, History(settings.agent.state_dir / HISTORY)
    try:
        found = {node: newest(node, profile, CHECKS, settings.preflight, history, reports) for node in nodes}
    except (HistoryError, ReportError, SelectionError) as error:
        raise BadConfig(str(error)) from error
    return {node: proof for node, proof in found.items() if proof}


def _read_report(path: Path) -> Report:
    try:
        return Report.from_json(path.read_bytes())
    except (ReportError, OSError) as error:
        raise BadConfig(f"{path}: {error}") from error
