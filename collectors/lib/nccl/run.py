"""What the files of one run tell about NCCL: the logs of its ranks on this node, and flight recorder dumps.

The folders belong to the run's user while the agent may be root. ``run.json`` names the folders of the run and of its
logs; they are opened with that user's rights, used only if the same user owns them, and nothing in them is reached
through a symbolic link. ``tail`` says how files are read.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Final, NamedTuple

from opsd.collectors.base import Event, Metric, Reading, RunFact, Sample
from opsd.collectors.lib.host_pids import HostPids
from opsd.collectors.lib.nccl.desync import Desync, Dump, DumpError, judge, parse_dump, restored
from opsd.collectors.lib.run_files import Rights, Tail, groups_of_process, open_as, parse_run, read_small
from opsd.collectors.lib.sandbox import Sandbox, SandboxError
from opsd.collectors.lib.shares import Allowance, Room

LOGS = Metric("opsd_nccl_rank_logs", "Rank logs on this node that are followed for messages of NCCL.", labels=("run",))
MESSAGES = Metric(
    "opsd_nccl_log_messages_total",
    "Messages of NCCL in the log of a rank.",
    "counter",
    "",
    ("run", "rank", "kind"),
    kept=False,
)

MAX_RANKS: Final = 64
"""Ranks of a run on one node that are followed."""
MAX_DUMPS: Final = 16_384
"""Dumps of a run that are judged."""
MAX_EVENTS: Final = 16
"""Log messages told in one collection; the rest is only counted."""
LOG_BYTES: Final = 2 << 20
ENTRIES: Final = 2_048
"""Bytes of logs, and entries of a folder, that are read in one look."""
MAX_DUMP: Final = 8 << 20
PARSER: Final = f"{parse_dump.__module__}:{parse_dump.__name__}"
TURN_S: Final = 120.0
"""How long a dump waits for its turn."""
DUMPS: Final = "flight_recorder"
"""Folder of the dumps in the run folder; their names are rank-0000.json, or rank_0 if torch has written them."""
READ_S: Final = 0.5
"""How long one collection reads dumps; the others follow in the next."""
SAME_HANG_S: Final = 600.0
"""Dumps are of one hang if they were written within this time; older ones are of an earlier one."""

_PAGE = re.compile(r"rank-(\d{4,6})\.page", re.ASCII)
_DUMP = re.compile(r"rank-(\d{4,6})\.json|rank_(\d{1,6})", re.ASCII)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

KINDS: Final = ("warning", "timeout", "error")
MAX_TEXT: Final = 300


class LogMessage(NamedTuple):
    """One message: a warning of NCCL, a collective that timed out, or an asynchronous error.

    ``operation`` and ``sequence`` are those of the collective, "" and None where the line names none.
    """

    kind: str
    text: str
    operation: str = ""
    sequence: int | None = None


_WARNING = re.compile(r"\bNCCL WARN (.+)")
_TIMEOUT = re.compile(r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d{1,20}), OpType=(\w+)")
_RESULTS = "UnhandledCudaError|SystemError|InternalError|InvalidArgument|InvalidUsage|RemoteError|Timeout"
_PHRASES = r"Watchdog thread terminated with exception|NCCL communicator was aborted|\bNCCL error\b"
_ERROR = re.compile(rf"(?:\bnccl(?:{_RESULTS})\b|{_PHRASES}).*")


def parse_line(line: bytes) -> LogMessage | None:
    """The message in a line of a rank's log, None in all others."""
    if b"NCCL" not in line and b"nccl" not in line and b"Watchdog" not in line:
        return None
    text = line.decode("utf-8", "replace")
    if match := _WARNING.search(text):
        return LogMessage("warning", _clean(match[1]))
    if match := _TIMEOUT.search(text):
        return LogMessage("timeout", _clean(text[match.start() :]), match[2], int(match[1]))
    if match := _ERROR.search(text):
        return LogMessage("error", _clean(match[0]))
    return None


def _clean(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)[:MAX_TEXT].strip()


class SharedLimits(NamedTuple):
    """What the runs of all users share: the bytes of dumps that are read, where they are, and what is kept of them."""

    allowance: Allowance
    apart: Sandbox
    room: Room


class NcclRun:
    """The run of the user ``owner`` with the folder ``memory`` in shared memory.

    With ``skip_old`` what its files hold is passed over. Dumps are read as far as ``limits`` go.
    """

    def __init__(self, memory: Path, owner: int, *, skip_old: bool, limits: SharedLimits, host: HostPids) -> None:
        self.owner = owner
        self._memory = memory
        self._run = memory.name
        self._skip_old, self._host = skip_old, host
        self._own = self._rights = Rights(owner, frozenset())
        self._launcher = 0
        self._tails: dict[tuple[int, int], Tail] = {}
        self._counts: Counter[tuple[int, str]] = Counter()
        self._dumps = _Dumps(self._run, owner, limits)
        self.leads = False

    def read(self, wall: float, log_bytes: int = LOG_BYTES) -> Reading:
        """What is new; ``leads`` says afterwards whether rank 0 of the run is on this node.

        At most ``log_bytes`` of logs are read, the rest at the next look.
        """
        self.leads = False
        skip_old, self._skip_old = self._skip_old, False
        with _opened(self._memory) as memory:
            if memory is None or os.fstat(memory).st_uid != self.owner:
                return Reading()
            found = read_small("run.json", memory, self._own)
            ranks = _numbers(memory, _PAGE)
        run = parse_run(found[0], self._run, partial(self._host.find, self.owner)) if found else None
        if run is None:
            return Reading()
        self.leads = 0 in ranks
        if run.alive and run.launcher_pid != self._launcher:
            self._launcher = run.launcher_pid
            self._rights = Rights(self.owner, groups_of_process(run.launcher_pid, self.owner))
        with _opened_as(self._rights, run.folder) as folder:
            if folder is None or os.fstat(folder).st_uid != self.owner:
                return Reading((Sample(LOGS, 0, (self._run,)),))
            messages, followed = self._read_logs(run.logs, run.generation, ranks, skip_old, log_bytes)
            events = [self._event(rank, message, wall) for rank, message in messages[:MAX_EVENTS]]
            if self.leads:
                events += self._dumps.read(folder, run, wall, skip_old)
        self._counts.update((rank, message.kind) for rank, message in messages)
        samples = [Sample(LOGS, followed, (self._run,))]
        for rank, kind in product(ranks, KINDS):
            samples.append(Sample(MESSAGES, self._counts[rank, kind], (self._run, str(rank), kind)))
        return Reading(tuple(samples), tuple(events))

    def _read_logs(
        self, folder: str, generation: int, ranks: list[int], skip_old: bool, most: int
    ) -> tuple[list[tuple[int, LogMessage]], int]:
        """New messages of this generation and of what the one before has still written; how many logs are followed."""
        wanted = {(number, rank) for number in (generation - 1, generation) for rank in ranks}
        self._tails = {key: tail for key, tail in self._tails.items() if key in wanted}
        messages: list[tuple[int, LogMessage]] = []
        followed = 0
        with _opened_as(self._rights, folder) as logs:
            for number in (generation - 1, generation):
                with _opened(Path(f"gen-{number:04d}"), logs) as place:
                    if place is None or os.fstat(place).st_uid != self.owner:
                        continue
                    for rank in ranks:
                        lines = self._read_log(place, number, rank, skip_old, most)
                        most -= sum(map(len, lines))
                        messages += [(rank, message) for line in lines if (message := parse_line(line))]
                    followed += len(ranks) if number == generation else 0
        return messages, followed

    def _read_log(self, place: int, generation: int, rank: int, skip_old: bool, most: int) -> list[bytes]:
        tail = self._tails.get((generation, rank))
        if tail is None:
            tail = self._tails[generation, rank] = Tail(f"rank-{rank:04d}.log", self._own)
            if skip_old:
                tail.skip(place)
        return tail.read(place, most)

    def _event(self, rank: int, message: LogMessage, wall: float) -> Event:
        data = {
            "run": self._run,
            "rank": rank,
            "kind": message.kind,
            "text": message.text,
            "operation": message.operation,
            "sequence": message.sequence,
        }
        text = f"rank {rank} of {self._run}: NCCL {message.kind}: {message.text}"
        return Event("nccl_log", wall, text[:256], data, self.owner)


class _Dumps:
    """The flight recorder dumps of a run; judged once no more of them arrive."""

    def __init__(self, run: str, owner: int, limits: SharedLimits) -> None:
        self._run, self._owner, self._rights, self._limits = run, owner, Rights(owner, frozenset()), limits
        self._seen: dict[str, tuple[float, int]] = {}
        self._kept = KeptDumps(owner, limits.room)
        self._read_at: dict[int, float] = {}
        self._unjudged = False
        self._verdict: Desync | None = None

    def read(self, folder: int, run: RunFact, wall: float, skip_old: bool) -> list[Event]:
        """Events about new dumps: one that cannot be used, or the verdict of all once they have settled."""
        for rank in [rank for rank, at in self._read_at.items() if wall - at > SAME_HANG_S]:
            del self._read_at[rank]
            self._kept.forget(rank)
        with _opened(Path(DUMPS), folder) as place:
            if place is None:
                return []
            changed, events = False, list[Event]()
            deadline = time.monotonic() + READ_S
            for rank, name in self._changed(place, deadline):
                changed = True
                if not skip_old and (event := self._load(place, rank, name, wall)):
                    events.append(event)
        if changed or not self._unjudged:
            return events
        self._unjudged = False
        newest = max((at for at, _ in self._kept.of_rank.values()), default=0.0)
        fresh = {rank: dump for rank, (at, dump) in self._kept.of_rank.items() if newest - at <= SAME_HANG_S}
        verdict = judge(fresh, frozenset(range(run.world_size)))
        if verdict is not None and verdict != self._verdict:
            events.append(self._verdict_event(verdict, wall))
        self._verdict = verdict
        return events

    def _changed(self, place: int, deadline: float) -> Iterator[tuple[int, str]]:
        with os.scandir(place) as found:
            names = [entry.name for entry in islice(found, MAX_DUMPS)]
        for name in sorted(filter(_DUMP.fullmatch, names)):
            with contextlib.suppress(OSError):
                info = os.stat(name, dir_fd=place, follow_symlinks=False)
                if self._seen.get(name) != (info.st_mtime, info.st_size) and time.monotonic() < deadline:
                    self._seen[name] = (info.st_mtime, info.st_size)
                    yield int(name.partition(".")[0][5:]), name

    def _load(self, place: int, rank: int, name: str, wall: float) -> Event | None:
        if not self._limits.allowance.take(self._owner, self._seen[name][1], wall):
            return None
        self._read_at[rank] = wall
        found = read_small(name, place, self._rights, MAX_DUMP)
        try:
            if found is None:
                raise DumpError(f"not a regular file of at most {MAX_DUMP >> 20} MiB")
            self._kept.keep(rank, found[1], self._parse(found[0]))
            self._unjudged = True
        except (DumpError, SandboxError) as error:
            text = f"flight recorder dump of rank {rank} of {self._run}: {error}"
            return Event("nccl_dump_unusable", wall, text, {"run": self._run, "rank": rank, "why": str(error)})
        return None

    def _parse(self, content: bytes) -> Dump:
        future = self._limits.apart.parse(self._owner, PARSER, content)
        try:
            return restored(future.result(TURN_S))
        except TimeoutError as error:
            future.cancel()
            raise DumpError("others were read all the time") from error

    def _verdict_event(self, verdict: Desync, wall: float) -> Event:
        culprits = ", ".join(map(str, verdict.culprits[:8])) or "none in particular"
        what = f"{verdict.operation} {verdict.sequence} of group {verdict.group}"
        data = {
            "run": self._run,
            "group": verdict.group,
            "sequence": verdict.sequence,
            "operation": verdict.operation,
            "cause": verdict.cause,
            "confidence": verdict.confidence,
            "culprits": list(verdict.culprits),
            "missing": list(verdict.missing),
            "not_started": list(verdict.not_started),
            "no_dump": list(verdict.no_dump),
            "waiting": len(verdict.waiting),
        }
        return Event("nccl_flight_recorder", wall, f"{self._run}: stuck in {what}; ranks: {culprits}"[:256], data)


def _numbers(folder: int, pattern: re.Pattern[str]) -> list[int]:
    """The ranks that the files in ``folder`` are named after."""
    with os.scandir(folder) as found:
        names = [entry.name for entry in islice(found, ENTRIES)]
    return sorted(int(match[1]) for name in names if (match := pattern.fullmatch(name)))[:MAX_RANKS]


@contextlib.contextmanager
def _opened(path: Path, parent: int | None = None) -> Iterator[int | None]:
    """The folder ``path``, opened; None if there is no such folder or ``parent`` would be needed and is None."""
    if parent is None and not path.is_absolute():
        yield None
        return
    try:
        descriptor = os.open(path, _FOLDER, dir_fd=parent)
    except OSError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _opened_as(rights: Rights, path: str) -> Iterator[int | None]:
    """The folder ``path``, opened with the rights of a user; None if there is none for that user."""
    descriptor = None
    with contextlib.suppress(OSError):
        descriptor = open_as(rights, path, _FOLDER) if path.startswith("/") else None
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


CALL_BYTES: Final = 1_024
GROUP_BYTES: Final = 512
RANK_BYTES: Final = 40
"""What a call, a group and a member of a group take at most."""

Members = tuple[int, ...]


class KeptDumps:
    """Dumps of a run of ``owner`` that wait to be judged, by rank, each with its time. Used in one thread.

    ``held`` is what they take of the ``room`` that the runs of all users share.
    """

    def __init__(self, owner: int, room: Room) -> None:
        self.owner, self.held = owner, 0
        self._room = room
        self.of_rank: dict[int, tuple[float, Dump]] = {}
        self._members: dict[Members, tuple[Members, int]] = {}
        """The members of groups, which dumps have in common, and how many have them."""

    def keep(self, rank: int, at: float, dump: Dump) -> None:
        """Keep ``dump`` in place of an earlier one of ``rank``. Raises DumpError."""
        self.forget(rank)
        new = {ranks for ranks in dump.members.values() if ranks not in self._members}
        if not self._room.take(self, _size(dump) + sum(map(_size_of_members, new))):
            raise DumpError("there is no room left for what it tells")
        members = {}
        for name, ranks in dump.members.items():
            members[name], users = self._members.get(ranks, (ranks, 0))
            self._members[members[name]] = members[name], users + 1
        self.of_rank[rank] = at, replace(dump, members=members)

    def forget(self, rank: int) -> None:
        """Give up the dump of ``rank``, if there is one."""
        _, dump = self.of_rank.pop(rank, (0.0, None))
        if dump is None:
            return
        self.held -= _size(dump)
        for ranks in dump.members.values():
            same, users = self._members.pop(ranks)
            if users > 1:
                self._members[same] = same, users - 1
            else:
                self.held -= _size_of_members(ranks)


def _size(dump: Dump) -> int:
    return len(dump.calls) * CALL_BYTES + (1 + len(dump.last) + len(dump.members)) * GROUP_BYTES


def _size_of_members(ranks: Members) -> int:
    return GROUP_BYTES + len(ranks) * RANK_BYTES
