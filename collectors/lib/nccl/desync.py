"""Who keeps the others waiting, from the flight recorder dumps of some or all ranks.

Each rank waits in operations that have not ended; each of those waits for the ranks that have not called it. A rank
that waits in another operation passes the blame on. The remaining ranks wait for no other rank. They have stopped on
the host, or their device does not end an operation that has ended on others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from opsd.collectors.lib.nccl.flight_recorder import CALLED, SCHEDULED, Call, Dump, transition
from opsd.words import ranges

NEVER_CALLED: Final = "never called"
MISMATCHED: Final = "called something else"
NO_DUMP: Final = "left no dump"
DEVICE: Final = "device does not go on"
DEADLOCK: Final = "wait for each other"
BETWEEN: Final = "all have called it"
TOO_FEW: Final = "cannot be told"

_CONFIDENCE: Final = {
    NEVER_CALLED: 0.9,
    MISMATCHED: 0.85,
    NO_DUMP: 0.6,
    DEVICE: 0.7,
    DEADLOCK: 0.5,
    BETWEEN: 0.3,
    TOO_FEW: 0.2,
}
"""With the dumps of all ranks; it falls with the share of ranks that left one."""

_SYMMETRIC: Final = ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives that end nowhere before all ranks have come."""
_SAME_SHAPE: Final = ("all_reduce", "allreduce", "broadcast", "_all_gather_base", "_reduce_scatter_base")
"""Collectives in which all ranks give equal sizes and types."""


@dataclass(frozen=True, slots=True)
class Desync:
    """Who keeps the others waiting, and in which operation, the earliest that waits for them.

    ``culprits`` are the ranks to look at first. It is empty if all have come and the fault lies between them, or if
    more than half of the ranks left no dump. ``missing`` have not called the operation. ``not_started`` have called it,
    but only devices of others have begun or ended it. ``no_dump`` left no dump, and ``waiting`` are the others.
    ``called`` says of a mismatch what each rank
    has called, "" otherwise.
    """

    cause: str
    culprits: tuple[int, ...]
    confidence: float
    group: str
    described: str
    sequence: int
    operation: str
    missing: tuple[int, ...]
    not_started: tuple[int, ...]
    no_dump: tuple[int, ...]
    waiting: tuple[int, ...]
    called: str = ""


_Key = tuple[str, int, tuple[int, int] | None]
"""An operation: the group, and its number or the two places of a point-to-point one."""


@dataclass(slots=True)
class _Operation:
    """An operation that has not ended somewhere: the calls of those that wait in it, and where its members are."""

    key: _Key
    calls: dict[int, Call] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    silent: list[int] = field(default_factory=list)

    @property
    def first(self) -> Call:
        return min(self.calls.values(), key=lambda call: call.called_ns)

    def is_one_of(self, names: tuple[str, ...]) -> bool:
        return any(name in self.first.operation for name in names)


def judge(dumps: Mapping[int, Dump], world: frozenset[int] = frozenset()) -> Desync | None:
    """What the dumps, by rank, tell; None if every operation has ended everywhere.

    ``world`` are the ranks of groups that no dump lists the members of.
    """
    operations = sorted(_operations(dumps, tuple(sorted(world))), key=lambda operation: operation.first.called_ns)
    if not operations:
        return None
    found = next(_causes(operations, dumps), None)
    cause, culprits, operation = found or (BETWEEN, (), operations[0])
    if cause == NO_DUMP and len(culprits) > len(dumps):
        cause, culprits = TOO_FEW, ()
    everybody = world.union(dumps, *([*op.calls, *op.missing, *op.silent, *op.ended] for op in operations))
    return _verdict(cause, tuple(sorted(culprits)), operation, len(dumps) / len(everybody))


def _operations(dumps: Mapping[int, Dump], world: tuple[int, ...]) -> Iterator[_Operation]:
    """The first operation of each group and pair that each rank waits in."""
    members = {name: ranks for dump in dumps.values() for name, ranks in dump.members.items()}
    found: dict[_Key, _Operation] = {}
    for rank, dump in dumps.items():
        for call in dump.calls:
            key = (call.group, call.sequence if call.pair is None else 0, call.pair)
            found.setdefault(key, _Operation(key)).calls.setdefault(rank, call)
    callers: dict[str, list[int]] = {}
    for rank, dump in dumps.items():
        for group in dump.last:
            callers.setdefault(group, []).append(rank)
    for operation in found.values():
        known = world or tuple(callers.get(operation.key[0], ()))
        _place(operation, _participants(operation, members, known), dumps)
    earliest: dict[tuple[int, str, object], _Key] = {}
    for key, operation in sorted(found.items(), key=lambda item: item[0][1]):
        if operation.missing or operation.silent or operation.first.progress != CALLED or _differs(operation):
            for rank in operation.calls:
                earliest.setdefault((rank, key[0], key[2]), key)
    wanted = set(earliest.values())
    yield from (operation for key, operation in found.items() if key in wanted)


def _participants(
    operation: _Operation, members: Mapping[str, tuple[int, ...]], world: tuple[int, ...]
) -> tuple[int, ...]:
    group, _, pair = operation.key
    ranks = members.get(group, world) or tuple(operation.calls)
    if pair is None:
        return ranks
    return tuple(ranks[place] for place in pair if place < len(ranks))


def _place(operation: _Operation, ranks: tuple[int, ...], dumps: Mapping[int, Dump]) -> None:
    """The position of each member that does not wait in the operation."""
    group, sequence, pair = operation.key
    for rank in {*ranks} - operation.calls.keys():
        dump = dumps.get(rank)
        if dump is None:
            operation.silent.append(rank)
        elif pair is None and _over(dump, group, sequence, operation.first.called_ns):
            operation.ended.append(rank)
        else:
            operation.missing.append(rank)


def _over(dump: Dump, group: str, sequence: int, called_ns: int) -> bool:
    """Whether the rank has called and ended the collective. The recorder is a ring: it may have forgotten that."""
    if group in dump.last:
        return sequence <= dump.last[group]
    return dump.forgotten_ns > called_ns


def _causes(
    operations: list[_Operation], dumps: Mapping[int, Dump]
) -> Iterator[tuple[str, frozenset[int], _Operation]]:
    """Causes with their culprits, the best proven first."""
    for operation in operations:
        if odd := _odd(operation, dumps):
            yield MISMATCHED, odd, operation
    waiting = {rank for operation in operations for rank in operation.calls}
    lagging = {rank for operation in operations for rank in _lagging(operation, dumps)}
    for cause, ranks in (
        (NEVER_CALLED, [set(op.missing) - waiting for op in operations]),
        (DEVICE, [lagging.intersection(op.missing) for op in operations]),
        (NO_DUMP, [set(op.silent) for op in operations]),
        (DEVICE, [lagging.intersection(op.calls) for op in operations]),
    ):
        if first := next((op for op, found in zip(operations, ranks, strict=True) if found), None):
            yield cause, frozenset().union(*ranks), first
    complete = [op for op in operations if not op.missing and not op.silent and _all_at_the_front(op, operations)]
    for operation in complete:
        yield (DEVICE, behind, operation) if (behind := _not_begun(operation)) else (BETWEEN, frozenset(), operation)
    blocking = [op for op in operations if op.missing]
    if blocking:
        yield DEADLOCK, frozenset().union(*(op.missing for op in blocking)), blocking[0]


def _said(operation: _Operation) -> dict[int, tuple[str, str]]:
    """The name of what each rank has called, with the shape where all ranks give the same."""
    same = operation.is_one_of(_SAME_SHAPE)
    return {rank: (call.operation, call.shape if same else "") for rank, call in operation.calls.items()}


def _differs(operation: _Operation) -> bool:
    """Whether ranks have called different collectives under one number."""
    return operation.key[2] is None and len(set(_said(operation).values())) > 1


def _odd(operation: _Operation, dumps: Mapping[int, Dump]) -> frozenset[int]:
    """The ranks that have called another operation, or with another shape, than most.

    Without a majority these are the ranks whose call breaks the order that all ranks have followed so far. All ranks
    are named if that order does not tell either.
    """
    if not _differs(operation):
        return frozenset()
    said = _said(operation)
    (usual, most), (_, second), *_ = Counter(said.values()).most_common()
    if second < most:
        return frozenset(rank for rank, one in said.items() if one != usual)
    unseen = frozenset(rank for rank, call in operation.calls.items() if not _seen_before(call, operation, dumps))
    return unseen if 0 < len(unseen) < len(said) else frozenset(said)


def _seen_before(call: Call, operation: _Operation, dumps: Mapping[int, Dump]) -> bool:
    """Whether the collective has followed the one before it at another time, on any rank."""
    name = transition(call.previous, call.operation)
    times = sum(dump.transitions.get(call.group, {}).get(name, 0) for dump in dumps.values())
    now = sum(transition(other.previous, other.operation) == name for other in operation.calls.values())
    return times > now


def _lagging(operation: _Operation, dumps: Mapping[int, Dump]) -> list[int]:
    """Ranks whose first unended operation has ended on others."""
    if not operation.ended or operation.key[2] is not None or not operation.is_one_of(_SYMMETRIC):
        return []
    return [rank for rank, call in operation.calls.items() if dumps[rank].calls[0] == call]


def _not_begun(operation: _Operation) -> frozenset[int]:
    """Ranks whose device has not begun what others' have."""
    begun = max(call.progress for call in operation.calls.values()) > SCHEDULED
    return frozenset(rank for rank, call in operation.calls.items() if begun and call.progress == SCHEDULED)


def _all_at_the_front(operation: _Operation, operations: list[_Operation]) -> bool:
    """Whether no rank in the operation waits in an earlier one."""
    return all(
        call.record <= other.calls[rank].record
        for rank, call in operation.calls.items()
        for other in operations
        if rank in other.calls
    )


def _verdict(cause: str, culprits: tuple[int, ...], operation: _Operation, share: float) -> Desync:
    """The verdict about an operation; ``share`` of the ranks left a dump."""
    first = operation.first
    behind = tuple(
        sorted(_not_begun(operation) | (set(culprits) & operation.calls.keys() if cause == DEVICE else set()))
    )
    waiting = tuple(sorted(operation.calls.keys() - set(behind) | set(operation.ended)))
    sure = round(_CONFIDENCE[cause] * (0.5 + 0.5 * share), 2)
    missing, silent = tuple(sorted(operation.missing)), tuple(sorted(operation.silent))
    return Desync(
        cause,
        culprits,
        sure,
        first.group,
        first.described,
        first.sequence,
        first.operation,
        missing,
        behind,
        silent,
        waiting,
        _called(operation) if cause == MISMATCHED else "",
    )


def _called(operation: _Operation) -> str:
    """The operations that each rank has called, the rarest first."""
    callers: dict[str, list[int]] = {}
    said = _said(operation)
    same_name = len({name for name, _ in said.values()}) == 1
    for rank, (name, shape) in said.items():
        callers.setdefault(f"{name} {shape}" if same_name else name, []).append(rank)
    return ", ".join(
        f"{_named(ranks)} called {name}" for name, ranks in sorted(callers.items(), key=lambda item: len(item[1]))
    )


def evidence(verdict: Desync | None) -> list[str]:
    """The verdict in sentences."""
    if verdict is None:
        return ["every operation that the dumps know of has ended everywhere"]
    what = f"{verdict.operation} {verdict.sequence} of group {verdict.group}, {verdict.described}"
    told = [f"{what}: {_named(verdict.waiting) or 'nobody'} called it and waited, or went past it"]
    for ranks, text in (
        (verdict.missing, "did not call it"),
        (verdict.not_started, "called it, but the device did not begin or end it as others did"),
        (verdict.no_dump, "left no dump"),
    ):
        told += [f"{_named(ranks)} {text}"] if ranks else []
    if verdict.cause == MISMATCHED:
        return [verdict.called, *told]
    elsewhere = sorted({*verdict.culprits} - {*verdict.missing, *verdict.not_started, *verdict.no_dump})
    return [*told, f"{_named(elsewhere)} kept others waiting in another operation"] if elsewhere else told


def _named(ranks: Sequence[int]) -> str:
    """The ranks with their noun, "" for none."""
    return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}" if ranks else ""
