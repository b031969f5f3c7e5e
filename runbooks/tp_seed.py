"""Tensor-parallel shards of a run are copies of each other: its ranks have drawn their weights from one seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from opsd.collectors.base import Event
from opsd.runbooks.base import Cost, Culprit, Finding, Severity, View
from opsd.runbooks.lib.remedies import RunRunbook, notify_run
from opsd.runbooks.lib.runs import job_of, quoted, run_recovered, unsolved_by_run, world_size
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
        if not (groups := _groups(events)):
            continue
        tensors, width = set[str]().union(*groups.values()), max(map(len, groups))
        copied = counted(len(tensors), "tensor")
        again = f"what {counted(world_size(view, run), 'GPU')} train from here on has to be trained again"
        sentences = (_sentence(ranks, names) for ranks, names in sorted(groups.items()))
        yield Finding(
            key=run,
            severity=Severity.CRITICAL,
            summary=f"the tensor-parallel shards of {copied} of {run} are copies of each other",
            culprit=Culprit("user code", view.node, detail="one seed for every tensor-parallel rank"),
            confidence=0.95,
            evidence=quoted(events[0], "rank events", *sentences),
            cost=Cost(text=f"{again}: of {width} shards {width - 1} begin as copies"),
            job=job_of(view, run),
            data={"run": run, "generation": generation},
        )


def _sentence(ranks: Sequence[int], names: set[str]) -> str:
    shown, more = ", ".join(sorted(names)[:NAMED]), len(names) - NAMED
    rest = f" and {more} more" if more > 0 else ""
    return f"ranks {', '.join(map(str, ranks))} hold the same bits as their shards of {shown}{rest}"


RUNBOOK = RunRunbook(
    first=("opsd checkpoint audit FOLDER",),
    detect=_detect,
    remedy=notify_run("; stop the run"),
    healed=run_recovered,
    clear_after_s=10.0,
    verify_s=1800.0,
)
