"""The repair of this node, as the page and `opsd status` show it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from opsd.agent.loop import Snapshot
from opsd.agent.web.parts import span


@dataclass(frozen=True, slots=True)
class RepairNow:
    """A repair that is ordered or under way, or that has left this node out of service.

    ``state`` is a value of ``opsd_repair_state``; ``age_s`` is None once it has ended.
    """

    state: str
    attempts: int
    age_s: float | None

    @property
    def text(self) -> str:
        """In a few words: ``retest, remedy 2, for 12 min``."""
        remedy = f", remedy {self.attempts}" if self.attempts else ""
        return f"{self.state}{remedy}" + (f", for {span(self.age_s)}" if self.age_s is not None else "")


def repair_now(snapshot: Snapshot) -> RepairNow | None:
    """None if nothing is to be said of one: there was none, or the node is back in service."""
    state = next((sample.labels[0] for sample in snapshot.select("opsd_repair_state") if sample.value), None)
    age_s = snapshot.value("opsd_repair_age_seconds")
    in_service = any(s.labels == ("drain",) and s.value == 0 for s in snapshot.select("opsd_slurm_node_flag"))
    if state is None or state == "returned" or (age_s is None and in_service):
        return None
    return RepairNow(state, int(snapshot.value("opsd_repair_attempts") or 0), age_s)
