"""Why the ranks of one launcher stop: a signal or command reached it, the leader orders it, its own job wants the node.

Whoever asks here asks for the whole run, except for a borrowed node that leaves it.
"""

from __future__ import annotations

from collections.abc import Callable

from opsd import exitcodes
from opsd.launch.claims.group import Group
from opsd.launch.ranks.shutdown import SECOND_STOP_S
from opsd.launch.run import messages
from opsd.launch.run.generation_change import GenerationChange
from opsd.launch.run.messages import Stop, StopReason, ToLeader
from opsd.launch.run.run_control import CONTROL
from opsd.launch.run.shutdown import Shutdown
from opsd.launch.run.supervisor import Supervisor

UNBEGUN_S = 5.0
"""How long a launcher that is stopped before its run has begun looks for a leader to tell."""


class LocalStops:
    """``tell`` reports to the leader; the signals of a ``borrowed`` node concern its own job, not the run."""

    def __init__(
        self,
        node: Supervisor,
        group: Group,
        change: GenerationChange,
        shutdown: Shutdown,
        tell: Callable[[ToLeader], None],
        *,
        borrowed: bool,
    ) -> None:
        self._node, self._group, self._change, self._shutdown = node, group, change, shutdown
        self._tell, self._borrowed = tell, borrowed
        self.wanted: Stop | None = None
        """The first that was asked for here; a new leader has to hear of it."""
        self._stop: Stop | None = None
        self._idle_stops = 0
        """Requests received while no ranks ran here."""
        self._ordered: messages.StopOrdered | None = None
        self._recalled_by = ""

    @property
    def told(self) -> Stop | None:
        """The stop that the ranks here were told, None without one."""
        return self._stop if self._node.stopping else None

    def asked(self, by: str) -> None:
        """Stop here at once, and have all others stop: the signal may have reached this node only."""
        if self._shutdown.begun:
            self._shutdown.exit_now()
            return
        if self._borrowed and by != CONTROL:
            self._recalled_by = by
            self.leave_if_recalled()
            return
        stop = Stop(StopReason.REQUEST) if by == CONTROL else Stop(StopReason.SIGNAL, by)
        if self.wanted or not self._node.stopping:
            self._stop_ranks(stop)
        self.wanted = self.wanted or stop
        self._tell(messages.StopWanted(stop))
        if not self._node.generation.running:
            self._idle_stops += 1
            limit = self._node.settings.stop_timeout_s if self._change.plan is not None else UNBEGUN_S
            limit_s = (limit, min(limit, SECOND_STOP_S), 0.0)[min(self._idle_stops, 3) - 1]
            self._node.loop.later(limit_s, lambda: self._leave_idle(f"stopped after {by}"))

    def _leave_idle(self, reason: str) -> None:
        """Exit if nobody has ended the run; ranks that were started meanwhile stop in their own time."""
        if not self._node.generation.running:
            self._shutdown.leave(exitcodes.REQUEUE, reason)

    def _stop_ranks(self, stop: Stop) -> None:
        self._stop = stop
        self._node.stop(str(stop))

    def leave_if_recalled(self) -> None:
        """If this borrowed node is wanted back, leave once another node has taken its place at a step boundary."""
        if not self._recalled_by:
            return
        why = f"its own job ends ({self._recalled_by})"
        if self._change.at_work:
            self._tell(messages.Leaving(self._node.generation.number, why))
        else:
            self._node.end(lambda: self._shutdown.leave(exitcodes.INTERRUPTED, f"{self._group.own.name} goes: {why}"))

    def too_slow(self, reason: str) -> None:
        """Kill the ranks of this node; the leader ends the run, or goes on from the last checkpoint.

        Ranks that are already being ended belong to a generation change, which continues.
        """
        if self._node.ending:
            return
        late = messages.Late(self._node.generation.number, reason, self.told)
        self._node.end(lambda: self._tell(late))

    def ordered(self, order: messages.StopOrdered) -> None:
        """The leader orders it."""
        self._ordered = order
        self._stop_as_ordered()

    def generation_begun(self) -> None:
        """Other ranks run here now, which have been told nothing yet."""
        self._stop = None
        self._stop_as_ordered()

    def _stop_as_ordered(self) -> None:
        """An order may arrive late, when other ranks run here, or early, before the ranks that it concerns."""
        order = self._ordered
        if order is not None and order.generation == self._node.generation.number and not self._node.stopping:
            self._stop_ranks(order.stop)
