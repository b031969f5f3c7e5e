"""Whether a spare may be used: its data, software and preflight all have to be good, and recently checked. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from opsd.settings.spare import SpareSettings
from opsd.slurm.ownership import PreflightResult, day
from opsd.spares.state import SpareState

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
