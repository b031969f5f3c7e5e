"""All layouts of a run on a number of GPUs: which fit and how fast they are, and why the others are out. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from opsd.plan.hardware import Hardware
from opsd.plan.layout import RECOMPUTE, Layout, micro_batches_of, problem, schedules, spreads
from opsd.plan.memory import GIB, Memory, memory_of
from opsd.plan.step_time import StepTime, step_time
from opsd.trainer.config import Config

_MOST_TOKENS: Final = 1 << 17
"""Of a micro-batch on a GPU: larger ones gain nothing, and take memory."""


class CannotPlan(ValueError):
    """There is no plan; the message is one sentence that says why and what to change."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout that runs, with its memory and time."""

    layout: Layout
    memory: Memory
    step: StepTime


@dataclass(frozen=True, slots=True)
class Excluded:
    """A layout that does not run, with the reason; ``lacks`` are bytes, if memory is all that it lacks."""

    layout: Layout
    reason: str
    lacks: float | None = None


@dataclass(frozen=True, slots=True)
class Search:
    """Layouts from the fastest on, one for each spread over the GPUs, and those that do not run."""

    fitting: tuple[Candidate, ...]
    out: tuple[Excluded, ...]

    @property
    def reasons(self) -> dict[str, int]:
        """How many layouts each kind of reason has ruled out, the most frequent first."""
        return dict(Counter(each.reason.partition(":")[0] for each in self.out).most_common())


def search(config: Config, gpus: int, hardware: Hardware) -> Search:
    """Every layout worth a look. Raises CannotPlan if none runs."""
    found = list(_all(config, gpus, hardware))
    fitting = [each for each in found if isinstance(each, Candidate)]
    out = tuple(each for each in found if isinstance(each, Excluded))
    if not fitting:
        raise CannotPlan(f"no layout runs on {gpus:,} GPUs: {_hopeless(out)}")
    return Search(tuple(sorted(fitting, key=_rank)), out)


def fastest(config: Config, gpus: int, hardware: Hardware) -> Candidate | None:
    """The fastest layout, None if none runs."""
    return min((each for each in _all(config, gpus, hardware) if isinstance(each, Candidate)), key=_rank, default=None)


def _rank(candidate: Candidate) -> tuple[float, float]:
    return candidate.step.total, candidate.memory.total


def _all(config: Config, gpus: int, hardware: Hardware) -> Iterator[Candidate | Excluded]:
    for spread in spreads(config, gpus, int(hardware.nvlink_gpus.value)):
        tried = [_best(config, layout, gpus, hardware) for layout in schedules(config, spread)]
        yield min((each for each in tried if isinstance(each, Candidate)), key=_rank, default=tried[0])


def _best(config: Config, spread: Layout, gpus: int, hardware: Hardware) -> Candidate | Excluded:
    """The fastest micro-batch and recomputation of a spread that fit, or why none does."""
    room, least, why = hardware.memory.value, math.inf, ""
    fitting = []
    for micro_batch in micro_batches_of(config, spread, gpus):
        if micro_batch > 1 and micro_batch * config.data.sequence / spread.cp > _MOST_TOKENS:
            break
        for recompute in RECOMPUTE:
            layout = replace(spread, micro_batch=micro_batch, recompute=recompute)
            if found := problem(config, layout, gpus):
                why = why or found
                if recompute == "none":
                    break  # the others have no fewer demands
                continue
            memory = memory_of(config, layout, gpus)
            least = min(least, memory.total)
            if memory.total <= room:
                fitting.append(Candidate(layout, memory, step_time(config, layout, gpus, hardware)))
                break  # more recomputation is slower
    if fitting:
        return min(fitting, key=_rank)
    if least == math.inf:
        return Excluded(spread, why)
    return Excluded(
        spread, f"memory: a GPU needs {least / GIB:,.1f} GiB at least and has {room / GIB:.1f}", least - room
    )


def _hopeless(out: Sequence[Excluded]) -> str:
    """The reason of the layout that is nearest to one that runs, and what to do."""
    if tight := [(each.lacks, each.reason) for each in out if each.lacks is not None]:
        return f"{min(tight)[1].removeprefix('memory: ')}; take more GPUs, or larger ones"
    batch = (each.reason for each in out if each.reason.startswith("data.batch"))
    why = next(batch, out[0].reason if out else "the layers do not divide")
    return f"{why}; take another number of them, or another data.batch"
