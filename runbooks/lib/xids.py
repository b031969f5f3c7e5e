"""Pure helpers about Xids: their GPU and rank, their frequency, and whether the program or the GPU is the cause."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from opsd.collectors.base import Event, RankFact
from opsd.runbooks.base import Incident, View
from opsd.runbooks.lib.runs import ranks_of
from opsd.runbooks.lib.signals import grouped, integer, text

DAY_S = 86_400.0
BURST_GAP_S = 60.0
"""Xids of one code on one GPU that lie closer together than this are one burst: one fault, reported many times."""

PAGE_FAULT = 31
BURSTS, PAGE_FAULT_BURSTS = 5, 2
"""Bursts in a day after which a GPU needs diagnostics; page faults count earlier."""

ECHOES = (45, 154)
"""45 follows any end of the program, 154 is the driver's recovery action for the Xid before it."""

MEMORY = frozenset({48, 63, 64, 92, 94, 95, 171, 172})
"""Errors of the GPU's memory."""

PROGRAMS = frozenset({13, 31, 43})
"""A bug of the program causes them more often than the hardware: out-of-range accesses, page faults."""

AMBIGUOUS = PROGRAMS | {94}
"""Caused by the program or the hardware; 94 is a memory error that was contained."""

HARMLESS = ("none", "ignore")
"""Actions of Xids that call for nothing."""

EXIT_BEFORE_S, EXIT_AFTER_S = 5.0, 60.0
"""A program that ends this long before or after an Xid ended with it."""

_HARDWARE = re.compile(r"uncorrectable|\bECC\b|hardware|GPU is lost|fallen off the bus", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by what its Xids and its series are known by; ``index`` is None if the driver has never told."""

    pci: str
    uuid: str = ""
    index: int | None = None

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.pci})" if self.index is not None else f"the GPU at {self.pci}"


def gpu_at(view: View, pci: str) -> Gpu:
    """The GPU with this address, also while its driver does not answer."""
    for fact in view.gpus:
        if fact.pci_bus_id == pci and fact.uuid:
            return Gpu(pci, fact.uuid, fact.index)
    for series in view.select("DCGM_FI_DEV_XID_ERRORS", pci_bus_id=pci):
        return Gpu(pci, series.labels["UUID"], int(series.labels["gpu"]))
    return Gpu(pci)


def of_its_memory(symptom: Incident, cause: Incident) -> bool:
    """Whether the Xids of ``cause`` report the memory error that ``symptom`` saw, and call for more than a restart."""
    uncorrected = "waits for a reset" in symptom.culprit.detail or symptom.culprit.detail.startswith("uncorrected")
    told = {int(code) for code in re.findall(r"Xid (\d+)", cause.culprit.detail)}
    return uncorrected and not told.isdisjoint(MEMORY) and text(cause.data, "action") not in ("restart_app", "none")


def rank_at(view: View, gpu: Gpu) -> RankFact | None:
    """The rank that works on the GPU, or has died on it."""
    ranks = [rank for rank in view.ranks if gpu.index is not None and rank.gpu == gpu.index]
    return max(ranks, key=lambda rank: (rank.live, rank.generation), default=None)


def rank_struck(view: View, gpu: Gpu, second: float) -> RankFact | None:
    """The rank that worked on the GPU at the wall second ``second``; the one of now if this node saw none then.

    The rank that an Xid ends is often gone when the Xid is read, and its successor not there yet.
    """
    then = (rank for rank in view.ranks_then(second) if gpu.index is not None and rank.gpu == gpu.index)
    return next(then, None) or rank_at(view, gpu)


def by_address(events: Iterable[Event]) -> dict[str, list[Event]]:
    """The Xids of each GPU by its PCI address, in their order.

    An Xid 45 that names the Xid before it counts as that one, if the line of that one was lost.
    """
    found = grouped(events, lambda event: text(event.data, "pci_bus_id"))
    for of_gpu in found.values():
        seen = {code_of(event) for event in of_gpu}
        of_gpu[:] = [event if integer(event.data, "caused_by") in {-1, *seen} else _cause_of(event) for event in of_gpu]
    return found


def _cause_of(event: Event) -> Event:
    cause = {"code": event.data["caused_by"], "action": text(event.data, "caused_by_action")}
    return replace(event, data={**event.data, **cause})


def code_of(event: Event) -> int:
    """The number of the Xid."""
    return integer(event.data, "code")


def bursts(events: Iterable[Event], code: int) -> int:
    """How many bursts of ``code`` there were."""
    times = sorted(event.at for event in events if code_of(event) == code)
    return bool(times) + sum(after - before > BURST_GAP_S for before, after in pairwise(times))


def too_often(events: Sequence[Event], code: int) -> bool:
    """True if ``code`` came back on one GPU so often in a day that a defect is likely."""
    return code not in ECHOES and bursts(events, code) >= (PAGE_FAULT_BURSTS if code == PAGE_FAULT else BURSTS)


def gpu_to_blame(view: View, gpu: Gpu, code: int, events: Sequence[Event]) -> bool:
    """True if ``code`` came back so often that the GPU needs diagnostics; ``events`` are its Xids of the last day.

    Harmless codes never count. A code that programs cause counts only where something tells GPU and program apart:
    several programs had it on this GPU, or those of a run whose other GPUs go without it.
    """
    own = [event for event in events if code_of(event) == code]
    if code not in PROGRAMS:
        return too_often([event for event in own if text(event.data, "action") not in HARMLESS], code)
    if len({text(event.data, "process") for event in own} - {""}) > 1:
        return too_often(own, code)
    rank = rank_struck(view, gpu, own[-1].at)
    if rank is None or all(other.gpu in (None, gpu.index) for other in ranks_of(view, rank.run)):
        return False
    of_rank = [event for event in own if integer(event.data, "pid") == rank.pid or _exits(view, rank, [event])]
    return too_often(of_rank, code)


def program_to_blame(view: View, gpu: Gpu, code: int, xids: Mapping[str, Sequence[Event]]) -> tuple[str, float]:
    """Why an ambiguous ``code`` is the program's fault, and the confidence; "" if it is not, or if unknown.

    ``xids`` are those of the last day by PCI address. A faulty program fails on other GPUs too, or at the same
    step again. Its own error also indicates the program, unless the GPU is to blame.
    """
    elsewhere = next((pci for pci, events in xids.items() if pci != gpu.pci and bursts(events, code)), None)
    if elsewhere is not None:
        return f"Xid {code} came on {gpu_at(view, elsewhere)} too", 0.85
    own = [event for event in xids[gpu.pci] if code_of(event) == code]
    rank = rank_struck(view, gpu, own[-1].at)
    exits = _own_exits(view, rank, own) if rank is not None else []
    steps = {integer(end.data, "step") for end in exits}
    if len(exits) > 1 and len(steps) == 1:
        return f"the program failed after step {steps.pop()} each time", 0.8
    if not exits or gpu_to_blame(view, gpu, code, own):
        return "", 0.0
    return "the program died with an error of its own", 0.7


def _exits(view: View, rank: RankFact, xids: Sequence[Event]) -> list[Event]:
    """Ends of the rank's program at the time of ``xids``."""
    return [
        end
        for end in view.events("rank_exited", DAY_S)
        if (text(end.data, "run"), integer(end.data, "rank")) == (rank.run, rank.rank)
        and any(-EXIT_BEFORE_S <= end.at - xid.at <= EXIT_AFTER_S for xid in xids)
    ]


def _own_exits(view: View, rank: RankFact, xids: Sequence[Event]) -> list[Event]:
    """Those with an error of the program's own, not one that names the hardware."""
    return [
        end
        for end in _exits(view, rank, xids)
        if isinstance(error := end.data.get("error"), Mapping)
        and not _HARDWARE.search(f"{text(error, 'type')}: {text(error, 'message')}")
    ]
