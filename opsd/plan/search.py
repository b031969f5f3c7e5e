"""All layouts of a run on a number of GPUs: which fit and how fast they are, and why the others are out. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from opsd.plan.hardware import Hardware
from opsd.plan.layout import RECOMPUTE, Layout, micro_batches_of, problem, spreads
from opsd.plan.memory import GIB, Memory, memory_of
from opsd.plan.step_time import StepTime, step_time
from opsd.trainer.config import Config


class CannotPlan(ValueError):
    """There is no plan; the message is one sentence that says why and what to change."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout that runs, with its memory and time."""

    layout: Layout
    memory: Memory
    step: StepTime


@dataclass(frozen=True, slots=True)
class Search:
    """Layouts from the fastest on, one for each spread over the GPUs; ``out`` are those that do not run, with why."""

    fitting: tuple[Candidate, ...]
    out: tuple[tuple[Layout, str], ...]

    @property
    def reasons(self) -> dict[str, int]:
        """How many layouts each kind of reason has ruled out."""
        return dict(Counter(reason.partition(":")[0] for _, reason in self.out).most_common())


def search(config: Config, gpus: int, hardware: Hardware) -> Search:
    """Every layout worth a look. Raises CannotPlan if none runs."""
    fitting, out = [], []
    for spread in spreads(config, gpus, int(hardware.node_gpus.value)):
        best, why = _best(config, spread, gpus, hardware)
        if best is not None:
            fitting.append(best)
        else:
            out.append((spread, why))
    if not fitting:
        raise CannotPlan(_hopeless(config, gpus, hardware, out))
    fitting.sort(key=lambda each: (each.step.total, each.memory.total))
    return Search(tuple(fitting), tuple(out))


def fastest(config: Config, gpus: int, hardware: Hardware) -> Candidate | None:
    """The fastest layout, None if none runs."""
    found = (
        _best(config, spread, gpus, hardware)[0] for spread in spreads(config, gpus, int(hardware.node_gpus.value))
    )
    return min((each for each in found if each), key=lambda each: each.step.total, default=None)


def _best(config: Config, spread: Layout, gpus: int, hardware: Hardware) -> tuple[Candidate | None, str]:
    """The fastest micro-batch and recomputation of a spread that fit, or why none does."""
    best, least, why = None, None, ""
    for layout in _variants(config, spread, gpus):
        if why := problem(config, layout, gpus) or "":
            return None, why
        memory = memory_of(config, layout, gpus)
        least = min(least or memory.total, memory.total)
        if memory.total > hardware.memory.value:
            continue
        step = step_time(config, layout, gpus, hardware)
        if best is None or step.total < best.step.total:
            best = Candidate(layout, memory, step)
    if best is None and least is not None:
        why = f"memory: it needs at least {least / GIB:,.1f} of {hardware.memory.value / GIB:.1f} GiB"
    return best, why


def _variants(config: Config, spread: Layout, gpus: int) -> Iterator[Layout]:
    for micro_batch in micro_batches_of(config, spread, gpus):
        if micro_batch > 1 and micro_batch * config.data.sequence / spread.cp > 1 << 17:
            return
        for recompute in RECOMPUTE:
            yield replace(spread, micro_batch=micro_batch, recompute=recompute)


def _hopeless(config: Config, gpus: int, hardware: Hardware, out: list[tuple[Layout, str]]) -> str:
    """The reason that is nearest to a layout that runs."""
    tight = [reason for _, reason in out if reason.startswith("memory")]
    if tight:
        least = min(tight, key=lambda reason: float(reason.split()[5].replace(",", "")))
        return f"no layout fits on {gpus} GPUs: {least.partition(': ')[2]} on each; take more GPUs or larger ones"
    if out:
        batch = [reason for _, reason in out if reason.startswith("data.batch")]
        why = batch[0] if batch else out[0][1]
        return f"no layout runs on {gpus} GPUs: {why}; take another number of GPUs or another data.batch"
    return f"no layout runs on {gpus} GPUs: take another number"
