"""Verdicts in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opsd.stragglers.trace import (
    GPU,
    HOST_PAUSES,
    LENGTHS,
    SLOW_DATA,
    SLOW_GPU,
    SLOW_HOST,
    SLOW_LINK,
    SLOW_WORKER,
    STAGES,
    Trace,
    Verdict,
)

ADVICE = {
    SLOW_WORKER: "compare clocks, temperature and power of its GPU, and the load of its host, with those of a peer",
    SLOW_GPU: "look at its clocks, power limit and temperature; swap the node if they are in order",
    SLOW_HOST: "look for other processes on its cores, memory pressure and a wrong CPU binding",
    HOST_PAUSES: "collect Python's garbage at fixed steps on all ranks at once (gc.disable, then gc.collect)",
    SLOW_DATA: "give its loader more workers, or look at the storage that it reads from",
    SLOW_LINK: "run `opsd preflight network` on its nodes",
    STAGES: "move layers away from the slowest stage",
    LENGTHS: "distribute sequences by their cost, not by their number of tokens",
}


@dataclass(frozen=True, slots=True)
class Candidate:
    """``alone`` is the slowdown by this cause only; that of the verdict may contain others."""

    verdict: Verdict
    alone: float


def alone(verdict: Verdict) -> Candidate:
    """A verdict that contains no other cause."""
    return Candidate(verdict, verdict.slowdown)


def named(trace: Trace, ranks: Sequence[int]) -> str:
    """The ranks in words, with their node if it is known."""
    first = trace.places[ranks[0]]
    where = f" on {first.node}" if first.node else ""
    if len(ranks) == 1:
        return f"rank {ranks[0]}{where}" + (f", GPU {first.gpu}" if first.gpu is not None else "")
    return f"each of {len(ranks)} ranks from {ranks[0]} to {ranks[-1]}{where}"


def verdict_of(
    trace: Trace,
    cause: str,
    ranks: Sequence[int],
    slowdown: float,
    confidence: float,
    told: Sequence[str],
    stage: int | None = None,
) -> Verdict:
    """The verdict, with the places of its culprits, the source of the times and the advice for its cause."""
    places = [trace.places[rank] for rank in ranks]
    return Verdict(
        cause=cause,
        culprits=tuple(ranks),
        nodes=tuple(sorted({place.node for place in places if place.node})),
        gpus=tuple(sorted({place.gpu for place in places if place.gpu is not None})),
        slowdown=max(1.0, slowdown),
        confidence=round(confidence, 2),
        evidence=(*told, f"measured by {'CUDA events' if trace.source == GPU else 'the clock of the hosts'}"),
        source=trace.source,
        stage=stage,
        advice=ADVICE[cause],
    )
