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

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypedDict

from opsd.ledger.records import LedgerError, read_records

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
