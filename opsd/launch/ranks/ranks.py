"""The ranks of this node: a generation of them, its progress, and its failures."""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from opsd.client import PERSIST, events_path
from opsd.events import CheckpointCommitted, RankExited, Resumed
from opsd.files import FileTail
from opsd.launch.io.console import RankOutput
from opsd.launch.io.loop import Loop, Timer
from opsd.launch.io.reporting import EventLog
from opsd.launch.ranks.dumps import socket_of
from opsd.launch.ranks.failure import Failure, RankError, classify, size_mismatch
from opsd.launch.ranks.process import Child, Exit
from opsd.launch.ranks.step_log import StepLog
from opsd.rank_page import PageError, RankPage, read_page

AT_ONCE_S = 60.0
"""A failure so soon after the ranks' start is one at startup."""
AGGREGATION_S = 0.02
"""After a failure that is clearly a first cause: time for the other ranks' exits, for the record."""
VICTIM_S = 1.0
"""After an exit that looks like the consequence of another: time for that other one to show."""
LOOK_S = 0.05
_WITH_STACK = 200
"""Lines of a log that reach back over the stack of an abort."""
_OURS = ("t", "event", "generation", "run", "node")
"""Fields of an event that a rank cannot set."""


@dataclass(slots=True)
class Rank:
    """A rank of the running generation. ``ended`` is the monotonic second at which its failure or end was noticed."""

    rank: int
    local_rank: int
    child: Child
    channel: socket.socket
    output: RankOutput
    log: Path
    error_file: Path
    page_path: Path
    warm: bool
    records: bool = False
    """Whether the program uses torch.distributed, so that it can be asked for its flight recorder."""
    exit: Exit | None = None
    ended: float | None = None
    noticed_s: float = 0.0

    def page(self) -> RankPage | None:
        """The rank's page, None if it has none (yet). A page of another process, stale or forged, is ignored."""
        try:
            page = read_page(self.page_path)
        except PageError:
            return None
        return page if page.pid == self.child.pid else None

    def failing(self) -> bool:
        """Whether the message on its channel says that the program has failed, or the channel is closed.

        A standby that was used while it still imported first reports that it is ready, and any that it records.
        """
        try:
            said = self.channel.recv(4096)
        except OSError:
            return True
        self.records = self.records or b'"records"' in said
        return not said or b'"failed"' in said

    @property
    def socket_path(self) -> Path:
        """Where torch's own server answers, whatever the interpreter does."""
        return Path(socket_of(str(self.page_path)))

    def ask_for_dump(self, path: Path) -> bool:
        """Ask the rank to write its flight recorder to ``path``; False if it cannot be asked."""
        payload = json.dumps({"do": "dump", "path": str(path)}).encode()
        try:
            if self.records:
                self.channel.send(len(payload).to_bytes(4, "little") + payload, socket.MSG_DONTWAIT)
        except OSError:
            return False
        return self.records

    def log_tail(self, lines: int = 20) -> str:
        """The last ``lines`` lines of the rank's output."""
        return self.output.tail(lines)

    def error(self) -> tuple[RankError, float] | None:
        """The exception that the rank has recorded and its wall second; None without one."""
        return read_error(self.error_file)

    def failure(self) -> Failure | None:
        """Its failure: a bad exit, or a recorded error before the exit. None without either."""
        if self.exit is not None and self.exit.ok:
            return None
        error, t = self.error() or (None, None)
        if self.exit is None and error is None:
            return None
        exit = str(self.exit) if self.exit is not None else "exit code 1"
        kind, detail = classify(exit, error, self.log_tail()), size_mismatch(self.log_tail(_WITH_STACK))
        failure = Failure(self.rank, exit, kind, self._ended_t(), error=error, detail=detail)
        return self._with_place(failure if t is None else replace(failure, t=t))

    def departure(self, before: float) -> Failure | None:
        """Its end in good order, if that came before the wall second ``before``: others may still have needed it."""
        if self.exit is None or not self.exit.ok or self._ended_t() > before:
            return None
        detail = "it ended while other ranks still communicated with it"
        return self._with_place(Failure(self.rank, str(self.exit), "user", self._ended_t(), detail=detail))

    def _ended_t(self) -> float:
        return _wall(self.ended or time.monotonic())

    def _with_place(self, failure: Failure) -> Failure:
        page = self.page()
        last = page.last_step if page is not None else None
        step, phase = last.step if last is not None else None, page.phase if page is not None else None
        return replace(failure, step=step, phase=phase, reports=page is not None and not page.observed)

    def report_exit(self, events: EventLog, failure: Failure, *, culprit: bool) -> None:
        """Write the ``rank_exited`` event of its ``failure``."""
        page, error = self.page(), failure.error
        last = page.last_step if page is not None else None
        fields = RankExited(
            rank=self.rank,
            pid=self.child.pid,
            exit=failure.exit,
            step=failure.step,
            phase=failure.phase,
            culprit=culprit,
            error=None if error is None else {"type": error.type, "message": error.message, "where": error.where},
            log_tail=self.log_tail(),
            last_step_t=None if last is None else round(_wall(last.end), 4),
            noticed_s=round(self.noticed_s, 4),
        )
        events.emit("rank_exited", **fields)


@dataclass(slots=True)
class Generation:
    """The ranks that were started together; ``number`` counts from 1 over the whole life of the run."""

    number: int
    ranks: list[Rank] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @property
    def running(self) -> list[Rank]:
        """The ranks that have not ended yet."""
        return [rank for rank in self.ranks if rank.exit is None]

    @property
    def saving(self) -> frozenset[int]:
        """Processes that write staged checkpoints to disk and may outlive their rank for that."""
        pages = filter(None, (rank.page() for rank in self.ranks))
        return frozenset(pid for page in pages for pid, role in page.workers if role == PERSIST)

    def failures(self) -> list[tuple[Failure, Rank]]:
        """The ranks that have failed, including those that have recorded an error and are about to end.

        If all of those have only lost a peer, also the ranks that had ended in good order by then.
        """
        found = [(self._timed(failure, rank), rank) for rank in self.ranks if (failure := rank.failure())]
        if not found or not all(failure.lost_a_peer for failure, _ in found):
            return found
        before = min(failure.t for failure, _ in found) + VICTIM_S
        left = [(self._timed(left, rank), rank) for rank in self.ranks if (left := rank.departure(before))]
        return [*found, *left]

    def _timed(self, failure: Failure, rank: Rank) -> Failure:
        soon = (rank.ended or time.monotonic()) - self.started < AT_ONCE_S
        return replace(failure, soon=soon, at_once=soon and self.number == 1)


def usable_pages(ranks: Sequence[Rank]) -> dict[int, RankPage]:
    """The pages of ``ranks`` by rank. Where some ranks report themselves, observed pages of others are left out.

    A program may count its steps from another number than the hooks do.
    """
    pages = {rank.rank: page for rank in ranks if (page := rank.page()) is not None}
    own = {rank: page for rank, page in pages.items() if not page.observed}
    return own or pages


class LocalFailureAggregation:
    """Waits for further failures after a rank has failed: the first to be noticed may not be the first cause.

    Calls ``settled`` once the relevant failures of this node should have shown.
    """

    def __init__(self, loop: Loop, settled: Callable[[], None]) -> None:
        self._loop = loop
        self._settled = settled
        self._timer: Timer | None = None
        self._looking: Timer | None = None

    @property
    def open(self) -> bool:
        """True while it waits."""
        return self._timer is not None

    def note(self, generation: Generation) -> None:
        """A rank has failed, or has reported that it fails."""
        clear = _has_first_cause(generation)
        if self._timer is None:
            self._timer = self._loop.later(AGGREGATION_S if clear else VICTIM_S, self._settle)
            if not clear:
                self._look_again(generation)
        elif clear or not generation.running:
            self._timer.cancel()
            self._timer = self._loop.later(0.0, self._settle)

    def _look_again(self, generation: Generation) -> None:
        self._looking = self._loop.later(LOOK_S, lambda: self._look(generation))

    def _look(self, generation: Generation) -> None:
        """Check whether the rank that failed first has recorded its error: it may take long to end."""
        if _has_first_cause(generation):
            self.note(generation)
        else:
            self._look_again(generation)

    def _settle(self) -> None:
        self.forget()
        self._settled()

    def forget(self) -> None:
        """Stop waiting."""
        for timer in (self._timer, self._looking):
            if timer is not None:
                timer.cancel()
        self._timer = self._looking = None


def _has_first_cause(generation: Generation) -> bool:
    return any(failure.kind != "communication" for failure, _ in generation.failures())


@dataclass(slots=True)
class Recovery:
    """A generation that recovers from a failure, noticed at the monotonic second ``noticed``."""

    noticed: float
    previous_step: int | None


@dataclass(slots=True)
class RunProgress:
    """The run's progress over all generations: highest completed step, highest durable checkpoint."""

    events: EventLog
    steps: StepLog | None = None
    furthest: int | None = None
    committed: int | None = None
    recovery: Recovery | None = None
    _tails: dict[int, FileTail] = field(default_factory=dict)

    def update(self, generation: Generation) -> dict[int, RankPage]:
        """Read all pages of ``generation`` and emit what is new as events; returns the usable pages by rank."""
        pages = usable_pages(generation.ranks)
        if self.steps is not None:
            self.steps.note(generation.number, pages)
        self._relay(generation.ranks)
        self._note_resumed(list(pages.values()))
        for page in pages.values():
            if page.last_step is not None:
                self.furthest = max(page.last_step.step, self.furthest if self.furthest is not None else -1)
            step = page.committed_step
            if step is not None and (self.committed is None or step > self.committed):
                self.committed = step
                self.events.emit("checkpoint_committed", **CheckpointCommitted(step=step))
        return pages

    def _note_resumed(self, pages: Sequence[RankPage]) -> None:
        stepping = [page for page in pages if page.steps]
        if self.recovery is None or not stepping:
            return
        page = min(stepping, key=lambda page: page.steps[0].end)
        first, previous, noticed = page.steps[0], self.recovery.previous_step, self.recovery.noticed
        self.recovery = None
        lost = 0 if previous is None else max(0, previous - first.step + 1)
        fields = Resumed(
            step=None if page.relative else first.step,
            previous_step=None if page.relative else previous,
            lost_steps=None if page.relative else lost,
            recovered_s=round(first.end - noticed, 4),
        )
        self.events.emit("resumed", **fields)

    def _relay(self, ranks: Sequence[Rank]) -> None:
        for rank in ranks:
            tail = self._tails.setdefault(rank.rank, FileTail(events_path(rank.page_path)))
            for record in tail.records():
                if isinstance(record.get("event"), str):
                    self._pass_on(rank.rank, record)

    def _pass_on(self, rank: int, record: Mapping[str, object]) -> None:
        t, step = record.get("t"), record.get("step")
        fields = {key: value for key, value in record.items() if key not in _OURS}
        moment = t if isinstance(t, int | float) and math.isfinite(t) else None
        self.events.write(str(record["event"]), moment, {**fields, "rank": rank})
        if record["event"] == "checkpoint_rejected" and isinstance(step, int) and self.committed is not None:
            # It will be committed again.
            self.committed = min(self.committed, step - 1)


def read_error(path: Path) -> tuple[RankError, float] | None:
    """The exception in a rank's error file and its wall second; None without one.

    The file is written by ``worker.py``, or by a program that uses torch's ``@record``.
    """
    try:
        message = json.loads(path.read_text(encoding="utf-8"))["message"]
        if isinstance(message, str):
            return RankError("Error", message, ""), path.stat().st_mtime
        extra = message["extraInfo"]
        name, _, text = str(message["message"]).partition(": ")
        t = float(extra.get("at") or extra["timestamp"])
        return RankError(str(extra.get("type") or name), text, str(extra.get("where", ""))), t
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None


def _wall(monotonic: float) -> float:
    return time.time() - time.monotonic() + monotonic
