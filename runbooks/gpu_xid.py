"""The driver reports an Xid: the required action, the culprit (GPU or program), and whether it repeats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from opsd.collectors.base import Event
from opsd.runbooks.base import Action, Cost, Culprit, Evidence, Finding, Incident, Runbook, Severity, View
from opsd.runbooks.lib.gpus import by_gpu, job_evidence
from opsd.runbooks.lib.remedies import notify_node
from opsd.runbooks.lib.runs import FRESH_S, REMEMBERED_S
from opsd.runbooks.lib.signals import integer, latest, number, text
from opsd.runbooks.lib.xids import (
    AMBIGUOUS,
    DAY_S,
    ECHOES,
    Gpu,
    bursts,
    by_address,
    code_of,
    gpu_at,
    gpu_to_blame,
    program_to_blame,
    rank_at,
    rank_struck,
)

ASKED = "opsd_gpu_recovery_action"
ASKS: Mapping[int, str] = {
    1: "reset_gpu", 2: "reboot_node", 3: "drain_p2p", 4: "drain_and_reset", 5: "recover_imex_domain",
    6: "reset_gpu", 7: "reboot_node",
}  # fmt: skip
"""What the driver asks for (nvmlDeviceGpuRecoveryAction_t), in the words of the Xid catalogue."""

RESTART, DIAGNOSTICS = "restart_app", "diagnostics"

ACTIONS: Mapping[str, tuple[int, str]] = {
    "none": (0, ""),
    "ignore": (0, ""),
    RESTART: (1, "restart the program, the GPU can go on"),
    "update_software": (2, "update the node's driver and firmware"),
    "workflow": (2, "drain the node and read the driver's messages beside it; mostly the GPU has to be reset"),
    "contact_support": (2, "not in NVIDIA's catalogue: drain the node and ask the vendor"),
    "drain_p2p": (3, "stop the programs that reach this GPU from others, then reset it"),
    "recover_imex_domain": (3, "recover the IMEX domain of the NVLink fabric"),
    "reset_gpu": (4, "drain the node and reset the GPU before it trains again"),
    "drain_and_reset": (4, "drain the node and reset the GPU before it trains again"),
    "restart_vm": (5, "restart the virtual machine"),
    "reboot_node": (5, "drain the node and reboot it"),
    "check_mechanicals": (6, "drain the node; have the GPU's power and seating checked"),
    DIAGNOSTICS: (7, "drain the node and run diagnostics; if they pass, have the GPU replaced all the same"),
}
"""How much an action interferes, and what it means for the person on call."""
_UNKNOWN, _MILD, _NODE_GOES = (ACTIONS[action][0] for action in ("check_mechanicals", RESTART, "reset_gpu"))

ANSWERED_S = 2.5
QUIET_S = 300.0
WENT_ON_STEPS = 3
"""Steps after the Xid that show that its rank, or the one started in its place, trains."""


def _asked(view: View, uuid: str) -> str | None:
    """What the driver asks for now, "none" if nothing, None if it does not say. A single wild sample asks nothing."""
    series = by_gpu(view, ASKED).get(uuid)
    if not series or series[0].last is None:
        return None
    values = [value for _, value in series[0].values(ANSWERED_S)]
    return ASKS.get(int(values[-1]), "none") if len(values) > 1 and min(values) > 0 else "none"


def _rung(action: str) -> int:
    """How much ``action`` interferes; from the GPU's reset on, no rank may work on the node meanwhile.

    Unknown recovery actions of the driver are as severe as a replacement of the board.
    """
    return ACTIONS[action][0] if action in ACTIONS else _UNKNOWN


def _advice(action: str) -> str:
    return ACTIONS.get(action, ACTIONS["contact_support"])[1]


def _action(xid: Event) -> str:
    """What one Xid calls for; 154 only repeats the driver's verdict, 45 nothing."""
    if verdict := text(xid.data, "verdict"):
        return verdict
    return "none" if code_of(xid) in ECHOES else text(xid.data, "action") or "contact_support"


def _well_since(view: View, gpu: Gpu, xids: Sequence[Event]) -> float:
    """Wall second of the last proof of health: node, driver or GPU restarted, or the driver's recovery is over."""
    booted = latest(view, "opsd_host_boot_time_seconds")
    moments = [0.0 if booted is None else booted]
    moments += [event.at for event in view.events("gpu_driver_loaded", DAY_S)]
    moments += [xid.at for xid in xids if text(xid.data, "verdict") == "none"]
    for metric, well in (("opsd_gpu_up", 1.0), (ASKED, 0.0)):
        for series in by_gpu(view, metric).get(gpu.uuid, ())[:1]:
            ends = [after for before, after in pairwise(series.values(DAY_S)) if before[1] != well == after[1]]
            if ends and series.last == well:
                moments.append(ends[-1][0] - view.now + view.wall)
    return max(moments)


def _episode(view: View, pending: Sequence[Event]) -> list[Event]:
    """The Xids that count since the GPU was well: the new ones, and with them all severe ones of the day.

    The severest stands until the GPU has been well: a later mild Xid takes nothing back.
    """
    new = {id(xid) for xid in pending if view.wall - xid.at <= REMEMBERED_S}
    return [xid for xid in pending if new and (id(xid) in new or _rung(_action(xid)) > _MILD)]


def _over(view: View, gpu: Gpu, action: str, since: float, well_since: float) -> bool | None:
    """Whether what the Xids up to wall second ``since`` called for has been done; None if that is not known."""
    asked = _asked(view, gpu.uuid)
    if asked not in (None, "none"):
        return False
    if well_since > since:
        return True
    if view.wall - since > DAY_S and (asked == "none" or _rung(action) < _NODE_GOES):
        return True
    if action != RESTART:
        return False if view.known("nvml") else None
    return view.wall - since > QUIET_S or _went_on(view, gpu, since)


def _went_on(view: View, gpu: Gpu, since: float) -> bool:
    """True if the rank on the GPU, or the one started in its place, has completed steps after wall second ``since``."""
    rank = rank_at(view, gpu)
    series = view.select("opsd_rank_step", run=rank.run, rank=str(rank.rank)) if rank is not None else ()
    steps = [value for _, value in series[0].values(view.wall - since)] if series else []
    return sum(max(after - before, 0.0) for before, after in pairwise(steps)) >= WENT_ON_STEPS


def _detect(view: View) -> Iterator[Finding]:
    xids = by_address(view.events("xid", DAY_S))
    for pci in sorted({gpu.pci_bus_id for gpu in view.gpus if gpu.uuid} | xids.keys()):
        finding = _judge(view, gpu_at(view, pci), xids)
        if finding is not None:
            yield finding


def _judge(view: View, gpu: Gpu, xids: Mapping[str, Sequence[Event]]) -> Finding | None:
    """The finding about the Xids of one GPU, None if they require no action."""
    day, asked = xids.get(gpu.pci, ()), _asked(view, gpu.uuid)
    if not day and asked in (None, "none"):
        return None
    codes = [code for code in dict.fromkeys(map(code_of, day)) if code not in ECHOES]
    excuses = {code: why for code in codes if code in AMBIGUOUS and (why := program_to_blame(view, gpu, code, xids))[0]}
    often = [code for code in codes if code not in excuses and gpu_to_blame(view, gpu, code, day)]
    well_since = _well_since(view, gpu, day)
    episode = _episode(view, [xid for xid in day if xid.at > well_since])
    since = episode[-1].at if episode else view.wall
    action = max((asked or "none", *map(_action, episode), *([DIAGNOSTICS] if often and episode else ())), key=_rung)
    over = _over(view, gpu, action, since, well_since)
    if not _rung(action) or (over is not False and view.wall - since > (FRESH_S if over else QUIET_S)):
        return None
    told = [f"{bursts(day, code)} bursts of Xid {code} in a day" for code in often]
    worst_first = sorted(episode, key=lambda xid: _rung(_action(xid)), reverse=True)
    names = " and ".join(f"Xid {code}" for code in dict.fromkeys(map(code_of, worst_first)) if code not in ECHOES)
    blame, sure = "gpu", 0.95
    detail = ", ".join(told) or names or "the driver asks for its recovery"
    newest = next((code_of(xid) for xid in reversed(episode) if code_of(xid) not in ECHOES), None)
    if action == RESTART and newest in excuses:
        (detail, sure), blame = excuses[newest], "user code"
    elif action == RESTART and newest in AMBIGUOUS:
        detail, sure = f"{names}: the GPU or its program", 0.4
    return _finding(view, gpu, action, Culprit(blame, view.node, gpu.index, detail=detail), sure, episode)


def _finding(view: View, gpu: Gpu, action: str, culprit: Culprit, sure: float, xids: Sequence[Event]) -> Finding:
    at = xids[-1].at if xids else view.wall
    rank = rank_struck(view, gpu, at)
    live = now if (now := rank_at(view, gpu)) is not None and now.live else None
    soft = action == RESTART or (rank is None and view.known("ranks"))
    asks = f"it calls for {action.replace('_', ' ')}: {_advice(action)}"
    return Finding(
        key=gpu.uuid or gpu.pci,
        severity=Severity.WARNING if soft else Severity.CRITICAL,
        summary=f"{gpu}: {culprit.detail}",
        culprit=Culprit(culprit.component, view.node, gpu.index, rank.rank if rank else None, culprit.detail),
        confidence=sure,
        evidence=(
            *(Evidence(f"{xid.message}{_times(xid)}", text(xid.data, "source"), xid.at) for xid in _worst(xids)),
            Evidence(asks, "Xid catalogue", view.wall),
            job_evidence(view, live),
        ),
        cost=Cost(text="the driver ends the program that used it" if rank else ""),
        job=rank.job if rank else _job(xids),
        gravity=_rung(action),
        struck_at=at if xids and _asked(view, gpu.uuid) in (None, "none") else None,
        data={"uuid": gpu.uuid, "pci": gpu.pci, "gpu": gpu.index, "action": action, "at": at},
    )


def _job(xids: Sequence[Event]) -> str:
    """The job of the processes that the Xids name, "" if they name none, or several."""
    jobs = {text(xid.data, "job") for xid in xids} - {""}
    return jobs.pop() if len(jobs) == 1 else ""


def _worst(xids: Sequence[Event]) -> Sequence[Event]:
    """The severest and newest, in their order."""
    return sorted(sorted(xids, key=lambda xid: (_rung(_action(xid)), xid.at))[-8:], key=lambda xid: xid.at)


def _times(xid: Event) -> str:
    count = integer(xid.data, "count", 1)
    return f", {count} times" if count > 1 else ""


def _remedy(incident: Incident, view: View) -> Sequence[Action]:
    action = text(incident.data, "action")
    return notify_node(f": {_advice(action)}", swap=_rung(action) >= _NODE_GOES)(incident, view)


def _healed(incident: Incident, view: View) -> bool | None:
    data = incident.data
    gpu = gpu_at(view, text(data, "pci"))
    well_since = _well_since(view, gpu, by_address(view.events("xid", DAY_S)).get(gpu.pci, ()))
    return _over(view, gpu, text(data, "action"), number(data, "at") or incident.opened_at, well_since)


RUNBOOK = Runbook(
    first=("nvidia-smi -q -d ECC,ROW_REMAPPER -i GPU",),
    detect=_detect,
    remedy=_remedy,
    healed=_healed,
    clear_after_s=10.0,
    verify_s=1800.0,
    hold_s=0.0,
)
