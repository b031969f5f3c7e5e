"""The repairs of this node, as the page and `opsd status` show them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from opsd.agent.loop import Snapshot
from opsd.agent.web.html import Html, card, join, pill, table
from opsd.collectors.base import RepairFact, RepairStep
from opsd.words import span

MAX_SHOWN: Final = 5
TONES: Final = {"returned": "good", "rma": "bad", "left": "bad"}


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


def repair_card(snapshot: Snapshot) -> Html:
    """The newest repairs with what was done, newest first; empty without any."""
    if not snapshot.repairs:
        return Html("")
    rows = [_row(repair, snapshot.wall) for repair in [*reversed(snapshot.repairs)][:MAX_SHOWN]]
    columns = ("Repair", "Drained for", "What was done", "How it ended")
    return card("repairs", "Repairs of this node", table("Repairs", columns, rows, sentences=True))


def _row(repair: RepairFact, wall: float) -> Sequence[object]:
    steps = join((_step(step) for step in repair.attempts), " ")
    said = join((pill(repair.state, TONES.get(repair.state, "warn")), repair.verdict), " ")
    return f"{span(wall - repair.opened_at)} ago", repair.reason, steps or "nothing yet", said


def _step(step: RepairStep) -> Html:
    """A step with its outcome in words: ``reset_gpus done``."""
    return pill(f"{step.what} {outcome(step.ok)}", {True: "good", False: "bad", None: "warn"}[step.ok])


def outcome(ok: bool | None) -> str:
    """How a step of a repair has ended, in a word."""
    return {True: "done", False: "failed", None: "under way"}[ok]
