"""Dumps of torch's flight recorder: how they are read, and who keeps the other ranks waiting.

PyTorch's flight recorder: what the dump of one rank says about the collectives that have not ended.

Dumps are JSON, as written by ``torch._C._distributed_c10d._dump_fr_trace_json``, or the pickles that torch's watchdog
writes (seen with format versions 2.9 and 2.10). A pickle is read with nothing but plain values allowed in it: it cannot
name a class or a function, and so cannot run anything.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

from opsd.words import ranges

CALLED, SCHEDULED, STARTED = range(3)
"""How far a rank has come with a collective: called, with no more known; called; running on the device."""
MAX_CALLS: Final = 256
MAX_GROUPS: Final = 256
"""Collectives kept of each process group of a dump, the newest, and groups."""
MAX_TRANSITIONS: Final = 64
"""Kinds of transitions between operations that are counted for each process group."""
MAX_SHAPE: Final = 512
"""Characters of the sizes and types of a collective's tensors that are reported and compared."""
MAX_ENTRIES: Final = 65_536
MAX_MEMBERS: Final = 1 << 18
"""Entries of a dump, and ranks in all its groups together, that are looked at."""
_UNKNOWN: Final = frozenset(
    code[0] for code in (pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET, pickle.BYTEARRAY8, pickle.NEXT_BUFFER)
)
_CACHED: Final = 1 << 16
_MAX_NUMBER: Final = 1 << 64
_TRANSITIONS: Final = "opsd_transitions"
_PROGRESS: Final = {"scheduled": SCHEDULED, "started": STARTED}
_POINT_TO_POINT: Final = re.compile(r"(send|recv) (\d{1,6})(->|<-)(\d{1,6})")


class DumpError(Exception):
    """A dump that cannot be used; the message says why in one sentence."""


@dataclass(frozen=True, slots=True)
class Call:
    """One operation on one rank that is not known to have ended, in a group that the program has ``described``.

    ``record`` orders the calls of the rank, ``called_ns`` is in epoch nanoseconds, ``shape`` has sizes and types.
    ``previous`` is the collective that the rank called before it in the group, "" if the dump does not have it.
    ``pair`` are source and destination within the group if it is point-to-point; ``sequence`` orders the others.
    """

    group: str
    described: str
    sequence: int
    operation: str
    record: int
    called_ns: int
    progress: int
    shape: str = ""
    pair: tuple[int, int] | None = None
    previous: str = ""


@dataclass(frozen=True, slots=True)
class Dump:
    """The dump of one rank.

    ``last`` is the newest collective that the rank has called in each process group, ``members`` the ranks of each in
    their order. What was called before ``forgotten_ns`` the ring no longer knows; 0 if it still knows all.
    ``transitions`` counts for each process group how often one collective followed another, by ``transition``.
    """

    calls: tuple[Call, ...]
    last: Mapping[str, int]
    members: Mapping[str, tuple[int, ...]]
    forgotten_ns: int
    transitions: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def transition(previous: str, operation: str) -> str:
    """The name under which ``Dump.transitions`` counts that ``operation`` followed ``previous``."""
    return f"{previous} > {operation}"


def parse_dump(content: bytes | bytearray) -> Dump:
    """A dump from JSON or a pickle. Raises DumpError."""
    try:
        pickled = content.startswith(b"\x80")
        raw = _PlainUnpickler(io.BytesIO(content)).load() if pickled else json.loads(content)
        entries = _list(raw["entries"])[-MAX_ENTRIES:]
        last: dict[str, int] = {}
        for entry in entries:
            if not entry.get("is_p2p"):
                name = _text(entry["process_group"][0])
                last[name] = max(last.get(name, 0), _int(entry["collective_seq_id"]))
        members, room = dict[str, tuple[int, ...]](), MAX_MEMBERS
        for group in raw.get("pg_config", {}).values():
            members[_text(group["name"])] = ranks = _ranks(group["ranks"], room)
            room -= len(ranks)
        oldest: Mapping[str, Any] = min(entries, key=lambda entry: _int(entry["time_created_ns"]), default={})
        forgotten = _int(oldest["time_created_ns"]) if oldest.get("record_id") else 0
        previous = _previous(entries)
        counted = raw.get(_TRANSITIONS)
        transitions = _transitions(entries, previous) if counted is None else _counts(counted)
        return Dump(_newest(entries, previous), last, members, forgotten, transitions)
    except _ForeignPickle as error:
        raise DumpError(f"a pickle that asks for {error}; a dump has plain values only") from error
    except Exception as error:  # a damaged pickle may raise anything, struct.error and AssertionError as well
        raise DumpError(f"not a flight recorder dump, or half of one ({type(error).__name__})") from error


def restored(raw: Mapping[str, Any]) -> Dump:
    """The dump that ``asdict`` has made this of."""
    calls = (Call(**{**call, "pair": tuple(call["pair"]) if call["pair"] else None}) for call in raw["calls"])
    members = {name: tuple(ranks) for name, ranks in raw["members"].items()}
    return Dump(tuple(calls), raw["last"], members, raw["forgotten_ns"], raw["transitions"])


def shortened(content: bytes) -> bytes:
    """A dump in JSON with the entries only that ``parse_dump`` needs, which makes the same of it. Raises DumpError.

    Of a full ring these are a few: what may not have ended, the collectives before those, the newest of each group,
    the oldest, and their frames. The transitions are counted before the other entries are dropped.
    """
    try:
        raw = json.loads(content)
        entries = _list(raw["entries"])[-MAX_ENTRIES:]
        frames, newest, wanted = _frames(entries), dict[str, Mapping[str, Any]](), list[Mapping[str, Any]]()
        previous = _previous(entries)
        for entry in entries:
            if _call(entry, frames.get(_batch(entry), entry)) is not None:
                wanted += [entry, *([previous[id(entry)]] if id(entry) in previous else [])]
            if not entry.get("is_p2p"):
                name = _text(entry["process_group"][0])
                newest[name] = max(newest.get(name, entry), entry, key=lambda one: _int(one["collective_seq_id"]))
        wanted += [*newest.values(), *sorted(entries, key=lambda entry: _int(entry["time_created_ns"]))[:1]]
        kept = {id(entry) for one in wanted for entry in (one, frames.get(_batch(one), one))}
        counted = {_TRANSITIONS: _transitions(entries, previous)}
        return json.dumps({**raw, **counted, "entries": [entry for entry in entries if id(entry) in kept]}).encode()
    except Exception as error:
        raise DumpError(f"not a flight recorder dump in JSON ({type(error).__name__})") from error


class _ForeignPickle(Exception):
    """A pickle that would run something when it is loaded."""


def _skip_size(unpickler: Any) -> None:
    unpickler.read(8)


class _PlainUnpickler(pickle._Unpickler):
    """Python's own unpickler: that in C takes any amount of memory for a number in the file.

    It reads past the headers of frames, which are there for speed, and knows neither sets nor arrays of bytes.
    """

    dispatch: ClassVar = {
        **{code: load for code, load in pickle._Unpickler.dispatch.items() if code not in _UNKNOWN},
        pickle.FRAME[0]: _skip_size,
    }

    def find_class(self, module: str, name: str) -> object:
        raise _ForeignPickle(_text(f"{module}.{name}"))


def _previous(entries: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """By the identity of an entry, the collective with the number before its own in the same group."""
    numbered: dict[tuple[str, int], Mapping[str, Any]] = {}
    for entry in entries:
        if not entry.get("is_p2p"):
            numbered[_text(entry["process_group"][0]), _int(entry["collective_seq_id"])] = entry
    return {
        id(entry): numbered[group, number - 1]
        for (group, number), entry in numbered.items()
        if (group, number - 1) in numbered
    }


def _transitions(
    entries: Sequence[Mapping[str, Any]], previous: Mapping[int, Mapping[str, Any]]
) -> dict[str, dict[str, int]]:
    counted: dict[str, dict[str, int]] = {}
    for entry in entries:
        if (before := previous.get(id(entry))) is None:
            continue
        group = _text(entry["process_group"][0])
        if group not in counted and len(counted) == MAX_GROUPS:
            continue
        counts = counted.setdefault(group, {})
        name = transition(_text(before["profiling_name"]), _text(entry["profiling_name"]))
        if name in counts or len(counts) < MAX_TRANSITIONS:
            counts[name] = counts.get(name, 0) + 1
    return counted


def _counts(written: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """The transitions that ``shortened`` has counted."""
    return {
        _text(group): {str(name)[:MAX_SHAPE]: _int(times) for name, times in islice(counts.items(), MAX_TRANSITIONS)}
        for group, counts in islice(written.items(), MAX_GROUPS)
    }


def _newest(entries: Sequence[Mapping[str, Any]], previous: Mapping[int, Mapping[str, Any]]) -> tuple[Call, ...]:
    """The calls that may not have ended, in the order in which they were made."""
    frames = _frames(entries)
    calls: dict[str, list[Call]] = {}
    for entry in entries:
        if (call := _call(entry, frames.get(_batch(entry), entry))) is not None:
            if (before := previous.get(id(entry))) is not None:
                call = replace(call, previous=_text(before["profiling_name"]))
            calls.setdefault(call.group, []).append(call)
    kept = [
        call
        for found in islice(calls.values(), MAX_GROUPS)
        for call in sorted(found, key=lambda call: call.record)[-MAX_CALLS:]
    ]
    return tuple(sorted(kept, key=lambda call: call.record))


def _frames(entries: Sequence[Mapping[str, Any]]) -> dict[tuple[object, ...], Mapping[str, Any]]:
    return {_batch(entry): entry for entry in entries if _text(entry["profiling_name"]).endswith("coalesced")}


def _batch(entry: Mapping[str, Any]) -> tuple[object, ...]:
    """What the operations of a batch, as of batch_isend_irecv, and the frame recorded after them have in common."""
    name, p2p = _text(entry["process_group"][0]), bool(entry.get("is_p2p"))
    return name, p2p, _int(entry.get("p2p_seq_id", 0) if p2p else entry["collective_seq_id"])


def _call(entry: Mapping[str, Any], frame: Mapping[str, Any]) -> Call | None:
    """The call of an entry, None if it is over: retired once that was seen.

    Only the ``frame`` of a batch has a state: its operations stay "scheduled". Outside of one it is the entry itself.
    """
    operation = _text(entry["profiling_name"])
    state = _text(frame["state"])
    if entry.get("retired") or frame.get("retired") or state == "completed":
        return None
    pair = _pair(operation) if entry.get("is_p2p") else None
    if entry.get("is_p2p") and pair is None:  # the frame around a batch of them
        return None
    # Gloo has no states: to have called, and perhaps to be over, is all that is known.
    progress = _PROGRESS[state] if operation.startswith("nccl") else CALLED
    shape = _shape(entry.get("input_sizes"), entry.get("input_dtypes"), entry.get("output_sizes"))
    created, sequence = _int(entry["time_created_ns"]), _int(entry["collective_seq_id"])
    record = _int(entry.get("record_id", created))
    group, described = map(_text, entry["process_group"][:2])
    return Call(group, described, sequence, operation, record, created, progress, shape, pair)


def _pair(operation: str) -> tuple[int, int] | None:
    match = _POINT_TO_POINT.search(operation)
    if match is None:
        return None
    here, there = int(match[2]), int(match[4])
    return (here, there) if match[1] == "send" else (there, here)


# A pickle can refer to one list many times, and nested so to more items than memory holds: all is looked at bounded.


def _text(value: object) -> str:
    """Raises UnicodeEncodeError for half a surrogate pair, which JSON can hold but UTF-8 cannot."""
    if not isinstance(value, (str, int)):
        raise TypeError("a list where a name is expected")
    text = str(value)[:64]
    text.encode()
    return text


def _int(value: Any) -> int:
    """Raises ValueError for a number that torch does not count to; Python refuses to print one of 4300 digits."""
    number = int(value)
    if not 0 <= number < _MAX_NUMBER:
        raise ValueError("a number out of range")
    return number


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("no list where one is expected")
    return value


def _shape(*columns: object) -> str:
    """The sizes and types of the first tensors, as text."""
    tensors = [item for column in columns for item in _list(column or [])[:8]]
    flat = (item for item in tensors if not isinstance(item, list) or not any(map(_nested, item[:8])))
    return str([[*map(_size, item[:8])] if isinstance(item, list) else _text(item) for item in flat])[:MAX_SHAPE]


def _nested(size: object) -> bool:
    return isinstance(size, (list, dict, tuple))


def _size(size: object) -> object:
    return size if isinstance(size, int) and abs(size) < _MAX_NUMBER else _text(size)


def _ranks(listed: object, most: int) -> tuple[int, ...]:
    """The ranks of a group: a list, or a list in a string."""
    ranks = _parsed(listed) if isinstance(listed, str) and len(listed) < _CACHED else _numbers(listed)
    if len(ranks) > most:
        raise ValueError("more members than any run has")
    return ranks


def _numbers(listed: object) -> tuple[int, ...]:
    return tuple(map(_int, _list(json.loads(listed) if isinstance(listed, str) else listed)))


@lru_cache(maxsize=32)
def _parsed(listed: str) -> tuple[int, ...]:
    """The dumps of all ranks list the same ranks."""
    return _numbers(listed)


MAX_FILE: Final = 256 << 20
_RANK: Final = re.compile(r"(?!\.)(?:.*\D)?(\d{1,7})(?:\.[a-z]\w*)?", re.ASCII)


class DumpFolder(NamedTuple):
    """The dumps by rank, and why each other file with a rank in its name could not be used."""

    dumps: dict[int, Dump]
    unusable: dict[str, str]


def read_dumps(folder: Path) -> DumpFolder:
    """The dumps in ``folder``: the last number in a file's name is the rank, as in ``nccl_trace_rank_3``.

    Raises OSError if the folder cannot be read, and DumpError if two dumps are of one rank.
    """
    found, files = DumpFolder({}, {}), dict[int, str]()
    for path in sorted(folder.iterdir()):
        match = _RANK.fullmatch(path.name)
        if match is None or not path.is_file():
            continue
        rank = int(match[1])
        try:
            dump = parse_dump(_read(path))
        except (DumpError, OSError) as error:
            found.unusable[path.name] = str(error)
            continue
        if rank in files:
            raise DumpError(f"{files[rank]} and {path.name} are both of rank {rank}; dumps of one hang are judged")
        files[rank], found.dumps[rank] = path.name, dump
    return found


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(MAX_FILE + 1)
    if len(content) > MAX_FILE:
        raise DumpError(f"larger than {MAX_FILE >> 20} MiB")
    return content


# Who keeps the others waiting, from the flight recorder dumps of some or all ranks.
#
# Each rank waits in operations that have not ended; each of those waits for the ranks that have not called it. A
# rank that waits in another operation passes the blame on. The remaining ranks wait for no other rank. They have
# stopped on the host, or their device does not end an operation that has ended on others.


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
