"""PyTorch's flight recorder: which ranks did not come to the earliest collective that others wait in.

Dumps are read as JSON, as written by ``torch._C._distributed_c10d._dump_fr_trace_json`` (seen with torch 2.13, format
version 2.10). PyTorch's own dump files are pickles, which can run code when loaded: they are recognized, never loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

MISSING, SCHEDULED, STARTED, COMPLETED = range(4)
"""How far a rank has come with a collective: not called, called, running on the device, done."""
MAX_CALLS: Final = 256
"""Collectives kept of each process group of a dump, the newest."""
MAX_GROUPS: Final = 64
_PROGRESS: Final = {"scheduled": SCHEDULED, "started": STARTED, "completed": COMPLETED}


class DumpError(Exception):
    """A dump that cannot be used; the message says why in one sentence."""


@dataclass(frozen=True, slots=True)
class Call:
    """One collective on one rank: its operation, when it was called (epoch nanoseconds), how far it has come."""

    operation: str
    called_ns: int
    progress: int


@dataclass(frozen=True, slots=True)
class Dump:
    """The dump of one rank.

    ``calls`` has the recent collectives by process group and sequence number, ``members`` the ranks of each process
    group where the dump tells.
    """

    calls: Mapping[str, Mapping[int, Call]]
    members: Mapping[str, frozenset[int]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The earliest collective that did not complete everywhere.

    ``missing`` have never called it, ``not_started`` have called it but their device has not begun it while others'
    have, ``no_dump`` left nothing to judge them by (the culprit often cannot write one), ``waiting`` are the others.
    """

    group: str
    sequence: int
    operation: str
    missing: tuple[int, ...]
    not_started: tuple[int, ...]
    no_dump: tuple[int, ...]
    waiting: tuple[int, ...]

    @property
    def culprits(self) -> tuple[int, ...]:
        """The ranks to look at first; empty if all have come and the fault lies between them."""
        return self.missing or self.no_dump or self.not_started


def parse_dump(content: bytes) -> Dump:
    """A dump from its JSON. Raises DumpError."""
    if content.startswith((b"\x80", b"PK")):
        raise DumpError("a pickle, which opsd never loads; have the trainer write _dump_fr_trace_json() instead")
    try:
        raw = json.loads(content)
        calls: dict[str, dict[int, Call]] = {}
        for entry in raw["entries"]:
            if not entry.get("is_p2p"):
                name = _text(entry["process_group"][0])
                calls.setdefault(name, {})[int(entry["collective_seq_id"])] = _call(entry)
        config = raw.get("pg_config", {}).values()
        members = {_text(group["name"]): _ranks(group["ranks"]) for group in config}
        return Dump({name: _newest(found) for name, found in islice(calls.items(), MAX_GROUPS)}, members)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OverflowError) as error:
        raise DumpError(f"not a flight recorder dump, or half of one ({type(error).__name__})") from error


def _call(entry: Mapping[str, Any]) -> Call:
    operation = _text(entry["profiling_name"])
    # NCCL's watchdog retires what has completed. Gloo has no states: there, to have called is all that is known.
    over = entry.get("retired") or not operation.startswith("nccl")
    return Call(operation, int(entry["time_created_ns"]), COMPLETED if over else _PROGRESS[entry["state"]])


def _text(value: object) -> str:
    """Raises UnicodeEncodeError for half a surrogate pair, which JSON can hold but UTF-8 cannot."""
    text = str(value)[:64]
    text.encode()
    return text


def _newest(calls: Mapping[int, Call]) -> dict[int, Call]:
    return {sequence: calls[sequence] for sequence in sorted(calls)[-MAX_CALLS:]}


def _ranks(listed: object) -> frozenset[int]:
    """The ranks of a group: a list, or in older versions a list in a string."""
    ranks = json.loads(listed) if isinstance(listed, str) else listed
    if not isinstance(ranks, list):
        raise TypeError("ranks is not a list")
    return frozenset(int(rank) for rank in ranks)


def judge(dumps: Mapping[int, Dump], world: frozenset[int] = frozenset()) -> Verdict | None:
    """What the dumps of some or all ranks, by rank, tell; None if every collective has completed everywhere.

    ``world`` are the ranks of groups that no dump lists the members of. Of several process groups the one whose
    collective was called first is blamed: the others wait for it.
    """
    stuck = list(_stuck(dumps, world))
    return min(stuck, key=lambda found: found[0])[1] if stuck else None


def _stuck(dumps: Mapping[int, Dump], world: frozenset[int]) -> Iterator[tuple[int, Verdict]]:
    """For each process group its earliest incomplete collective, with the time at which it was first called."""
    groups = sorted({name for dump in dumps.values() for name in dump.calls})
    for group in groups:
        members = next((d.members[group] for d in dumps.values() if group in d.members), world)
        callers = {rank: dump for rank, dump in dumps.items() if group in dump.calls or rank in members}
        for sequence in sorted({number for dump in callers.values() for number in dump.calls.get(group, ())}):
            progress = {rank: _progress(dump, group, sequence) for rank, dump in callers.items()}
            if min(progress.values()) < COMPLETED:
                calls = [
                    dump.calls[group][sequence] for dump in callers.values() if sequence in dump.calls.get(group, ())
                ]
                first = min(calls, key=lambda call: call.called_ns)
                silent = tuple(sorted(members - dumps.keys()))
                yield first.called_ns, _verdict(group, sequence, first.operation, progress, silent)
                break


def _progress(dump: Dump, group: str, sequence: int) -> int:
    calls = dump.calls.get(group, {})
    if sequence in calls:
        return calls[sequence].progress
    # The recorder is a ring: what is older than its oldest entry has been called and is over.
    return COMPLETED if calls and sequence < min(calls) else MISSING


def _verdict(
    group: str, sequence: int, operation: str, progress: Mapping[int, int], no_dump: tuple[int, ...]
) -> Verdict:
    furthest = max(progress.values())

    def at(*levels: int) -> tuple[int, ...]:
        return tuple(sorted(rank for rank, level in progress.items() if level in levels))

    lagging = at(SCHEDULED) if furthest > SCHEDULED else ()
    waiting = tuple(rank for rank in at(SCHEDULED, STARTED, COMPLETED) if rank not in lagging)
    return Verdict(group, sequence, operation, at(MISSING), lagging, no_dump, waiting)
