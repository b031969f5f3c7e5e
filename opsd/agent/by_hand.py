"""What people say of incidents: who has one, and that one is over though the machine cannot know it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from opsd.agent.lifecycle import rises
from opsd.runbooks.base import Acknowledgement, Closing, Finding, Incident, State
from opsd.words import clock, duration

SOCKET: Final = "control.sock"
"""Where in the state folder an agent takes orders, see ``opsd.agent.daemon``."""
PATIENCE_S: Final = 10.0
"""How long a person waits for the tick that carries out the order."""
WRITE_S: Final = 3.0
"""And for the disk then."""
ACKNOWLEDGED: Final = "acknowledged"
"""The state that metrics show for an incident with an acknowledgement in force."""


@dataclass(slots=True)
class Order:
    """What a person asks for: ``ack`` for ``for_s`` (None: to the end) or ``close``, of one incident.

    Who carries it out sets ``done``, and ``error`` if it cannot be done.
    """

    verb: Literal["ack", "close"]
    incident: str
    by: str
    for_s: float | None = None
    reason: str = ""
    done: str = ""
    error: str = ""


class ByHandError(Exception):
    """A person asks for something that cannot be done; the message is one sentence."""


def holder(incident: Incident) -> Acknowledgement | None:
    """The acknowledgement in force."""
    ack = incident.ack
    return ack if ack is not None and ack.over_at is None else None


def acknowledged(incident: Incident, by: str, for_s: float | None, now: float) -> Incident:
    """The incident that the person ``by`` has for ``for_s``, None: to its end. Replaces an earlier acknowledgement.

    Raises ByHandError if the incident is over.
    """
    if incident.resolved_at is not None:
        raise ByHandError(f"{incident.id} is over since {clock(incident.resolved_at)}: there is nothing to acknowledge")
    until = None if for_s is None else now + for_s
    return replace(incident, ack=Acknowledgement(by, now, until))


def lapsed(incident: Incident, now: float, *, worse: bool) -> tuple[Incident, str]:
    """The incident without an acknowledgement that is over now, and why; it and "" while there is none to end.

    It is over after its time, and once the incident is ``worse`` than what was acknowledged.
    """
    ack = holder(incident)
    if ack is None or not (worse or (ack.until is not None and now >= ack.until)):
        return incident, ""
    why = (
        "worse"
        if ack.until is None or worse
        else f"the acknowledgement by {ack.by} was for {duration(ack.until - ack.at)}"
    )
    return replace(incident, ack=replace(ack, over_at=now)), why


def closed(incident: Incident, by: str, reason: str, now: float) -> Incident:
    """The incident, ended by a person. Raises ByHandError if it is over, or while opsd acts on it."""
    if incident.resolved_at is not None:
        raise ByHandError(f"{incident.id} is over since {clock(incident.resolved_at)}: there is nothing to close")
    if incident.state is State.ACTING:
        raise ByHandError(f"opsd is acting on {incident.id}: close it once the action has ended")
    return replace(
        incident,
        state=State.RESOLVED,
        resolved_at=now,
        healthy_since=None,
        verdict=f"closed by {by}: {reason}",
        closed=Closing(by, now, reason),
    )


def is_new(old: Incident, finding: Finding) -> bool:
    """Whether ``finding`` is evidence that ``old`` was not closed on: a later event, or a graver finding."""
    before = old.struck_at if old.struck_at is not None or old.closed is None else old.closed.at
    later = finding.struck_at is not None and before is not None and finding.struck_at > before
    return later or rises(old, finding)


def still_closed(
    old: Incident, finding: Finding | None, healed: bool | None, clear_after_s: float, lost: bool, now: float
) -> Incident | None:
    """The closed incident ``old`` after this tick; None once its evidence is gone or new evidence is there.

    Evidence is gone once the fault was known to be healed for ``clear_after_s``, or if there was none for so long that
    it is ``lost``.
    """
    if finding is not None:
        return None if is_new(old, finding) else replace(old, last_seen_at=now, healthy_since=None)
    since = (old.healthy_since if old.healthy_since is not None else now) if healed else None
    proven = since is not None and now - since >= clear_after_s
    return None if proven or lost else replace(old, healthy_since=since)


def gone(old: Incident, now: float) -> Incident:
    """The closed incident, once its evidence is gone."""
    return old if old.closed is None else replace(old, closed=replace(old.closed, gone_at=now))


def goes_on(ended: Collection[Incident]) -> Mapping[tuple[str, str], Incident]:
    """The closed ones of the ``ended`` incidents (newest first) whose evidence goes on, as far as is known."""
    found = [i for i in ended if i.closed is not None and i.closed.gone_at is None]
    return {(i.kind, i.key): i for i in reversed(found)}


def shifted(incident: Incident, seconds: float) -> Incident:
    """The incident after a step of the wall clock: only what a person said has moved."""
    ack, end = incident.ack, incident.closed
    if ack is not None:
        until = None if ack.until is None else ack.until + seconds
        over_at = None if ack.over_at is None else ack.over_at + seconds
        ack = replace(ack, at=ack.at + seconds, until=until, over_at=over_at)
    if end is not None:
        end = replace(end, at=end.at + seconds)
    return replace(incident, ack=ack, closed=end)


def who_has_it(incident: Incident) -> str:
    """Who has the incident in words, "" if nobody ever had it."""
    if (ack := incident.ack) is None:
        return ""
    if ack.over_at is not None:
        return f"nobody; {ack.by} had it from {clock(ack.at)} to {clock(ack.over_at)}"
    until = "" if ack.until is None or incident.resolved_at is not None else f", until {clock(ack.until)}"
    return f"{ack.by} since {clock(ack.at)}{until}"
