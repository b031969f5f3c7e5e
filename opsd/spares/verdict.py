"""Judging this node as a spare, and telling the verdict to the agent and to Slurm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from opsd import __version__
from opsd.config import Settings
from opsd.preflight.base import Context
from opsd.preflight.checks import CHECKS, versions
from opsd.preflight.command import HISTORY
from opsd.preflight.history import History
from opsd.preflight.latest import newest
from opsd.preflight.report import Report
from opsd.slurm.port import Slurm
from opsd.spares import pool, state
from opsd.spares.readiness import PROFILE, judged
from opsd.spares.state import SpareState


def judge(
    settings: Settings, found: SpareState, source_digest: str, now: float, reports: Sequence[Report] = ()
) -> SpareState:
    """``found`` with the verdict of the epoch second ``now``, from this node's software and its preflights.

    ``reports`` count beside those of the history. ``source_digest`` is as in ``readiness.judged``. Raises HistoryError,
    ReportError and SelectionError.
    """
    found = replace(found, software=software(settings.agent.node))
    history = History(settings.agent.state_dir / HISTORY)
    proof = newest(settings.agent.node, PROFILE, CHECKS, settings.preflight, history, reports)
    return judged(found, source_digest, proof, settings.spare, now)


def tell(settings: Settings, verdict: SpareState, slurm: Callable[[], Slurm]) -> None:
    """Keep ``verdict`` for the agent, and write it into the node's comment in Slurm. Raises OSError and SlurmError."""
    state.write(settings.agent.state_dir, verdict)
    said = "ready" if verdict.ready else ",".join(verdict.lacks)
    pool.mark(slurm(), settings.agent.node, said, verdict.checked_at)


def software(node: str) -> dict[str, str]:
    """Versions of this node by name, opsd's own among them."""
    found = versions.run(Context(node, PROFILE, 0.0), lambda _share, _subject: None)
    return {"opsd": __version__, **found.facts}
