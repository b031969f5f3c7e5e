"""The ledgers of the runs of this node, for the page of a job.

A ledger is computed from the files of the run, which may be long and may lie on a file system that hangs. A separate
process does it on demand, and requests do not wait: they get the last result. The run's user names the paths of the
files, so they are opened with that user's rights.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from opsd.agent.loop import Snapshot
from opsd.agent.metrics import RUN_BEYOND, RUN_FORECAST, RUN_PLANNED, RUN_SECONDS
from opsd.collectors.base import RunFact, Sample
from opsd.confined import confine
from opsd.threads import FairQueue

if TYPE_CHECKING:
    from opsd.plan.forecast import Forecast

FRESH_S: Final = 60.0
REST: Final = 50.0
USER_REST: Final = 9.0
"""A ledger is not computed again before this many times its duration, which limits the cost to 2 % of a core, and after
so many times its duration another one of the same user."""
DEADLINE_S: Final = 30.0
END_S: Final = 1.0
MAX_MEMORY: Final = 160 << 20
"""Memory limit in bytes, as the process is in the agent's control group of 256 MiB. Allows 16 MiB of metrics.jsonl."""
MAX_HELD: Final = 6
"""Processes that file systems hold, some 15 MiB each."""
KEPT: Final = 16
_DAY_S: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class LedgerResult:
    """A ledger as ``opsd ledger --json`` prints it, with the ``curves`` of the run; or None and the reason."""

    ledger: Mapping[str, Any] | None
    problem: str = ""


Which = tuple[str, int]
"""The folder of a run and its user."""


class Ledgers:
    """The last ledgers. Thread-safe.

    One is computed at a time, as several would not fit into the memory, for users in turn. Each user with a run delays
    that of another by ``DEADLINE_S`` at most.
    """

    def __init__(
        self, make: Callable[[Path, int], LedgerResult] | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._make, self._clock = make or LedgerMaker(), clock
        self._made: dict[Which, tuple[LedgerResult, float]] = {}
        self._asked: dict[Which, float] = {}
        self._waiting: set[Which] = set()
        self._rests: dict[int, float] = {}
        self._queue = FairQueue("ledger", 1, share=1)
        self._guard = threading.Lock()

    def of(self, run: RunFact) -> LedgerResult:
        """The ledger of ``run``, at most about a minute old; the first call says that it is being computed."""
        if run.user is None:
            return LedgerResult(None, "it is not known whose run this is")
        which = run.folder, run.user
        with self._guard:
            now = self._clock()
            self._asked[which] = now
            made, stale_at = self._made.get(which, (LedgerResult(None, "it is being made: load the page again"), 0.0))
            if which not in self._waiting and now >= max(stale_at, self._rests.get(run.user, 0.0)):
                self._forget(now)
                self._waiting.add(which)
                self._queue.submit(str(run.user), partial(self._renew, *which), lambda: self._wanted(which))
        return made

    def _wanted(self, which: Which) -> bool:
        """Whether somebody has asked for it lately, and its user need not rest; else it is left out until asked for."""
        with self._guard:
            now = self._clock()
            wanted = now - self._asked.get(which, -FRESH_S) < FRESH_S and now >= self._rests.get(which[1], 0.0)
            if not wanted:
                self._waiting.discard(which)
            return wanted

    def _renew(self, folder: str, user: int) -> None:
        began = self._clock()
        try:
            made = self._make(Path(folder), user)
        except Exception as error:  # the thread must outlive a bug
            made = LedgerResult(None, f"it could not be made, a bug in opsd: {type(error).__name__}")
        self._keep((folder, user), made, began)

    def _keep(self, which: Which, made: LedgerResult, began: float) -> None:
        with self._guard:
            self._waiting.discard(which)
            ended = self._clock()
            self._rests[which[1]] = ended + USER_REST * (ended - began)
            self._made.pop(which, None)
            self._made[which] = made, ended + max(FRESH_S, REST * (ended - began))
            while len(self._made) > KEPT:
                held = Counter(user for _, user in self._made)
                del self._made[max(self._made, key=lambda one: (one not in self._asked, held[one[1]]))]

    def _forget(self, now: float) -> None:
        """Forget questions and rests that are over."""
        self._asked = {which: at for which, at in self._asked.items() if now - at < FRESH_S}
        self._rests = {user: until for user, until in self._rests.items() if now < until}


class RunSeconds:
    """The buckets of the ledgers of the runs whose rank 0 is on this node, as counters.

    A ledger may correct the past: what looked productive was lost once a failure is noticed. A counter must not fall,
    so a bucket keeps its highest value until the ledger has passed it.
    """

    def __init__(self, ledgers: Ledgers) -> None:
        self._ledgers = ledgers
        self._highest: dict[tuple[str, str], float] = {}
        self._outlooks: dict[str, tuple[Mapping[str, Any], Sequence[Sample]]] = {}
        """By run, with the ledger that they are from: each is looked at once."""

    def samples(self, snapshot: Snapshot) -> Iterator[Sample]:
        """The last known buckets; asks for newer ones."""
        leading = {rank.run for rank in snapshot.ranks if rank.rank == 0}
        known, looked = self._highest, self._outlooks
        self._highest, self._outlooks = {}, {}
        for run in _in_turn([run for run in snapshot.runs if run.run in leading])[:KEPT]:
            if (ledger := self._ledgers.of(run).ledger) is None:
                continue
            before = looked.get(run.run)
            outlook = before[1] if before and before[0] is ledger else list(_outlook(run.run, ledger))
            self._outlooks[run.run] = ledger, outlook
            yield from outlook
            for bucket, seconds in ledger["buckets"].items():
                key = run.run, bucket
                self._highest[key] = max(seconds, known.get(key, 0.0))
                yield Sample(RUN_SECONDS, self._highest[key], key)


def forecast_of(ledger: Mapping[str, Any] | None) -> Forecast | None:
    """How a run will end; None without a plan that can be read, before the first step and after the last."""
    if ledger is None or not ledger.get("plan") or not ledger.get("tokens"):
        return None
    from opsd.plan.forecast import BadPlan, Planned, Progress, forecast

    try:
        planned = Planned.parse(ledger["plan"])
    except BadPlan:
        return None
    names = ("buckets", "tokens", "lost_nodes", "earlier_tokens", "gpus")
    return forecast(planned, Progress(*(ledger[name] for name in names)))


def beside_of(ledger: Mapping[str, Any] | None) -> dict[str, str]:
    """What the work beside a run costs, in words: "ablations" and "data", as far as there are any."""
    if ledger is None or not (ledger.get("ablations") or ledger.get("data")):
        return {}
    from opsd.ledger.beside import Ablation, DataRun, ablations_line, data_line, parse
    from opsd.plan.forecast import BadPlan, Planned

    hours = None
    with contextlib.suppress(BadPlan):
        hours = Planned.parse(ledger["plan"]).gpu_hours if ledger.get("plan") else None
    lines = {
        "ablations": ablations_line(parse(Ablation, ledger.get("ablations") or ()), hours),
        "data": data_line(parse(DataRun, ledger.get("data") or ()), hours),
    }
    return {name: line for name, line in lines.items() if line}


def _outlook(run: str, ledger: Mapping[str, Any]) -> Iterator[Sample]:
    """Plan and forecast."""
    if (found := forecast_of(ledger)) is not None:
        yield Sample(RUN_PLANNED, found.planned_days * _DAY_S, (run,))
        yield Sample(RUN_FORECAST, found.days * _DAY_S, (run,))
        yield from (Sample(RUN_BEYOND, seconds, (run, bucket)) for bucket, seconds in found.beyond_s.items())


def _in_turn(runs: Sequence[RunFact]) -> list[RunFact]:
    """The first of each user, then the second of each, and so on."""
    numbers = Counter[int | None]()
    turns = []
    for run in runs:
        turns.append(numbers[run.user])
        numbers[run.user] += 1
    return [run for _, run in sorted(zip(turns, runs, strict=True), key=lambda pair: pair[0])]


class LedgerMaker:
    """Makes ledgers in processes of the lowest priority and within limits, one at a time.

    A process that a file system holds cannot be ended and keeps its memory. While there is one of a user no other is
    begun for the same, and above ``MAX_HELD`` for nobody.
    """

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._held: dict[int, subprocess.Popen[str]] = {}

    def __call__(self, folder: Path, user: int) -> LedgerResult:
        """The ledger of the run of ``user`` in ``folder``."""
        self._held = {who: maker for who, maker in self._held.items() if maker.poll() is None}
        if user in self._held:
            return LedgerResult(None, "a folder of this user still does not answer")
        if len(self._held) >= MAX_HELD:
            return LedgerResult(None, f"the folders of {MAX_HELD} users do not answer")
        try:
            maker = subprocess.Popen(
                [sys.executable, "-P", "-m", "opsd.ledger.for_user", str(user), str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            return LedgerResult(None, f"opsd ledger cannot be started: {error.strerror}")
        try:
            return self._result(maker, folder)
        finally:
            if not _ends(maker):
                self._held[user] = maker

    def _result(self, maker: subprocess.Popen[str], folder: Path) -> LedgerResult:
        try:
            # The service's system call filter forbids it; its unit already has a lower priority than training.
            with contextlib.suppress(PermissionError):
                os.setpriority(os.PRIO_PROCESS, maker.pid, 19)
            confine(maker, MAX_MEMORY)
            out, err = maker.communicate(timeout=self._deadline_s)
        except subprocess.TimeoutExpired:
            return LedgerResult(None, f"{folder} does not answer")
        except OSError as error:
            return LedgerResult(None, f"opsd ledger cannot be kept within its limits: {error.strerror}")
        if maker.returncode:
            said = err.strip().rpartition("\n")[2]
            too_long = f"the run is too long for the agent: opsd ledger {folder} has it"
            return LedgerResult(None, too_long if said.startswith("MemoryError") else said or "opsd ledger was killed")
        return LedgerResult(json.loads(out))


def _ends(maker: subprocess.Popen[str]) -> bool:
    """End ``maker`` without waiting for long; one that a hanging file system holds ends when that responds."""
    if maker.poll() is None:
        maker.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            maker.wait(END_S)
    for pipe in (maker.stdout, maker.stderr):
        if pipe is not None:
            pipe.close()
    return maker.poll() is not None
