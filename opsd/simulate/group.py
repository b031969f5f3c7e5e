"""The launchers of a simulated run, as its leader sees them, and the events that it records."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from opsd.launch.claims.claim_store import Plan
from opsd.launch.claims.messages import Body
from opsd.launch.io.protocol import Member
from opsd.launch.run.messages import CODEC, StopOrdered


class SimulatedGroup:
    """``opsd.launch.claims.led.LedGroup`` in which every claim holds; the callbacks are those of the job.

    ``ended`` gets the exit code, the nodes that the next start is to avoid, and what it is to have as ``inherited``.
    """

    def __init__(
        self,
        names: Iterable[str],
        proposed: Callable[[Plan], None],
        ordered: Callable[[StopOrdered], None],
        ended: Callable[[int, tuple[str, ...], Mapping[str, Any]], None],
        inherited: Mapping[str, Any],
    ) -> None:
        self.plan: Plan | None = None
        self.begun = False
        self.leaderless_s = 0.0
        self.inherited = inherited
        self.alive = {name: _member(name) for name in names}
        self.own = next(iter(self.alive))
        self._proposed, self._ordered, self._ended = proposed, ordered, ended

    def join(self, name: str) -> Member:
        """The launcher of ``name`` has come."""
        self.alive[name] = _member(name)
        return self.alive[name]

    def succeed(self, leaderless_s: float, dead: Collection[str]) -> None:
        """The leader is gone: the next node leads, and knows what the newest claim says.

        Those of ``dead`` are lost with it, which nobody has been told of yet: they elect nobody.
        """
        assert self.plan is not None
        heirs = [name for name in (*self.plan.slots, *self.alive) if name in self.alive]
        self.own = next((name for name in heirs if name not in dead), heirs[0])
        self.leaderless_s = leaderless_s
        self.plan = Plan.from_json(self.plan.number, json.loads(json.dumps(self.plan.to_json())))

    def propose(self, slots: tuple[str, ...], payload: Mapping[str, Any]) -> None:
        """See ``LedGroup.propose``."""
        number = self.plan.number + 1 if self.plan is not None else 1
        self.plan = Plan(number, self.own, slots, tuple(self.alive.values()), dict.fromkeys(self.alive, 1), payload)
        self.begun = False
        self._proposed(self.plan)

    def end(self, code: int, reason: str, lost: Sequence[str], unfit: Sequence[str], memory: Mapping[str, Any]) -> None:
        """See ``LedGroup.end``."""
        self._ended(code, (*lost, *unfit), memory)

    def tell_all(self, body: Body) -> None:
        """See ``LedGroup.tell_all``."""
        order = CODEC.decode(body)
        if isinstance(order, StopOrdered):
            self._ordered(order)


def _member(name: str) -> Member:
    return Member(name, name, 1)


class SimulatedLog:
    """``RunEventLog`` that hands each event to ``seen``."""

    def __init__(self, seen: Callable[[Mapping[str, Any]], None]) -> None:
        self.generation = 0
        self._seen = seen

    def emit(self, event: str, age_s: float = 0.0, /, **fields: object) -> None:
        """See ``RunEventLog.emit``."""
        self._seen({"event": event, **fields})

    def relay(self, record: Mapping[str, Any], age_s: float) -> None:
        """See ``RunEventLog.relay``."""
        self._seen(record)
