"""Assess this node as a spare, and publish the verdict to the agent and to Slurm."""

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
from opsd.spares.readiness import PROFILE, assessed
from opsd.spares.state import SpareState


def assess(
    settings: Settings, found: SpareState, source_digest: str, now: float, reports: Sequence[Report] = ()
) -> SpareState:
    """``found`` with a verdict as of the epoch second ``now``, from this node's software and its preflights.

    ``reports`` are considered in addition to the history. ``source_digest`` is as in ``readiness.assessed``. Raises
    HistoryError, ReportError and SelectionError.
    """
    found = replace(found, software=software(settings.agent.node))
    history = History(settings.agent.state_dir / HISTORY)
    preflight = newest(settings.agent.node, PROFILE, CHECKS, settings.preflight, history, reports, now)
    return assessed(found, source_digest, preflight, settings.spare, now)


def publish(settings: Settings, verdict: SpareState, slurm: Callable[[], Slurm]) -> None:
    """Store ``verdict`` for the agent and in the node's comment in Slurm. Raises OSError and SlurmError."""
    state.write(settings.agent.state_dir, verdict)
    said = "ready" if verdict.ready else ",".join(verdict.lacks)
    pool.mark(slurm(), settings.agent.node, said, verdict.checked_at)


def software(node: str) -> dict[str, str]:
    """Versions of this node's software by name, opsd's included."""
    found = versions.run(Context(node, PROFILE, 0.0), lambda _share, _subject: None)
    return {"opsd": __version__, **found.facts}
