"""Tensor-parallel shards of a run are copies of each other: its ranks have drawn their weights from one seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from opsd.collectors.base import Event
from opsd.runbooks.base import Cost, Culprit, Evidence, Finding, Severity, View
from opsd.runbooks.lib.remedies import notify_run
from opsd.runbooks.lib.runs import RunRunbook, job_of, run_recovered, unsolved_by_run, world_size
from opsd.runbooks.lib.signals import counted, integers

NAMED = 3
"""Tensors that the evidence names; the first ones say which layers it is."""


def _items(data: Mapping[str, object], key: str) -> tuple[object, ...]:
    value = data.get(key)
    return tuple(value) if isinstance(value, list | tuple) else ()


def _groups(events: Sequence[Event]) -> dict[tuple[int, ...], set[str]]:
    """Tensors whose shards are equal, by the ranks that hold these shards. Each rank of a group may tell of it."""
    found: dict[tuple[int, ...], set[str]] = {}
    for event in events:
        ranks = tuple(sorted(set(integers(event.data, "ranks"))))
        tensors = {str(tensor) for tensor in _items(event.data, "tensors")}
        if len(ranks) > 1 and tensors:
            found.setdefault(ranks, set()).update(tensors)
    return found


def _detect(view: View) -> Iterator[Finding]:
    for (run, generation), events in unsolved_by_run(view, "tp_shards_equal").items():
        if groups := _groups(events):
            yield _finding(view, run, generation, groups, events[0].at)


def _finding(view: View, run: str, generation: int, groups: Mapping[tuple[int, ...], set[str]], at: float) -> Finding:
    tensors, width = set[str]().union(*groups.values()), max(map(len, groups))
    return Finding(
        key=run,
        severity=Severity.CRITICAL,
        summary=f"the tensor-parallel shards of {counted(len(tensors), 'tensor')} of {run} are copies of each other",
        culprit=Culprit("user code", view.node, detail="one seed for every tensor-parallel rank"),
        confidence=0.95,
        evidence=tuple(Evidence(_sentence(ranks, names), "rank events", at) for ranks, names in sorted(groups.items())),
        cost=Cost(
            text=f"what {counted(world_size(view, run), 'GPU')} train from here on has to be trained again: of "
            f"{width} shards {width - 1} begin as copies"
        ),
        job=job_of(view, run),
        data={"run": run, "generation": generation},
    )


def _sentence(ranks: Sequence[int], names: set[str]) -> str:
    shown, more = ", ".join(sorted(names)[:NAMED]), len(names) - NAMED
    rest = f" and {more} more" if more > 0 else ""
    return f"ranks {', '.join(map(str, ranks))} hold the same bits as their shards of {shown}{rest}"


RUNBOOK = RunRunbook(
    kind="tp_seed",
    first=("opsd checkpoint audit FOLDER",),
    detect=_detect,
    remedy=notify_run("; stop the run: {cost}"),
    healed=run_recovered,
    clear_after_s=10.0,
    verify_s=1800.0,
)
