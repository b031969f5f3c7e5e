"""Orderly stops of a generation, final or for the swap of a node."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import TYPE_CHECKING

from opsd import exitcodes
from opsd.events import RestartRequested, SpareWanted
from opsd.launch.claims.election import LeaderView
from opsd.launch.io.reporting import print_message
from opsd.launch.io.run_log import RunEventLog
from opsd.launch.run.messages import CODEC, Stop, StopOrdered, StopReason
from opsd.launch.run.nodes import GenerationPlanner, NodeHealth

if TYPE_CHECKING:
    from opsd.launch.run.leader import Leader


class StopCoordinator:
    """Of one leader: which stop the generation makes, and which of its nodes have ended."""

    def __init__(
        self,
        formation: GenerationPlanner,
        group: LeaderView,
        health: NodeHealth,
        log: RunEventLog,
        callbacks: Leader,
        say: Callable[[str], None] = print_message,
    ) -> None:
        self._planner = formation
        self._group = group
        self._health = health
        self._log = log
        self._callbacks = callbacks
        self._say = say
        self._stop: Stop | None = None
        self._ended: dict[str, Stop | None] = {}
        self._cut_off = False
        self._slots: tuple[str, ...] = ()
        self._at_work: set[str] = set()
        """Those of ``_slots`` that have not ended: thousands end at once, so each only takes itself out."""
        self._leaving: dict[str, str] = {}
        """Borrowed nodes without a spare for them, and why they have to leave."""

    @property
    def final(self) -> bool:
        """Whether the generation is the last one of this start."""
        return self._stop is not None and self._stop.final

    @property
    def at_work(self) -> Set[str]:
        """The nodes whose ranks have not ended; the set changes as they end."""
        if self._slots is not self._planner.slots:
            self._slots = self._planner.slots
            self._at_work = set(self._slots) - self._ended.keys()
        return self._at_work

    def forget(self) -> None:
        """Another generation is proposed."""
        self._stop, self._ended, self._cut_off, self._leaving = None, {}, False, {}
        self._slots, self._at_work = (), set()

    def swap(self, node: str, reason: str) -> None:
        """Checkpoint at a step boundary, then go on without ``node``: no step is lost."""
        if self._stop or node not in self._planner.placed:
            return
        if not self._health.retire(node, reason):
            self._health.refuse_swap(node)
            return
        self._stop_for_swap(node, reason)

    def release(self, node: str, reason: str) -> None:
        """The same for a borrowed node that has to leave and may return; without a spare, ask for one and wait."""
        if self._stop or node not in self._planner.placed:
            return
        if not self._planner.spares:
            if node not in self._leaving:
                self._log.emit("spare_wanted", **SpareWanted(swap=node, reason=reason))
            self._leaving[node] = reason
            return
        self._health.withdraw(node, reason)
        self._stop_for_swap(node, reason)

    def grow(self) -> None:
        """The same to take in the spares of a run that has fewer nodes than it may."""
        if self._stop is None:
            stop = Stop(StopReason.GROW, ", ".join(sorted(self._planner.spares)))
            reason = f"{stop}: the run has fewer nodes than it may"
            self._log.emit("restart_requested", **RestartRequested(reason=reason))
            self._callbacks.note_interruption()
            self._order(stop)

    def spare_ready(self) -> None:
        """A spare may be used: release a node that waits for one."""
        if self._leaving and not self._planner.changing and not self._planner.waiting:
            node, reason = next(iter(self._leaving.items()))
            self.release(node, reason)

    def _stop_for_swap(self, node: str, reason: str) -> None:
        stop = Stop(StopReason.SWAP, node)
        self._log.emit("restart_requested", **RestartRequested(reason=f"{stop}: {reason}", swap=node))
        self._callbacks.note_interruption()
        self._order(stop)

    def _order(self, stop: Stop) -> None:
        self._stop = stop
        self._group.tell_all(CODEC.encode(StopOrdered(self._log.generation, stop)))

    def restart(self, reason: str) -> None:
        """Restart all ranks at once, unless they are stopping."""
        if self._stop is None:
            self._log.emit("restart_requested", **RestartRequested(reason=reason))
            self._callbacks.restart_all()

    def stop(self, stop: Stop) -> None:
        """Checkpoint and end the run."""
        if self.final:
            return
        if self._planner.plan is None or self._planner.changing or self._planner.waiting:
            self._stop = stop
            self._callbacks.end(exitcodes.REQUEUE, f"stopped between generations after {stop}")
        else:
            self._order(stop)

    def ended(self, node: str, told: Stop | None, *, cut_off: bool) -> None:
        """The ranks of ``node`` have ended by themselves, or as they were ``told``, possibly by a previous leader."""
        self._ended[node] = told
        self._cut_off = self._cut_off or cut_off
        self._at_work.discard(node)
        if self.at_work:
            return
        stop = self._stop or next(filter(None, self._ended.values()), None)
        if stop is None:
            self._callbacks.end(exitcodes.OK, "all ranks finished")
        elif stop.final:
            self._callbacks.stopped(stop, cut_off=self._cut_off)
        else:
            self._take_over(stop)
            self._callbacks.propose_next()

    def _take_over(self, stop: Stop) -> None:
        """Continue a swap that a previous leader has ordered."""
        if self._stop is None and stop.why is StopReason.SWAP and stop.what not in self._health.unfit:
            self._health.retire(stop.what, str(stop))

    def ranks_gone(self, node: str) -> None:
        """The ranks of ``node`` no longer run: the others cannot stop in good order any more."""
        if self.final:
            self._callbacks.end(exitcodes.REQUEUE, f"the ranks of {node} were gone when the run was to stop")
        else:
            self._say(f"the ranks of {node} no longer run; restarting all ranks")
            self._callbacks.restart_all()

    def too_slow(self, told: Stop | None, reason: str) -> None:
        """Ranks exceeded the stop timeout: a swap restarts from the last checkpoint, a final stop fails the run."""
        stop = self._stop or told
        if stop is not None and not stop.final:
            self._say(f"{reason}; restarting all ranks")
            self._take_over(stop)
            self._callbacks.restart_all()
        else:
            self._callbacks.end(exitcodes.FAILED, reason)
