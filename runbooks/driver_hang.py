"""The NVIDIA driver does not answer: a call into it does not return."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from opsd.attribution import UNINTERRUPTIBLE
from opsd.collectors.base import Event, RankFact
from opsd.runbooks.base import Cost, Culprit, Evidence, Finding, Incident, Runbook, Severity, View
from opsd.runbooks.lib.gpus import rank_on
from opsd.runbooks.lib.remedies import notify_node
from opsd.runbooks.lib.runs import live_ranks
from opsd.runbooks.lib.signals import integer, latest, said, text
from opsd.runbooks.lib.xids import ECHOES, code_of, gpu_at

STATE = "opsd_collector_state"
REMEMBERED_S = 600.0
STANDS_STILL_S = 15.0


def _hangs(view: View) -> bool | None:
    """True if the NVML collector has not returned, None if it does not run at all."""
    hung = latest(view, STATE, collector="nvml", state="hung")
    return None if hung is None else bool(hung)


def _detect(view: View) -> Iterator[Finding]:
    if not _hangs(view):
        return
    stuck = [rank for rank in live_ranks(view) if view.now - rank.changed > STANDS_STILL_S or _in_kernel(rank)]
    xids = [event for event in view.events("xid", REMEMBERED_S) if code_of(event) not in ECHOES]
    tasks = view.events("hung_task", REMEMBERED_S)
    in_kernel = [str(rank.rank) for rank in stuck if _in_kernel(rank)]
    waits = f"ranks {', '.join(in_kernel)} are in a system call that cannot be interrupted" if in_kernel else ""
    standing = f"{len(stuck)} ranks here have stood still for {STANDS_STILL_S:.0f} s and more" if stuck else ""
    yield Finding(
        key=view.node,
        severity=Severity.CRITICAL if stuck else Severity.WARNING,
        summary=f"the NVIDIA driver of {view.node} does not answer",
        culprit=_culprit(view, [text(event.data, "pci_bus_id") for event in xids], tasks),
        confidence=0.9 if xids or tasks or in_kernel else 0.7,
        evidence=(
            *said(view, "agent", "a question to the driver has not returned"),
            *(Evidence(event.message, "kernel log", event.at) for event in (*xids[-3:], *tasks[-3:])),
            *said(view, "rank pages", waits, standing),
        ),
        cost=_cost(stuck, view) if stuck else Cost(text="GPUs are not watched while it lasts"),
        job=stuck[0].job if stuck else "",
    )


def _in_kernel(rank: RankFact) -> bool:
    return rank.process == UNINTERRUPTIBLE


def _culprit(view: View, addresses: Sequence[str], tasks: Sequence[Event]) -> Culprit:
    """The GPU if one alone is pointed at: by all Xids of the last minutes, else by ranks that hang in the kernel."""
    named = {gpu_at(view, address).index for address in addresses}
    hung = {integer(event.data, "pid") for event in tasks}
    held = {rank.gpu for rank in live_ranks(view) if _in_kernel(rank) or rank.pid in hung}
    gpus = named or held
    if len(gpus) == 1 and (gpu := next(iter(gpus))) is not None:
        rank = rank_on(view, gpu)
        return Culprit("gpu", view.node, gpu, rank.rank if rank else None, "the driver waits for it")
    return Culprit("node", view.node, detail="NVIDIA driver")


def _cost(stuck: Sequence[RankFact], view: View) -> Cost:
    world = max(rank.world_size for rank in stuck)
    seconds = max(view.now - rank.changed for rank in stuck)
    return Cost(1.0, seconds * world, f"{world} GPUs have stood still for {seconds:.0f} s", world)


def _healed(incident: Incident, view: View) -> bool | None:
    """True once the driver answers again. A collector that fails in another way says nothing about it."""
    hangs = _hangs(view)
    return False if hangs else True if view.known("nvml") else None


RUNBOOK = Runbook(
    detect=_detect,
    remedy=notify_node(": drain the node; if it does not come back by itself only a reboot helps"),
    healed=_healed,
    open_after_s=10.0,
    clear_after_s=10.0,
    verify_s=600.0,
)
