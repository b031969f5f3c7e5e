"""The interface between the supervisor of this node's ranks and the control of the whole run; answers to requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from opsd.launch.claims.group import Group
from opsd.launch.hangs.hang import Hang
from opsd.launch.io.control import Request
from opsd.launch.ranks.failure import Failure
from opsd.launch.ranks.ranks import Rank
from opsd.launch.run.messages import RestartWanted, SpareWanted, SwapWanted, ToLeader

RankFailure = tuple[Failure, Rank]
CONTROL = "control"
"""The origin of a stop that was requested on the control socket, not by a signal."""


class RunControl(Protocol):
    """Decides about the run. Each method reports an event on this node."""

    led: bool
    """Whether this launcher was the last to lead the run, as far as it knows."""

    def start_run(self) -> None:
        """The launcher is up; start the first generation."""

    def cannot_start(self, reason: str) -> None:
        """The ranks of the generation could not all be started."""

    def companion_failed(self, reason: str) -> None:
        """A companion on this node has failed; ``reason`` names it."""

    def companion_refused(self, reason: str) -> None:
        """A companion on this node may not run as it is configured: the run ends; ``reason`` is a sentence."""

    def failed(self, found: Sequence[RankFailure]) -> None:
        """Ranks of this node have failed at about the same time."""

    def hung(self, hang: Hang) -> None:
        """The ranks of this node hang; repeated for as long as they do."""

    def ended(self) -> None:
        """All ranks of this node have ended in good order: finished, or stopped as requested."""

    def asked_to_stop(self, by: str) -> None:
        """A checkpoint and stop of the run is requested; repeated requests shorten the wait."""

    def stop_too_slow(self, reason: str) -> None:
        """Ranks that were asked to stop have exceeded the timeout."""

    def interrupted(self) -> None:
        """SIGINT: end at once."""

    def request(self, request: Request) -> Request:
        """The answer to a request on the control socket other than ``stop``."""

    def last_look(self) -> None:
        """The launcher has done and said all; see that the job of the run ends."""

    def close(self) -> None:
        """The launcher ends."""


def answer(
    request: Request, group: Group, *, between: bool, generation: int, tell: Callable[[ToLeader], None], waits: bool
) -> Request:
    """Answer ``status``, ``restart`` and ``swap``; ``tell`` passes what is to be done to the leader.

    A run that ``waits`` for nodes can be given a spare: it asks for one and answers ``coming``.
    """
    command, plan, leader = request.get("cmd"), group.plan, group.leader
    slots = plan.slots if plan is not None else ()
    spares = [name for name in sorted(group.members) if name not in slots] if plan is not None else []
    if command == "status":
        return {"nodes": list(slots), "spares": spares, "head": leader, "waits": waits}
    if command not in ("restart", "swap"):
        return _refused(f"unknown command {command!r}; known are status, restart, stop, swap")
    if plan is None or between or leader is None:
        return _refused("the run is between two generations; ask again in a few seconds")
    reason = str(request.get("reason", ""))
    if command == "restart":
        tell(RestartWanted(generation, reason))
        return {"ok": True}
    name = str(request.get("node", ""))
    if name not in slots:
        return _refused(f"{name or 'no node'} runs no ranks of this run; {', '.join(slots)} do")
    if not set(spares) - set(plan.payload["unfit"]):
        if not waits:
            return _refused("the run has no spare")
        tell(SpareWanted(generation, name, reason))
        return {**_refused("the run has no spare; one has been asked for"), "coming": True}
    tell(SwapWanted(generation, name, reason))
    return {"ok": True}


def _refused(why: str) -> Request:
    return {"ok": False, "error": why}
