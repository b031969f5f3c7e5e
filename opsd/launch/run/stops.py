"""Orderly stops of a generation on several nodes: for good, or for the swap of a node."""

from __future__ import annotations

from typing import Protocol

from opsd import exitcodes
from opsd.launch.claims.group import Group
from opsd.launch.io.reporting import say
from opsd.launch.io.run_log import Log
from opsd.launch.run.messages import CODEC, Stop, StopOrdered, Why
from opsd.launch.run.nodes import Formation, NodeHealth


class Decisions(Protocol):
    """What the leader does once it comes to that."""

    def note_interruption(self) -> None:
        """The run begins to stand still."""
        ...

    def renew(self) -> None:
        """Propose the next generation."""
        ...

    def restart_all(self) -> None:
        """The same at the cost of the steps since the last checkpoint."""
        ...

    def stopped(self, stop: Stop) -> None:
        """All ranks have made their checkpoint and ended, as they were told to."""
        ...

    def end(self, code: int, reason: str) -> None:
        """The run is over."""
        ...


class Stops:
    """Of one leader: who wants the generation to stop, and which of its nodes have ended."""

    def __init__(self, formation: Formation, group: Group, health: NodeHealth, log: Log, decisions: Decisions) -> None:
        self._formation = formation
        self._group = group
        self._health = health
        self._log = log
        self._decisions = decisions
        self._stop: Stop | None = None
        self._ended: dict[str, Stop | None] = {}
        self._leaving: dict[str, str] = {}
        """Borrowed nodes for which there was no spare, and why they have to leave."""

    @property
    def for_good(self) -> bool:
        """Whether the generation that stops is the last one of this start."""
        return self._stop is not None and self._stop.for_good

    @property
    def at_work(self) -> set[str]:
        """The nodes whose ranks have not ended."""
        return set(self._formation.slots) - self._ended.keys()

    def forget(self) -> None:
        """Another generation is on its way."""
        self._stop, self._ended, self._leaving = None, {}, {}

    def swap(self, node: str, reason: str) -> None:
        """Checkpoint at a step boundary, then go on without ``node``: no step is lost."""
        if self._stop or node not in self._formation.slots:
            return
        if not self._health.retire(node, reason):
            self._health.refuse_swap(node)
            return
        self._stop_for_swap(node, reason)

    def let_go(self, node: str, reason: str) -> None:
        """The same for a borrowed node that has to leave and may return; without a spare, ask for one and wait."""
        if self._stop or node not in self._formation.slots:
            return
        if not self._formation.spares:
            if node not in self._leaving:
                self._log.emit("spare_wanted", swap=node, reason=reason)
            self._leaving[node] = reason
            return
        self._health.call_back(node, reason)
        self._stop_for_swap(node, reason)

    def spare_ready(self) -> None:
        """A spare says that it may be used: let go who waits for one."""
        if self._leaving and not self._formation.changing and not self._formation.waiting:
            node, reason = next(iter(self._leaving.items()))
            self.let_go(node, reason)

    def _stop_for_swap(self, node: str, reason: str) -> None:
        stop = Stop(Why.SWAP, node)
        self._log.emit("restart_requested", reason=f"{stop}: {reason}", swap=node)
        self._decisions.note_interruption()
        self._order(stop)

    def _order(self, stop: Stop) -> None:
        self._stop = stop
        self._group.tell_all(CODEC.encode(StopOrdered(self._log.generation, stop)))

    def restart(self, reason: str) -> None:
        """Restart all ranks at once, unless they are about to stop."""
        if self._stop is None:
            self._log.emit("restart_requested", reason=reason)
            self._decisions.restart_all()

    def stop(self, stop: Stop) -> None:
        """Somebody wants the run to checkpoint and end."""
        if self.for_good:
            return
        if self._formation.plan is None or self._formation.changing or self._formation.waiting:
            self._stop = stop
            self._decisions.end(exitcodes.REQUEUE, f"stopped between generations after {stop}")
        else:
            self._order(stop)

    def ended(self, node: str, told: Stop | None) -> None:
        """The ranks of ``node`` have ended in order, or as they were ``told`` to, by a leader before this one too."""
        self._ended[node] = told
        if self.at_work:
            return
        stop = self._stop or next(filter(None, self._ended.values()), None)
        if stop is None:
            self._decisions.end(exitcodes.OK, "all ranks finished")
        elif stop.for_good:
            self._decisions.stopped(stop)
        else:
            self._take_over(stop)
            self._decisions.renew()

    def _take_over(self, stop: Stop) -> None:
        """Go on with a swap that a leader before this one has ordered."""
        if self._stop is None and stop.what not in self._health.unfit:
            self._health.retire(stop.what, str(stop))

    def ranks_gone(self, node: str) -> None:
        """The ranks of ``node`` no longer run: the others cannot stop in good order any more."""
        if self.for_good:
            self._decisions.end(exitcodes.REQUEUE, f"the ranks of {node} were gone when the run was to stop")
        else:
            say(f"the ranks of {node} no longer run; restarting all ranks")
            self._decisions.restart_all()

    def too_slow(self, told: Stop | None, reason: str) -> None:
        """Ranks did not stop in time: a swap then costs the steps since the last checkpoint, and a stop the run."""
        stop = self._stop or told
        if stop is not None and not stop.for_good:
            say(f"{reason}; restarting all ranks")
            self._take_over(stop)
            self._decisions.restart_all()
        else:
            self._decisions.end(exitcodes.FAILED, reason)
