"""Whether a spare may be used: its data, software and preflight all have to be good, and recently checked.

``publish`` tells the verdict to the agent and to Slurm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from opsd import __version__
from opsd.config import Settings
from opsd.preflight.base import Context
from opsd.preflight.checks import CHECKS, versions
from opsd.preflight.command import HISTORY
from opsd.preflight.history import History, newest
from opsd.preflight.report import Report
from opsd.settings.sections import SpareSettings
from opsd.slurm.ownership import PreflightResult, day
from opsd.slurm.port import Slurm
from opsd.spares import pool
from opsd.spares.pool import SpareState

PROFILE = "spare"


def assessed(
    state: SpareState, source_digest: str, preflight: PreflightResult | None, settings: SpareSettings, now: float
) -> SpareState:
    """``state`` with a verdict as of the epoch second ``now``.

    ``source_digest`` identifies the data that the source has now, "" if it could not be read. The verdict expires when
    the oldest check it is based on is older than ``spare.max_age_s``.
    """
    lacks = {
        "data": _data(state, source_digest, settings, now),
        "software": _software(state.software, settings.software),
        "preflight": _preflight(preflight, settings, now),
    }
    lacks = {topic: why for topic, why in lacks.items() if why}
    grounds = [now, *([state.verified_at] if settings.source else []), *([preflight.at] if preflight else [])]
    expires_at = 0.0 if lacks else min(grounds) + settings.max_age_s
    return replace(state, ready=not lacks, lacks=lacks, checked_at=now, expires_at=expires_at)


def _data(state: SpareState, source_digest: str, settings: SpareSettings, now: float) -> str:
    if not settings.source:
        return ""
    if not state.digest or not state.holds_for(settings):
        return f"nothing is staged from {settings.source} to {settings.folder}; run `opsd spare stage`"
    if state.damaged:
        more = f" and {len(state.damaged) - 1} more" if len(state.damaged) > 1 else ""
        return f"{state.damaged[0]}{more}; run `opsd spare stage` again"
    if source_digest and source_digest != state.digest:
        return f"the data of {day(state.staged_at)} is stale, {settings.source} has other shards now; stage it again"
    if not state.verified_at:
        return "the data must be read and compared first; run `opsd spare verify`"
    if now - state.verified_at > settings.max_age_s:
        return f"the data was last read and compared at {day(state.verified_at)}; run `opsd spare verify`"
    return ""


def _software(found: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    differing = [
        f"{name} is {found.get(name) or 'missing'}, {version} is wanted"
        for name, version in wanted.items()
        if not _agrees(found.get(name, ""), version)
    ]
    return "; ".join(differing)


def _agrees(found: str, wanted: str) -> bool:
    """Whether ``wanted`` is the version or a prefix of it: 2.9 matches 2.9.1 and 2.9+cu129, not 2.90."""
    return found == wanted or (found.startswith(wanted) and not found[len(wanted)].isalnum())


def _preflight(preflight: PreflightResult | None, settings: SpareSettings, now: float) -> str:
    run = f"run `opsd preflight --profile {PROFILE}`"
    if preflight is None:
        return f"it has passed no preflight {PROFILE}; {run}"
    if not preflight.passed:
        return f"it failed preflight {PROFILE} at {day(preflight.at)}; repair it, then {run}"
    if now - preflight.at > settings.max_age_s:
        return f"its last preflight {PROFILE} is of {day(preflight.at)}; {run}"
    return ""


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
    pool.write(settings.agent.state_dir, verdict)
    said = "ready" if verdict.ready else ",".join(verdict.lacks)
    pool.mark(slurm(), settings.agent.node, said, verdict.checked_at)


def software(node: str) -> dict[str, str]:
    """Versions of this node's software by name, opsd's included."""
    found = versions.run(Context(node, PROFILE, 0.0), lambda _share, _subject: None)
    return {"opsd": __version__, **found.facts}
