"""Training ranks on this node: their rank pages, their runs, and what launcher and ranks report as events.

The folder ``<root>/<run>/`` belongs to the user of the run while the agent may be root; ``tail`` says how it is read.
The name of a run is always that of its folder, whatever the files in it claim.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from pydantic import Field

from opsd.collectors.base import Event, Fact, NoData, Plugin, RankFact, Reading, RunFact, Sample, StepFact
from opsd.collectors.lib import rank_series as series
from opsd.collectors.lib.processes import process_letter
from opsd.collectors.lib.run_files import RUN_NAME, parse_event, parse_run
from opsd.collectors.lib.tail import Tail, read_small
from opsd.collectors.lib.user_series import data_mixture, evaluations
from opsd.rank_page import PHASES, PageError, RankPage, process_start, process_state, read_page
from opsd.settings.section import AnyPath, CollectorSettings

MAX_RUNS: Final = 64
MAX_RANKS: Final = 256
"""Runs, and ranks of a run, looked at on one node; the rest is left out."""
MAX_EVENTS: Final = 200
"""Events of one kind and run that are passed on in one look, the newest; a trainer may write one in each step."""
MAX_RELAYED: Final = 10_000
"""Events of ranks remembered as passed on by their launcher."""

_RANK_FILE = re.compile(r"rank-(\d{4}|[1-9]\d{4,5})\.page(\.events\.jsonl)?", re.ASCII)
_MAX_RUN_JSON = 64 << 10


class RanksSettings(CollectorSettings):
    """Training ranks on this node, through their rank pages."""

    root: AnyPath = Field(
        default=Path("/dev/shm/opsd"),  # noqa: S108
        description="Folder in shared memory with one folder per run; OPSD_SHM wins.",
    )


class RanksCollector:
    """The runs under ``root`` and their ranks.

    A rank or run that has ended is reported for ``linger_s`` more, so that how it ended is seen, and then no longer.
    ``folders`` are the run folders last seen.
    """

    name = "ranks"
    metrics = series.METRICS

    def __init__(
        self,
        root: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        linger_s: float = 60.0,
    ) -> None:
        self._root = root
        self._clock = clock
        self._wall = wall
        self._linger_s = linger_s
        self._runs: dict[str, _Run] = {}
        self.folders: tuple[str, ...] = ()

    def collect(self) -> Reading | NoData:
        """Read all runs. Raises OSError if the root cannot be read."""
        try:
            with os.scandir(self._root) as entries:
                names = [e.name for e in entries if RUN_NAME.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return NoData(f"no run has been started on this node: {self._root} does not exist")
        names = sorted(names)[:MAX_RUNS]
        self._runs = {name: self._runs.get(name) or _Run(self._root / name, self._linger_s) for name in names}
        samples: list[Sample] = []
        events: list[Event] = []
        facts: list[Fact] = []
        for run in self._runs.values():
            reading = run.read(self._clock(), self._wall())
            samples += reading.samples
            events += reading.events
            facts += reading.facts
        self.folders = tuple(fact.folder for fact in facts if isinstance(fact, RunFact))
        return Reading(tuple(samples), tuple(events), tuple(facts))


class _Rank:
    """What is remembered of a rank from look to look."""

    def __init__(self, rank: int) -> None:
        self.events = Tail(f"rank-{rank:04d}.page.events.jsonl")
        self.totals = series.PhaseTotals()
        self.page: RankPage | None = None
        self.steps: tuple[StepFact, ...] = ()


class _Run:
    """One run's folder, and what is remembered of it from look to look."""

    def __init__(self, folder: Path, linger_s: float) -> None:
        self._folder = folder
        self._run = folder.name
        self._linger_s = linger_s
        self._events = Tail("events.jsonl")
        self._told = (evaluations(folder.name), data_mixture(folder.name))
        self._relayed: OrderedDict[tuple[object, ...], None] = OrderedDict()
        self._ranks: dict[int, _Rank] = {}
        self._seen_alive: float | None = None

    def read(self, now: float, wall: float) -> Reading:
        """What the folder tells at the monotonic second ``now``; nothing if it has just been removed."""
        try:
            folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return Reading()
        try:
            run = self._read_run(folder, now, wall)
            numbers = self._list_ranks(folder)
            events = _newest(self._read_events(folder, wall, relayed=run is not None and run.alive))
        finally:
            os.close(folder)
        pages, errors = self._read_pages(numbers)
        samples: list[Sample] = []
        facts: list[Fact] = []
        if run is not None:
            facts.append(run)
            samples += series.run_samples(run)
        for page in pages:
            process = process_state(page)
            supervised = run is not None and run.alive and run.takes_part
            if process is None and not supervised and now - page.changed > self._linger_s:
                continue
            fact = self._fact(page, process)
            facts.append(fact)
            samples += self._rank_samples(fact, page, now)
        for told in self._told:
            for event in events:
                told.note(event)
            if facts or errors:
                samples += told.samples()
        if facts or errors:
            samples.append(Sample(series.PAGE_ERRORS, errors, (self._run,)))
        return Reading(tuple(samples), events, tuple(facts))

    def _read_run(self, folder: int, now: float, wall: float) -> RunFact | None:
        found = read_small("run.json", folder, _MAX_RUN_JSON)
        if found is None:
            return None
        content, modified = found
        run = parse_run(content, self._run, lambda pid, start: process_start(pid) == start)
        if run is None:
            return None
        if run.alive:
            self._seen_alive = now
        ended_s = wall - modified if self._seen_alive is None else now - self._seen_alive
        return run if ended_s <= self._linger_s else None

    def _list_ranks(self, folder: int) -> list[int]:
        """The ranks that have a page. Those with any file at all are remembered, the others forgotten."""
        names = os.listdir(folder)  # by descriptor, which pathlib cannot
        found = [(int(match[1]), match[2] is None) for name in names if (match := _RANK_FILE.fullmatch(name))]
        numbers = sorted({number for number, _ in found})[:MAX_RANKS]
        self._ranks = {n: self._ranks.get(n) or _Rank(n) for n in numbers}
        return sorted(number for number, is_page in found if is_page and number in self._ranks)

    def _read_events(self, folder: int, wall: float, *, relayed: bool) -> Iterator[Event]:
        """New events of the launcher, and those of the ranks that no launcher relays into its own stream."""
        for line in self._events.read(folder):
            if event := parse_event(line, self._run, wall):
                self._remember(event)
                yield event
        if relayed:
            return
        for number, rank in self._ranks.items():
            for line in rank.events.read(folder):
                event = parse_event(line, self._run, wall, rank=number)
                if event and _identity(event) not in self._relayed:
                    yield event

    def _remember(self, event: Event) -> None:
        """Note an event that the launcher may have from a rank of this node."""
        rank = event.data.get("rank")
        if isinstance(rank, int) and rank in self._ranks:
            self._relayed[_identity(event)] = None
            if len(self._relayed) > MAX_RELAYED:
                self._relayed.popitem(last=False)

    def _read_pages(self, ranks: Sequence[int]) -> tuple[list[RankPage], int]:
        """The usable pages, and how many cannot be used. A page of another rank than its name says is one of these."""
        pages = []
        for number in ranks:
            rank, path = self._ranks[number], self._folder / f"rank-{number:04d}.page"
            with contextlib.suppress(PageError):
                page = rank.page = read_page(path, rank.page)
                if page.rank == number:
                    pages.append(page)
        return pages, len(ranks) - len(pages)

    def _fact(self, page: RankPage, process: str | None) -> RankFact:
        rank = self._ranks[page.rank]
        rank.steps = _step_facts(page, rank.steps)
        return RankFact(
            run=self._run,
            job=page.job,
            rank=page.rank,
            local_rank=page.local_rank,
            world_size=page.world_size,
            generation=page.generation,
            gpu=page.gpu,
            pid=page.pid,
            state=page.state,
            process=process,
            phase=page.phase,
            phase_since=page.phase_since,
            changed=page.changed,
            steps_reported=page.steps_reported,
            committed_step=page.committed_step,
            workers=page.workers,
            steps=rank.steps,
            worker_process=tuple(process_letter(pid) for pid, _ in page.workers),
        )

    def _rank_samples(self, fact: RankFact, page: RankPage, now: float) -> Iterator[Sample]:
        labels = (self._run, str(fact.rank))
        live = fact.live and fact.process != "Z"
        yield Sample(series.UP, float(live), labels)
        yield Sample(series.TOKENS, page.tokens, labels)
        for phase, seconds in self._ranks[fact.rank].totals.update(page).items():
            yield Sample(series.PHASE_SECONDS, seconds, (*labels, phase))
        if fact.committed_step is not None:
            yield Sample(series.COMMITTED, fact.committed_step, labels)
        if fact.steps:
            yield from series.step_samples(fact.steps[-1], labels)
        if not live:
            return
        for phase in PHASES:
            yield Sample(series.PHASE, float(phase == fact.phase), (*labels, phase))
        yield Sample(series.PHASE_AGE, max(0.0, now - fact.phase_since), labels)
        yield Sample(series.CHANGE_AGE, max(0.0, now - fact.changed), labels)
        if (rate := series.tokens_per_second(page, now)) is not None:
            yield Sample(series.TOKENS_RATE, rate, labels)
            yield from series.model_samples(page, rate, labels)
        if fact.gpu is not None:
            yield Sample(series.JOB_INFO, 1.0, (str(fact.gpu), fact.job, *labels))


def _step_facts(page: RankPage, known: Sequence[StepFact]) -> tuple[StepFact, ...]:
    """The steps of ``page``; those among ``known``, the facts of an earlier look, are not made again."""
    before = {fact.end: fact for fact in known}
    return tuple(
        before.get(s.end)
        or StepFact(
            s.step,
            s.end,
            s.duration_s,
            s.tokens,
            s.loss,
            s.grad_norm,
            dict(zip(PHASES, s.phase_s, strict=True)),
            s.learning_rate,
        )
        for s in page.steps
    )


def _newest(events: Iterable[Event]) -> tuple[Event, ...]:
    kept: dict[str, deque[Event]] = {}
    for event in events:
        kept.setdefault(event.kind, deque(maxlen=MAX_EVENTS)).append(event)
    return tuple(event for each in kept.values() for event in each)


def _identity(event: Event) -> tuple[object, ...]:
    """The same for a rank's event and the launcher's copy of it."""
    return str(event.data.get("rank")), event.data["event"], event.at


COLLECTOR = Plugin("ranks", RanksSettings, lambda settings, context: RanksCollector(settings.root), series.LABELS)
