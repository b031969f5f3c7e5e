"""A planned swap: a node leaves a run at a step boundary and a spare takes its place; no step is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Ask = Callable[[Mapping[str, object]], Mapping[str, Any]]
"""Sends a request to a launcher of the run and returns its answer. Raises an exception with one sentence."""

POLL_S = 0.25
NO_SPARE = "the run has no spare; start it with more nodes than it needs"


class SwapError(Exception):
    """A swap that cannot be or was not done; the message says why in one sentence."""


class UnderWay(SwapError):
    """The launcher agreed, and the step or the checkpoint takes longer than there was patience."""


@dataclass(frozen=True, slots=True)
class Members:
    """Who takes part in a run: nodes with ranks by node rank, its spares, and the node that leads.

    A run that ``waits`` for nodes may be brought a spare. ``generation`` is the one of the launcher that was asked.
    """

    nodes: tuple[str, ...]
    spares: tuple[str, ...]
    head: str
    waits: bool
    generation: int = 0

    @classmethod
    def of(cls, status: Mapping[str, Any]) -> Members:
        """The members in a launcher's answer to ``status``. A launcher of one node tells only its own name."""
        nodes = _names(status.get("nodes")) or _names([status.get("node", "")])
        generation = status.get("generation")
        return cls(
            nodes,
            _names(status.get("spares")),
            str(status.get("head") or ""),
            status.get("waits") is True,
            generation if isinstance(generation, int) else 0,
        )

    def why_not(self, node: str) -> str:
        """Why ``node`` cannot be swapped out, "" if it can."""
        if node not in self.nodes:
            return f"{node} runs no ranks of this run; {', '.join(self.nodes) or 'no node'} does"
        return "" if self.spares or self.waits else NO_SPARE


def planned_swap(
    ask: Ask,
    node: str,
    reason: str,
    *,
    patience_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Have ``node`` swapped out, wait until it has no ranks any more, and say who took over.

    A run without a spare may be brought one, from a pool; that is waited for. Another head, or a later generation with
    ``node`` in it, is asked again. Raises SwapError if that cannot be or the
    launcher refuses, UnderWay if it agreed and ``node`` is still there after ``patience_s`` seconds, and whatever
    ``ask`` raises.
    """
    deadline = clock() + patience_s
    before = Members.of(ask({"cmd": "status"}))
    if node not in before.nodes:
        raise SwapError(before.why_not(node))
    answer = ask({"cmd": "swap", "node": node, "reason": reason})
    if answer.get("coming") is True:
        while not (before := Members.of(ask({"cmd": "status"}))).spares:
            if clock() > deadline:
                raise SwapError(f"the run has no spare; one was asked for and has not come within {patience_s:g} s")
            sleep(POLL_S)
        answer = ask({"cmd": "swap", "node": node, "reason": reason})
    elif not before.spares:
        raise SwapError(NO_SPARE)
    if answer.get("ok") is not True:
        raise SwapError(f"the launcher refused: {answer.get('error') or 'no reason given'}")
    told = before.head, before.generation
    while node in (now := Members.of(ask({"cmd": "status"}))).nodes:
        if now.head and told != (now.head, now.generation):
            # Who was to see to it is head no more, or all ranks were restarted before it came to that.
            again = ask({"cmd": "swap", "node": node, "reason": reason})
            told = (now.head, now.generation) if again.get("ok") is True else told
        if clock() > deadline:
            raise UnderWay(f"{node} leaves at the next step boundary; the launcher agreed {patience_s:.0f} s ago")
        sleep(POLL_S)
    came = [name for name in now.nodes if name not in before.nodes]
    return f"{node} is out of the run, {', '.join(came) or 'nobody'} took its place"


def _names(value: object) -> tuple[str, ...]:
    listed: Sequence[object] = value if isinstance(value, list) else []
    return tuple(name for name in listed if isinstance(name, str) and name)
