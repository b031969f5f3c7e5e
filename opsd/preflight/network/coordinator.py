"""The coordinator of a network check, on the first node: waits for the nodes, hands out tests, collects results."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Final, Literal

from pydantic import TypeAdapter

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

Pattern = Literal["pairs", "ring", "permutations", "incast", "collective"]


@dataclass(frozen=True, slots=True)
class Spec:
    """One measurement by a group of nodes.

    ``members`` are node numbers in rank order. ``size`` is in bytes: of a message for the patterns, in total for a
    collective. ``name`` is the collective. It runs for ``seconds`` and at least ``iterations``. The coordinator adds
    the number of the test, how many ``processes`` each node has, and after how long the test is ended.
    """

    members: tuple[int, ...]
    pattern: Pattern
    size: int
    iterations: int
    seconds: float
    name: str = ""
    test: int = 0
    deadline_s: float = 60.0
    backend: str = "gloo"
    processes: int = 1


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a test, on a node or on the slowest: seconds of each iteration, or why it failed."""

    seconds: tuple[float, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Joined:
    """A participating node and how many processes it could have: one per GPU, or one without (``backend`` gloo)."""

    node: int
    name: str
    processes: int
    version: str
    backend: str = "gloo"


_POLL_S: Final = 0.02
_GRACE_S: Final = 10.0


class Coordinator:
    """Communicates with the nodes through the store. A node that did not answer once is not waited for again.

    Every node takes part with as many ``processes`` as all that have joined can have, of two nodes without GPUs if one
    has none.
    """

    def __init__(self, store: TCPStore, nodes: int, *, backend: str = "gloo", deadline_s: float = 60.0) -> None:
        self._store = store
        self._nodes = nodes
        self._backend = backend
        self.processes = 1
        self._deadline_s = deadline_s
        self._numbers = count()
        self._orders: dict[int, int] = {}
        self.silent: set[int] = set()

    def gather(self, seconds: float) -> dict[int, Joined]:
        """The nodes that have joined: once all have, or after ``seconds``."""
        joined: dict[int, Joined] = {}
        deadline = time.monotonic() + seconds
        while len(joined) < self._nodes and time.monotonic() < deadline:
            for node in range(self._nodes):
                if node not in joined and self._store.check([f"join/{node}"]):
                    joined[node] = TypeAdapter(Joined).validate_json(self._store.get(f"join/{node}"))
            time.sleep(_POLL_S)
        self.processes = min((one.processes for one in joined.values()), default=1)
        if self._nodes == 2 and "gloo" in {one.backend for one in joined.values()}:
            self._backend, self.processes = "gloo", 1
        return joined

    def measure(self, round_of: Sequence[Spec]) -> list[Done]:
        """Make the measurements of one round in parallel; they must not share a node."""
        specs = [
            replace(
                spec,
                test=next(self._numbers),
                deadline_s=self._deadline_s,
                backend=self._backend,
                processes=self.processes,
            )
            for spec in round_of
        ]
        for spec in specs:
            if self.silent.isdisjoint(spec.members):
                text = TypeAdapter(Spec).dump_json(spec).decode()
                for node in spec.members:
                    self._order(node, text)
        deadline = time.monotonic() + self._deadline_s + _GRACE_S
        return [self._collect(spec, deadline) for spec in specs]

    def stop(self) -> None:
        """Tell every node to stop."""
        for node in range(self._nodes):
            self._order(node, "stop")

    def _order(self, node: int, text: str) -> None:
        number = self._orders.get(node, 0)
        self._orders[node] = number + 1
        self._store.set(f"order/{node}/{number}", text)

    def _collect(self, spec: Spec, deadline: float) -> Done:
        absent = self.silent & {*spec.members}
        if absent:
            return Done(error=f"node {min(absent)} is silent")
        waiting = {*spec.members}
        answers: dict[int, Done] = {}
        while waiting and time.monotonic() < deadline:
            for node in sorted(waiting):
                key = f"done/{spec.test}/{node}"
                if self._store.check([key]):
                    answers[node] = TypeAdapter(Done).validate_json(self._store.get(key))
                    waiting.discard(node)
            time.sleep(_POLL_S)
        if waiting:
            self.silent |= waiting
            return Done(error=f"node {min(waiting)} did not answer")
        return slowest(answers)


def slowest(answers: Mapping[int, Done]) -> Done:
    """Each iteration's slowest node; if one node failed, the test failed."""
    failed = {node: done.error for node, done in answers.items() if done.error}
    if failed:
        node = min(failed)
        return Done(error=f"node {node}: {failed[node]}")
    return Done(tuple(max(values) for values in zip(*(done.seconds for done in answers.values()), strict=True)))
