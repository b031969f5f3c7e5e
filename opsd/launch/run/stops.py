"""Orderly stops of a generation on several nodes: for good, or for the swap of a node."""

from __future__ import annotations

from typing import Protocol

from opsd import exitcodes
from opsd.launch.io.messages import say
from opsd.launch.io.run_log import RunLog
from opsd.launch.quorum.port import Quorum
from opsd.launch.run.formation import Formation
from opsd.launch.run.roster import Roster

SWAP = "the swap of "
"""How the reason of a stop begins after which the run goes on without a node."""


class Decisions(Protocol):
    """What the head does once it comes to that."""

    def note_interruption(self) -> None:
        """The run begins to stand still."""
        ...

    def renew(self) -> None:
        """Propose the next generation."""
        ...

    def restart_all(self) -> None:
        """The same at the cost of the steps since the last checkpoint."""
        ...

    def stopped(self, by: str) -> None:
        """All ranks have made their checkpoint and ended, as ``by`` wanted."""
        ...

    def end(self, code: int, reason: str) -> None:
        """The run is over."""
        ...


class Stops:
    """Of one head: who wants the generation to stop, and which of its nodes have ended."""

    def __init__(self, formation: Formation, quorum: Quorum, roster: Roster, log: RunLog, decisions: Decisions) -> None:
        self._formation = formation
        self._quorum = quorum
        self._roster = roster
        self._log = log
        self._decisions = decisions
        self._by = ""
        self._ended: dict[str, str] = {}

    @property
    def for_good(self) -> bool:
        """Whether the generation that stops is the last one of this start."""
        return bool(self._by) and not self._by.startswith(SWAP)

    @property
    def at_work(self) -> set[str]:
        """The nodes whose ranks have not ended."""
        return set(self._formation.slots) - self._ended.keys()

    def forget(self) -> None:
        """Another generation is on its way."""
        self._by, self._ended = "", {}

    def swap(self, node: str, reason: str) -> None:
        """Checkpoint at a step boundary, then go on without ``node``: no step is lost."""
        if self._by or node not in self._formation.slots:
            return
        if not self._roster.retire(node, reason):
            self._roster.refuse_swap(node)
            return
        self._stop_for_swap(node, reason)

    def let_go(self, node: str, reason: str) -> None:
        """The same for a guest that has to leave, and may come again; without a spare one is asked for."""
        if self._by or node not in self._formation.slots:
            return
        if not self._formation.spares:
            self._log.emit("spare_wanted", swap=node, reason=reason)
            return
        self._roster.call_back(node, reason)
        self._stop_for_swap(node, reason)

    def _stop_for_swap(self, node: str, reason: str) -> None:
        self._by = f"{SWAP}{node}"
        self._log.emit("restart_requested", reason=f"{self._by}: {reason}", swap=node)
        self._decisions.note_interruption()
        self._quorum.tell_all({"kind": "order_stop", "by": self._by})

    def restart(self, reason: str) -> None:
        """Restart all ranks at once, unless they are about to stop."""
        if not self._by:
            self._log.emit("restart_requested", reason=reason)
            self._decisions.restart_all()

    def stop(self, by: str) -> None:
        """``by`` wants the run to checkpoint and end."""
        if self.for_good:
            return
        self._by = by
        if self._formation.plan is None or self._formation.changing or self._formation.waiting:
            self._decisions.end(exitcodes.REQUEUE, f"stopped between generations after {by}")
        else:
            self._quorum.tell_all({"kind": "order_stop", "by": by})

    def ended(self, node: str, told: str) -> None:
        """The ranks of ``node`` have ended in order, or as they were ``told`` to, by a head before this one too."""
        self._ended[node] = told
        if self.at_work:
            return
        by = self._by or next(filter(None, self._ended.values()), "")
        if by.startswith(SWAP):
            self._decisions.renew()
        elif by:
            self._decisions.stopped(by)
        else:
            self._decisions.end(exitcodes.OK, "all ranks finished")

    def too_slow(self, told: str, reason: str) -> None:
        """Ranks did not stop in time: a swap then costs the steps since the last checkpoint, and a stop the run."""
        if (self._by or told).startswith(SWAP):
            say(f"{reason}; restarting all ranks")
            self._decisions.restart_all()
        else:
            self._decisions.end(exitcodes.FAILED, reason)
