"""What people and the agent may ask of a run on several nodes."""

from __future__ import annotations

from collections.abc import Callable

from opsd.launch.io.control import Request
from opsd.launch.quorum.port import Plan


def answer(
    request: Request, plan: Plan | None, head: str | None, between: bool, tell: Callable[..., None], *, waits: bool
) -> Request:
    """Answer ``status``, ``restart`` and ``swap``; what is to be done is told to the head by ``tell``.

    A run that ``waits`` for nodes may be brought a spare: it asks for one, and answers that it is ``coming``.
    """
    command = request.get("cmd")
    if command == "status":
        nodes, spares = (plan.slots, plan.spares) if plan is not None else ((), ())
        return {"nodes": list(nodes), "spares": list(spares), "head": head, "waits": waits}
    if command not in ("restart", "swap"):
        return _refused(f"unknown command {command!r}; known are status, restart, stop, swap")
    if plan is None or between or head is None:
        return _refused("the run is between two generations; ask again in a few seconds")
    reason = str(request.get("reason", ""))
    if command == "restart":
        tell("restart", reason=reason)
        return {"ok": True}
    name = str(request.get("node", ""))
    if name not in plan.slots:
        return _refused(f"{name or 'no node'} runs no ranks of this run; {', '.join(plan.slots)} do")
    if not set(plan.spares) - set(plan.payload["unfit"]):
        if not waits:
            return _refused("the run has no spare")
        tell("spare_wanted", node=name, reason=reason)
        return {**_refused("the run has no spare; one has been asked for"), "coming": True}
    tell("swap", node=name, reason=reason)
    return {"ok": True}


def _refused(why: str) -> Request:
    return {"ok": False, "error": why}
