"""State that must be equal on all replicas of a run differs: silent corruption, and which rank is in the minority."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from opsd.collectors.base import Event
from opsd.runbooks.base import Action, Culprit, Evidence, Finding, Incident, Runbook, Severity, View
from opsd.runbooks.lib.gpus import xids_of
from opsd.runbooks.lib.remedies import notice
from opsd.runbooks.lib.runs import (
    job_of,
    rank_then,
    ranks_of,
    run_of,
    run_recovered,
    steps_lost,
    supervised,
    unsolved_by_run,
)
from opsd.runbooks.lib.signals import counted, integer, is_integer, number, text

NAMED = 4
"""Tensors that the evidence names."""

ECC_S = 600.0


@dataclass(frozen=True, slots=True)
class _Difference:
    """What one comparison found. ``minority`` are the ranks beside the majority, empty if there is no majority."""

    step: int
    tensor: str
    checksums: Mapping[int, str]
    agreed: int | None
    at: float

    @property
    def minority(self) -> frozenset[int]:
        (common, count), *_ = Counter(self.checksums.values()).most_common(1)
        if 2 * count <= len(self.checksums):
            return frozenset()
        return frozenset(rank for rank, checksum in self.checksums.items() if checksum != common)

    def __str__(self) -> str:
        groups: dict[str, list[int]] = {}
        for rank, checksum in sorted(self.checksums.items()):
            groups.setdefault(checksum, []).append(rank)
        said = "; ".join(f"{checksum} on {_named(ranks)}" for checksum, ranks in groups.items())
        return f"{self.tensor} after step {self.step}: {said}"


def _named(ranks: Sequence[int]) -> str:
    few = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {few}" if len(ranks) == 1 else f"ranks {few}"


def _difference(event: Event) -> _Difference | None:
    """What ``event`` says, None unless it has at least two checksums that differ."""
    data = event.data
    ranks, checksums = data.get("ranks"), data.get("checksums")
    if not isinstance(ranks, list | tuple) or not isinstance(checksums, list | tuple) or len(ranks) != len(checksums):
        return None
    by_rank = {rank: str(checksum)[:64] for rank, checksum in zip(ranks, checksums, strict=True) if is_integer(rank)}
    if len(set(by_rank.values())) < 2:
        return None
    agreed = number(data, "agreed")
    name = text(data, "tensor") or "a tensor"
    return _Difference(integer(data, "step"), name, by_rank, None if agreed is None else int(agreed), event.at)


def _detect(view: View) -> Iterator[Finding]:
    for (run, generation), events in unsolved_by_run(view, "replicas_differ").items():
        if differences := [difference for event in events if (difference := _difference(event))]:
            yield _finding(view, run, generation, differences)


def _suspects(differences: Sequence[_Difference]) -> list[int]:
    """The ranks that are in the minority most often; a tensor that went wrong first spoils others later."""
    votes = Counter(rank for difference in differences for rank in difference.minority)
    most = max(votes.values(), default=0)
    return sorted(rank for rank, count in votes.items() if count == most)


def _culprit(view: View, run: str, suspects: Sequence[int], at: float) -> tuple[Culprit, float]:
    if not suspects:
        return Culprit("unknown", view.node, detail="no checksum has a majority"), 0.3
    if len(suspects) > 1:
        return Culprit("unknown", view.node, detail=f"{_named(suspects)} differ from the majority"), 0.4
    rank = rank_then(view, run, suspects[0], at)
    if rank is None:
        return Culprit("rank", rank=suspects[0], detail="on another node"), 0.8
    return Culprit("gpu", view.node, rank.gpu, rank.rank, "computed or stored something wrong"), 0.8


def _finding(view: View, run: str, generation: int, differences: Sequence[_Difference]) -> Finding:
    first = min(differences, key=lambda difference: difference.step)
    culprit, confidence = _culprit(view, run, _suspects(differences), first.at)
    tensors = sorted({difference.tensor for difference in differences})
    agreed = first.agreed if first.agreed is not None else -1
    since = f"equal at step {agreed}" if agreed >= 0 else "never compared equal before"
    gpu = next((gpu for gpu in view.gpus if gpu.index == culprit.gpu), None)
    xids = [event.message for event in xids_of(view, gpu, ECC_S)] if gpu is not None else []
    lost = max(0, first.step - agreed)
    facts = [*map(str, differences[:NAMED]), f"{first.tensor} was {since}", *xids[:2]]
    return Finding(
        key=run,
        severity=Severity.CRITICAL,
        summary=f"the replicas of {run} differ in {_counted(tensors)} after step {first.step}",
        culprit=culprit,
        confidence=confidence,
        evidence=tuple(Evidence(fact, "rank events", first.at) for fact in facts),
        cost=steps_lost(view, run, lost, "{steps} on {gpus} to do again, and all from here on"),
        job=job_of(view, run),
        data={"run": run, "generation": generation, "step": first.step, "agreed": agreed},
    )


def _counted(tensors: Sequence[str]) -> str:
    return tensors[0] if len(tensors) == 1 else f"{tensors[0]} and {counted(len(tensors) - 1, 'other tensor')}"


def _committed(view: View, run: str) -> int:
    """Step of the checkpoint that a restart would load, -1 if there is none."""
    return max((r.committed_step for r in ranks_of(view, run) if r.committed_step is not None), default=-1)


def _remedy(incident: Incident, view: View) -> Sequence[Action]:
    """Go back only to a checkpoint from when the replicas were proved equal: one of them wrote it."""
    data, why = incident.data, incident.summary
    run, supervisor = text(data, "run"), run_of(view, text(data, "run"))
    committed = _committed(view, run)
    safe = 0 <= committed <= integer(data, "agreed")
    if safe and supervisor is not None and supervised(view, run):
        args: dict[str, object] = {"control": supervisor.control, "reason": why}
        return (
            Action("restart_generation", target=run, args=args, reason=f"{why}; back to step {committed}"),
            notice(run, incident, f"; test the node of {incident.culprit}"),
        )
    advice = "no opsd launcher is there to restart it"
    if not safe:
        advice = "the newest checkpoint may be spoilt; go back to one from before the last equal comparison"
    return (notice(run, incident, f"; {incident.culprit}; {advice}"),)


RUNBOOK = Runbook(
    detect=_detect, remedy=_remedy, healed=run_recovered, needs=("ranks",), clear_after_s=10.0, verify_s=900.0
)
