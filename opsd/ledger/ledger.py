"""Where the wall-clock time of a run went: every second in exactly one bucket. Pure, but for ``read_ledger``.

================  ====================================================================================================
bucket            time
================  ====================================================================================================
productive        in steps that were done for the first time
recomputed        in steps that had been done before a failure, and in the step that a failure cut off
detection         from a failure (hang: the last change of the rank; node: its last sign) until the launcher noticed
restart           from noticing a failure to the beginning of the next generation's first step, without load
load              reading a checkpoint
setup             from the start of the run to its first step, without load
checkpoint_stall  in which a checkpoint held up the training
data_stall        waiting for data beyond the usual: of a wait over 3 x the median wait, what exceeds the median
stop              from the last step to the end of the launcher
queued            between one launcher of the run and the next
other             between steps, outside of what the trainer counts as a step; evaluation
================  ====================================================================================================

ETTR (effective training time ratio) is productive / wall clock.

Steps are those of the included trainer, metrics.jsonl, or for any other program those that its launcher has seen on the
rank pages, steps.jsonl, where one line has the steps of ten seconds.
"""

from __future__ import annotations

import errno
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple, TypedDict

from opsd.files import open_regular
from opsd.words import plural

# A run's own records: its events and its steps, a JSON object a line. Its plan lies beside them.


EVENTS, METRICS, STEPS, PLAN = "events.jsonl", "metrics.jsonl", "steps.jsonl", "plan.json"
PLACES = "tracking/places.json"
"""By tracker of experiments, the address or the folder in which it has the run."""
_NUMBERS: Final = (
    "t", "generation", "step", "steps", "tokens", "new_tokens", "step_s", "data_s", "checkpoint_s", "evaluation_s",
    "load_s", "noticed_s", "silent_s", "stuck_s",
)  # fmt: skip
_BELOW: Final = 1e18
_LONGEST_LINE: Final = 1 << 24
_LONGEST_PLAN: Final = 1 << 16
"""Characters."""
_LOST_NODES: Final = ("node_lost", "node_retired")

Opener = Callable[[str, int], int]


class RunRecords(NamedTuple):
    """The events of a run and the lines about its steps, each in the order of time.

    ``unread`` says in a sentence each how many lines of a file could not be read.
    """

    events: list[dict[str, Any]]
    metrics: list[dict[str, Any]]
    unread: list[str]


class LedgerError(Exception):
    """There is no data for a ledger; the message says what is missing."""


def open_run_file(path: str, flags: int) -> int:
    """For open() as its ``opener``: a regular file of a run. Raises OSError.

    For root no link in the folder of another user is followed: what is read may be shown there (``report.html``).
    """
    if os.geteuid() or Path(path).parent.stat().st_uid == 0:
        return open_regular(path, flags)
    try:
        return open_regular(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "a link of another user, which root does not follow", path) from None
        raise


def read_records(folder: Path, opener: Opener = open_run_file) -> RunRecords:
    """The records of the run in ``folder``.

    A program may have a metrics.jsonl of its own in the folder, whose lines lack the seconds of a step.
    ``opener`` opens the files, as in open(). Raises LedgerError if there are no events.
    """
    unread: list[str] = []
    try:
        events = list(read_lines(folder / EVENTS, ("t", "event", "generation"), opener, unread))
    except OSError as error:
        raise LedgerError(f"{folder} is not a run folder: {EVENTS}: {error.strerror}") from error
    metrics: list[dict[str, Any]] = []
    for name in (METRICS, STEPS):
        with suppress(OSError):
            metrics = metrics or list(read_lines(folder / name, ("t", "step", "generation", "step_s"), opener, unread))
    return RunRecords(sorted(events, key=_time), sorted(metrics, key=_time), unread)


def read_lines(
    path: Path, required: Sequence[str], opener: Opener = open_run_file, unread: list[str] | None = None
) -> Iterator[dict[str, Any]]:
    """The JSON objects of ``path`` that have all ``required`` keys. Raises OSError.

    Lines that a crash has cut off are skipped, and lines with an invalid number, duration or count. So are lines of
    more than 16 Mi characters, since an endless line would fill the memory. ``unread`` gets a sentence about lines that
    are not JSON.
    """
    skipped: list[int] = []
    with open(path, encoding="utf-8", errors="replace", opener=opener) as file:
        for number, line in enumerate(iter(partial(file.readline, _LONGEST_LINE), ""), 1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                if line.endswith("\n"):  # else it is being written, or was cut off
                    skipped.append(number)
                continue
            if isinstance(record, dict) and all(record.get(key) is not None for key in required) and _is_sound(record):
                yield record
    if skipped and unread is not None:
        unread.append(f"{plural(len(skipped), 'line')} of {path.name} cannot be read (the first is line {skipped[0]})")


def read_plan(folder: Path, opener: Opener = open_run_file) -> str:
    """The text of the run's plan, as long as it can be. Raises OSError."""
    with open(folder / PLAN, encoding="utf-8", errors="replace", opener=opener) as file:
        return file.read(_LONGEST_PLAN)


def read_places(folder: Path, opener: Opener = open_run_file) -> dict[str, str]:
    """Links to the run in trackers, by their names; empty if unknown."""
    try:
        with open(folder / PLACES, encoding="utf-8", errors="replace", opener=opener) as file:
            found = json.loads(file.read(_LONGEST_PLAN))
    except (OSError, ValueError, RecursionError):
        return {}
    known = found if isinstance(found, dict) else {}
    return {name: place for name, place in known.items() if isinstance(place, str)}


def _is_sound(record: Mapping[str, Any]) -> bool:
    if not isinstance(record.get("event", ""), str):
        return False
    values = (value for name in _NUMBERS if (value := record.get(name)) is not None)
    return all(isinstance(value, int | float) and abs(value) < _BELOW for value in values)


def lost_nodes(events: Sequence[Mapping[str, Any]]) -> int:
    """How many nodes the run has lost, or had replaced."""
    return sum(event["event"] in _LOST_NODES for event in events)


def gpus_of(events: Sequence[Mapping[str, Any]]) -> int:
    """Those of the newest generation, 0 if nobody has told."""
    told = (event.get("gpus") for event in reversed(events) if event["event"] == "generation_started")
    newest = next(told, None)
    return newest if isinstance(newest, int) else 0


def _time(record: Mapping[str, Any]) -> float:
    return float(record["t"])


BUCKETS = (
    "productive",
    "recomputed",
    "detection",
    "restart",
    "load",
    "setup",
    "checkpoint_stall",
    "data_stall",
    "stop",
    "queued",
    "other",
)
DATA_STALL_FACTOR = 3.0
_FAILURES = ("rank_exited", "hang_detected", "node_lost", "ranks_gone", "restart_requested")
_NS = 1_000_000_000


class LedgerDocument(TypedDict):
    """What ``opsd ledger --json`` prints. ``buckets`` has the seconds in every bucket, which sum to ``wall_s``."""

    wall_s: float
    ettr: float
    buckets: dict[str, float]
    steps: int
    generations: int
    finished: bool
    notes: list[str]


@dataclass(frozen=True, slots=True)
class Ledger:
    """``nanoseconds`` per bucket, which sum to the run's wall clock. ``notes`` say what could not be distinguished."""

    nanoseconds: Mapping[str, int]
    steps: int
    generations: int
    finished: bool
    notes: tuple[str, ...] = ()

    @property
    def wall_s(self) -> float:
        """Wall clock of the run in seconds."""
        return sum(self.nanoseconds.values()) / _NS

    @property
    def buckets(self) -> dict[str, float]:
        """Seconds per bucket, in the order of ``BUCKETS``."""
        return {name: self.nanoseconds[name] / _NS for name in BUCKETS}

    @property
    def ettr(self) -> float:
        """Share of the wall clock spent on steps done for the first time; 0 for an empty run."""
        return self.nanoseconds["productive"] / _NS / self.wall_s if self.wall_s else 0.0

    def as_dict(self) -> LedgerDocument:
        """The ledger for JSON."""
        return LedgerDocument(
            wall_s=self.wall_s,
            ettr=self.ettr,
            buckets=self.buckets,
            steps=self.steps,
            generations=self.generations,
            finished=self.finished,
            notes=list(self.notes),
        )


@dataclass(slots=True)
class _Generation:
    """The events of one generation; times in wall nanoseconds."""

    number: int
    started: int
    after_failure: bool
    failed: int | None = None
    blind: int = 0
    """From the failure itself to ``failed``, when it was noticed."""
    load: int = 0
    resumed: int | None = None
    finished: int | None = None


@dataclass(slots=True)
class _Clock:
    """A cursor that moves forward over the run's time and books it."""

    at: int
    booked: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BUCKETS, 0))

    def advance(self, to: int, bucket: str) -> None:
        if to > self.at:
            self.booked[bucket] += to - self.at
            self.at = to


def make_ledger(
    events: Sequence[Mapping[str, Any]], metrics: Sequence[Mapping[str, Any]], unread: Sequence[str] = ()
) -> Ledger:
    """The ledger of a run from its launcher events and its steps, one mapping for each, or for several ``steps``.

    ``unread``, what could not be read of the files, is among its notes. Raises LedgerError if the events hold no start
    of a generation.
    """
    generations = _generations(events)
    if not generations:
        raise LedgerError("the events hold no generation_started: the run never began")
    steps = _steps(metrics)
    usual = median(float(line.get("data_s") or 0.0) / _count(line) for line in metrics) if metrics else 0.0
    clock, highest, total = _Clock(generations[0].started), -1, 0
    for index, generation in enumerate(generations):
        following = generations[index + 1] if index + 1 < len(generations) else None
        clock.advance(generation.started, "restart" if generation.after_failure else "queued")
        own = steps.get(generation.number, [])
        _book_start(clock, generation, own)
        end = generation.failed or generation.finished or (following.started if following else None)
        for step in own:
            _book_step(clock, step, again=repeated_share(step, highest), usual=usual, end=end)
        _book_end(clock, generation, known=bool(metrics), stepped=bool(own))
        highest = max([highest, *(step["step"] for step in own if not step.get("relative"))])
        total += sum(_count(step) for step in own)
    clock.advance(max(_ns(event["t"]) for event in events), "other")
    finished = generations[-1].finished is not None
    return Ledger(clock.booked, total, len(generations), finished, (*unread, *_notes(metrics, finished)))


def _generations(events: Sequence[Mapping[str, Any]]) -> list[_Generation]:
    found: list[_Generation] = []
    for event in sorted(events, key=lambda event: float(event["t"])):
        kind, t = event["event"], _ns(event["t"])
        if kind == "generation_started":
            after_failure = bool(found) and found[-1].failed is not None and found[-1].finished is None
            found.append(_Generation(int(event["generation"]), t, after_failure))
            continue
        if not found:
            continue
        current = found[-1]
        if kind in _FAILURES and current.failed is None and event.get("culprit", True) and event.get("ranks", True):
            current.failed = t
            current.blind = _ns(event.get("stuck_s") or event.get("noticed_s") or event.get("silent_s") or 0)
        elif kind == "checkpoint_loaded":
            current.load = max(current.load, _ns(event.get("load_s") or 0))
        elif kind == "resumed":
            current.resumed = t
        elif kind == "finished":
            current.finished = t
    return found


def _book_start(clock: _Clock, generation: _Generation, steps: Sequence[Mapping[str, Any]]) -> None:
    """From the start of the processes to the first step."""
    bucket = "restart" if generation.after_failure else "setup"
    if steps:
        first = _ns(steps[0]["t"]) - _ns(steps[0].get("step_s") or 0)
    elif generation.resumed is not None:
        first = generation.resumed
    else:
        return
    if generation.failed is not None:
        first = min(first, generation.failed)
    clock.advance(max(clock.at, first - generation.load), bucket)
    clock.advance(first, "load")


def _count(line: Mapping[str, Any]) -> int:
    """How many steps a line has."""
    return max(1, int(line.get("steps") or 1))


def repeated_steps(metrics: Sequence[Mapping[str, Any]]) -> int:
    """Steps of ``metrics``, in the order of time, that had been done before."""
    highest, again = -1, 0.0
    for line in metrics:
        again += repeated_share(line, highest) * _count(line)
        highest = highest if line.get("relative") else max(highest, int(line["step"]))
    return round(again)


def trained_tokens(metrics: Sequence[Mapping[str, Any]]) -> int | None:
    """Tokens that the model was trained on, those of repeated steps once; None if nobody has reported any.

    The trainer counts those up to a step, steps.jsonl has those of each line's steps. ``metrics`` are in the order of
    time.
    """
    if so_far := [line["tokens"] for line in metrics if isinstance(line.get("tokens"), int)]:
        return int(max(so_far))
    done = sum(map(_count, metrics))
    new = sum(int(line.get("new_tokens") or 0) for line in metrics)
    return round(new * (done - repeated_steps(metrics)) / done) if new else None


def earlier_tokens(metrics: Sequence[Mapping[str, Any]]) -> int:
    """Of ``trained_tokens``, those before the first step that ``metrics`` have: of a run that came from another folder.

    All steps before it are taken to be as large as it.
    """
    told = [line for line in metrics if isinstance(line.get("tokens"), int) and int(line.get("step") or 0) > 0]
    if not told:
        return 0
    first = min(told, key=lambda line: int(line["step"]))
    return int(first["tokens"] * max(0.0, 1 - _count(first) / int(first["step"])))


def repeated_share(line: Mapping[str, Any], highest: int) -> float:
    """The share of the steps of a line, which follow each other, that had been done before; 0 if nobody knows.

    ``highest`` is the last step that had been done, -1 if there was none.
    """
    if line.get("relative"):
        return 0.0
    count = _count(line)
    first = int(line["step"]) - count + 1
    return min(max(highest - first + 1, 0), count) / count


def _book_step(clock: _Clock, step: Mapping[str, Any], *, again: float, usual: float, end: int | None) -> None:
    """The time up to the end of one step, or several: what lies before, their stalls, their work."""
    done, count = _ns(step["t"]) if end is None else min(_ns(step["t"]), end), _count(step)
    clock.advance(done - _ns(step.get("step_s") or 0), "other")
    for bucket, seconds in (
        ("checkpoint_stall", step.get("checkpoint_s") or 0.0),
        ("data_stall", count * data_stall((step.get("data_s") or 0.0) / count, usual)),
        ("other", step.get("evaluation_s") or 0.0),
    ):
        clock.advance(min(done, clock.at + _ns(seconds)), bucket)
    clock.advance(clock.at + round(max(0, done - clock.at) * again), "recomputed")
    clock.advance(done, "productive")


def _book_end(clock: _Clock, generation: _Generation, *, known: bool, stepped: bool) -> None:
    """What is left of a generation after its last step; without ``known`` steps that is all of it."""
    if not known:
        unfinished = rest = "productive"
    elif stepped:
        unfinished, rest = "recomputed", "stop"
    else:
        unfinished = rest = "restart" if generation.after_failure else "setup"
    if generation.failed is not None:
        clock.advance(generation.failed - generation.blind, unfinished)
        clock.advance(generation.failed, "detection")
        rest = "stop"
    if generation.finished is not None:
        clock.advance(generation.finished, rest)


def data_stall(wait_s: float, usual_s: float) -> float:
    """The part of one step's wait for data that counts as a stall, in seconds."""
    return wait_s - usual_s if wait_s > DATA_STALL_FACTOR * usual_s else 0.0


def _steps(metrics: Sequence[Mapping[str, Any]]) -> dict[int, list[Mapping[str, Any]]]:
    """The steps of each generation in the order of time."""
    found: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for line in metrics:
        found[int(line["generation"])].append(line)
    for steps in found.values():
        steps.sort(key=lambda line: float(line["t"]))
    return found


def _notes(metrics: Sequence[Mapping[str, Any]], finished: bool) -> Iterator[str]:
    if not metrics:
        yield (
            "no metrics.jsonl, and no steps on rank pages: steps are not known, so recomputed steps, stalls and the "
            "setup of the first generation count as productive"
        )
    if any(line.get("relative") for line in metrics) and len({line["generation"] for line in metrics}) > 1:
        yield (
            "the program reports steps without their number (reporter.step(step=…)): which ones were done again after "
            "a restart is not known, so they count as productive"
        )
    if not finished:
        yield "the run has not finished: the time after the last event or step is missing"


def _ns(seconds: float) -> int:
    return round(float(seconds) * _NS)


def read_ledger(folder: Path) -> Ledger:
    """The ledger of the run in ``folder``, from its events.jsonl and metrics.jsonl, or else steps.jsonl.

    Raises LedgerError if there are no events.
    """
    return make_ledger(*read_records(folder))
