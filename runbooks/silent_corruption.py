"""The same micro-batch came out differently when a rank computed it again: its GPU computes wrong, or the program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from opsd.collectors.base import Event
from opsd.runbooks.base import Action, Culprit, Evidence, Finding, Incident, Runbook, Severity, View
from opsd.runbooks.lib.gpus import driver_restarted, gpu_of, newest, rank_on, xids_of
from opsd.runbooks.lib.remedies import notify_node
from opsd.runbooks.lib.runs import job_of, rank_then, run_recovered, steps_lost, unsolved_by_run
from opsd.runbooks.lib.signals import grouped, integer, is_integer, number, said, text

ERRORS = "opsd_gpu_ecc_errors_total"
PENDING = "opsd_gpu_row_remap_pending"
ASKED = "opsd_gpu_recovery_action"
DAY_S = 86400.0
FEW = 3
"""GPUs of a run that are believed to compute wrong at once on a node; more of them share a cause."""

GPU, PROGRAM = "gpu", "program"
_CONFIDENCE: Final = {GPU: 0.9, PROGRAM: 0.7}
_ADVICE: Final = {
    GPU: "take the node out and burn its GPUs in: `opsd preflight --profile burn-in`",
    PROGRAM: "two GPUs got different results each time: look for operations that are not deterministic",
}


@dataclass(frozen=True, slots=True)
class _Replay:
    """What one replay found; ``ranks`` are those that differ first, the GPU may be of any of them."""

    event: Event
    ranks: tuple[int, ...]

    @property
    def verdict(self) -> str:
        verdict = text(self.event.data, "verdict")
        return verdict if verdict in _CONFIDENCE else "unknown"

    def __str__(self) -> str:
        data = self.event.data
        sums = " and ".join(_texts(data, "checksums"))
        where = text(data, "where") or "its gradients"
        return f"step {integer(data, 'step')}, computed twice: {where} differs ({sums})"

    @property
    def neighbour(self) -> str:
        """What another rank got for the same."""
        rank, sums = number(self.event.data, "neighbour"), _texts(self.event.data, "neighbour_checksums")
        if rank is None or len(sums) != 2:
            return "no other rank computes the same part, so GPU and program cannot be told apart"
        same = f"the same bits twice ({sums[0]})" if sums[0] == sums[1] else f"different bits ({' and '.join(sums)})"
        return f"rank {rank:.0f} computed the same micro-batch twice and got {same}"


def _texts(data: Mapping[str, object], key: str) -> list[str]:
    value = data.get(key)
    return [str(one)[:64] for one in value[:8]] if isinstance(value, list | tuple) else []


def _replay(event: Event) -> _Replay | None:
    """None unless the event has two checksums that differ, of a rank."""
    ranks = event.data.get("ranks")
    if not isinstance(ranks, list | tuple) or not ranks or not all(map(is_integer, ranks)):
        return None
    return _Replay(event, tuple(ranks)) if len(set(_texts(event.data, "checksums"))) == 2 else None


def _detect(view: View) -> Iterator[Finding]:
    for (run, generation), events in unsolved_by_run(view, "replay_differs").items():
        replays = [replay for event in events if (replay := _replay(event))]
        by_ranks = grouped(replays, lambda replay: replay.ranks)
        if len(by_ranks) > FEW or any(replay.verdict == PROGRAM for replay in replays):
            yield _finding(view, run, generation, replays, PROGRAM)
            continue
        for several in by_ranks.values():
            yield _finding(view, run, generation, several, several[-1].verdict)


def _finding(view: View, run: str, generation: int, replays: Sequence[_Replay], verdict: str) -> Finding:
    first = replays[0]
    culprit, uuid = _culprit(view, run, first, verdict)
    agreed, step = number(first.event.data, "agreed"), integer(first.event.data, "step")
    lost = max(0, step - int(agreed or 0))
    since = f"all ranks were last equal at step {agreed:.0f}" if agreed is not None else "there was no replay before"
    facts = [*(str(replay) for replay in replays[-FEW:]), replays[-1].neighbour, since]
    return Finding(
        key=uuid or (run if verdict == PROGRAM else f"{run}/{'-'.join(map(str, first.ranks))}"),
        severity=Severity.WARNING if verdict == PROGRAM else Severity.CRITICAL,
        summary=f"{run}: {culprit} computed one micro-batch twice and got different bits",
        culprit=culprit,
        confidence=_CONFIDENCE.get(verdict, 0.5) if len(first.ranks) == 1 else 0.4,
        evidence=(
            *(Evidence(fact, "rank events", replays[-1].event.at) for fact in facts),
            *said(view, "driver", *_doubts(view, uuid)),
        ),
        cost=steps_lost(view, run, lost, "what {gpus} computed in up to {steps} may be wrong"),
        job=job_of(view, run),
        data={"run": run, "generation": generation, "verdict": verdict, "uuid": uuid, "agreed": agreed},
    )


def _culprit(view: View, run: str, replay: _Replay, verdict: str) -> tuple[Culprit, str]:
    """The culprit, and the UUID of its GPU; "" if no GPU of this node is named."""
    if verdict == PROGRAM:
        return Culprit("user code", view.node, detail="it is not deterministic"), ""
    ranks = replay.ranks
    if len(ranks) > 1:
        names = ", ".join(map(str, ranks[:8]))
        return Culprit("unknown", view.node, detail=f"one of the ranks {names}, which exchange what they compute"), ""
    rank = rank_then(view, run, ranks[0], replay.event.at)
    if rank is None:
        return Culprit("rank", rank=ranks[0], detail="on another node"), ""
    gpu = next((gpu for gpu in view.gpus if gpu.index == rank.gpu), None)
    detail = "it computes wrong" if verdict == GPU else "it computes wrong, or the program is not deterministic"
    return Culprit("gpu", view.node, rank.gpu, rank.rank, detail), gpu.uuid if gpu and verdict == GPU else ""


def _doubts(view: View, uuid: str) -> list[str]:
    """What the driver says against the GPU."""
    gpu = gpu_of(view, uuid) if uuid else None
    if gpu is None:
        return []
    errors = newest(view, ERRORS, type="uncorrected", counter="volatile").get(uuid, 0.0)
    asked = newest(view, ASKED).get(uuid, 0.0)
    return [
        *([f"{errors:.0f} uncorrected ECC errors since the driver was loaded"] if errors else []),
        *(["a row of its memory waits to be remapped"] if newest(view, PENDING).get(uuid) else []),
        *([f"the driver asks for recovery action {asked:.0f}"] if asked else []),
        *[xid.message for xid in xids_of(view, gpu, DAY_S) if text(xid.data, "action") in ("reset_gpu", "diagnostics")],
    ]


def _remedy(incident: Incident, view: View) -> Sequence[Action]:
    """Only a GPU that a neighbour's result convicts is taken out, and only if the driver says something against it."""
    verdict = text(incident.data, "verdict")
    convicted = verdict == GPU and incident.culprit.component == "gpu"
    advice = _ADVICE.get(verdict, "burn its GPUs in; only a second data-parallel rank can tell GPU from program")
    agreed = number(incident.data, "agreed")
    back = f"; checkpoints up to step {agreed:.0f} are from before" if agreed is not None and verdict != PROGRAM else ""
    return notify_node(f": {advice}{back}", swap=convicted)(incident, view)


def _confirmed(incident: Incident, view: View) -> bool:
    return bool(_doubts(view, text(incident.data, "uuid")))


def _healed(incident: Incident, view: View) -> bool | None:
    """True once a later start of the run trains, and on another GPU or after a reset if a GPU was convicted."""
    over = run_recovered(incident, view)
    uuid = text(incident.data, "uuid")
    if not over or not uuid:
        return over
    if driver_restarted(view, incident.opened_at):
        return True
    gpu = gpu_of(view, uuid)
    return gpu is None or rank_on(view, gpu.index) is None


RUNBOOK = Runbook(
    detect=_detect,
    remedy=_remedy,
    confirmed=_confirmed,
    healed=_healed,
    needs=("ranks",),
    clear_after_s=10.0,
    verify_s=1800.0,
)
