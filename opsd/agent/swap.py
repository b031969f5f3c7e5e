"""A planned swap: a spare replaces a node of a run at a step boundary, and no step is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Ask = Callable[[Mapping[str, object]], Mapping[str, Any]]
"""Sends a request to a launcher of the run and returns its answer. Raises an exception whose text is one sentence."""

POLL_S = 0.25
NO_SPARE = "the run has no spare; start it with more nodes than it needs"


class SwapError(Exception):
    """A swap that is impossible or failed; the message says why in one sentence."""


class NotInRun(SwapError):
    """The node has no ranks of the run."""


class UnderWay(SwapError):
    """The launcher agreed, but the step or the checkpoint takes longer than the limit of the wait."""


@dataclass(frozen=True, slots=True)
class Members:
    """The nodes of a run: those with ranks by node rank, its spares, and its leader.

    A run that ``waits`` for nodes may get a spare. ``generation`` is that of the launcher that was asked.
    """

    nodes: tuple[str, ...]
    spares: tuple[str, ...]
    leader: str
    waits: bool
    generation: int = 0

    @classmethod
    def of(cls, status: Mapping[str, Any]) -> Members:
        """The members in a launcher's answer to ``status``. A launcher of one node reports only its own name."""
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
) -> tuple[str, ...]:
    """Ask for ``node`` to be swapped out, wait until it has no ranks, and return which nodes have come.

    A run without a spare may get one from a pool, for which this waits. A new leader, or a later generation that still
    has ``node``, is asked again. Raises NotInRun if ``node`` has no ranks, and SwapError if the swap is impossible or
    the launcher refuses. Raises UnderWay if the launcher agreed and ``node`` still has ranks after ``patience_s``
    seconds. Errors of ``ask`` pass.
    """
    deadline = clock() + patience_s
    before = Members.of(ask({"cmd": "status"}))
    if node not in before.nodes:
        raise NotInRun(before.why_not(node))
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
    told = before.leader, before.generation
    while node in (now := Members.of(ask({"cmd": "status"}))).nodes:
        if now.leader and told != (now.leader, now.generation):
            # The leader that had agreed was replaced, or all ranks were restarted before the swap.
            again = ask({"cmd": "swap", "node": node, "reason": reason})
            told = (now.leader, now.generation) if again.get("ok") is True else told
        if clock() > deadline:
            raise UnderWay(f"{node} leaves at the next step boundary; the launcher agreed {patience_s:.0f} s ago")
        sleep(POLL_S)
    return tuple(name for name in now.nodes if name not in before.nodes)


def swapped_out(node: str, came: Sequence[str]) -> str:
    """The result of ``planned_swap`` as text."""
    return f"{node} is out of the run, {', '.join(came) or 'nobody'} took its place"


def _names(value: object) -> tuple[str, ...]:
    listed: Sequence[object] = value if isinstance(value, list) else []
    return tuple(name for name in listed if isinstance(name, str) and name)
