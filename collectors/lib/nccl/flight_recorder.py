"""PyTorch's flight recorder: what the dump of one rank says about the collectives that have not ended.

Dumps are JSON, as written by ``torch._C._distributed_c10d._dump_fr_trace_json``, or the pickles that torch's watchdog
writes (seen with format versions 2.9 and 2.10). A pickle is read with nothing but plain values allowed in it: it cannot
name a class or a function, and so cannot run anything.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

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
