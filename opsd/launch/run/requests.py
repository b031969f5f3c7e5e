"""What people and the agent may ask of a run."""

from __future__ import annotations

from collections.abc import Callable

from opsd.launch.claims.group import Group
from opsd.launch.io.control import Request
from opsd.launch.run.messages import RestartWanted, SpareWanted, SwapWanted, ToLeader


def answer(
    request: Request, group: Group, *, between: bool, generation: int, tell: Callable[[ToLeader], None], waits: bool
) -> Request:
    """Answer ``status``, ``restart`` and ``swap``; what is to be done is told to the leader by ``tell``.

    A run that ``waits`` for nodes may be brought a spare: it asks for one, and answers that it is ``coming``.
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
