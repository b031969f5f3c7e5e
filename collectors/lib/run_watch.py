"""One run on this node: what its rank pages, its ``run.json`` and its event files tell, from look to look.

The folder belongs to the user of the run while the agent may be root. ``tail`` says how files are read. What they say
about processes, jobs and GPUs is compared with what the kernel, the driver and Slurm say (``gpu_owners``).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Final

from opsd.collectors.base import Event, Fact, RankFact, Reading, RunFact, Sample, StepFact
from opsd.collectors.lib import rank_series as series
from opsd.collectors.lib.gpu_owners import GpuOwners, Proof
from opsd.collectors.lib.host_pids import HostPids
from opsd.collectors.lib.processes import process_letter, user_of
from opsd.collectors.lib.rank_series import data_mixture, evaluations
from opsd.collectors.lib.run_files import Rights, Tail, parse_event, parse_run, read_small
from opsd.collectors.lib.shares import Allowance
from opsd.inodes import open_folder
from opsd.rank_page import PHASES, PageError, RankPage, page_writer, read_page

MAX_RANKS: Final = 256
"""Ranks looked at on one node; the rest is left out."""
MAX_EVENTS: Final = 200
"""Events of one kind and run that are passed on in one look, the newest; a trainer may write one in each step."""
MAX_RELAYED: Final = 2_000
"""Events of ranks remembered as passed on by their launcher."""
ENTRIES: Final = 8_192
EVENT_BYTES: Final = 1 << 20
"""Entries of run folders, and bytes of event files, read of one owner in one look; the more runs, the less of each."""

_RANK_FILE = re.compile(r"rank-(\d{4}|[1-9]\d{4,5})\.page(\.events\.jsonl)?", re.ASCII)
_MAX_RUN_JSON = 64 << 10
_JUDGED_PAGES: Final = 16


def lives(folder: Path, owner: int, wall: float, linger_s: float, host: HostPids) -> bool:
    """Whether a launcher or rank of ``owner`` lives in this run, or its launcher ended at most ``linger_s`` ago."""

    def find(pid: int, start: int) -> int | None:
        here = host.find(owner, pid, start)
        return here if here is not None and user_of(here) == owner else None

    with contextlib.suppress(OSError), _opened(folder, owner) as descriptor:
        found = read_small("run.json", descriptor, Rights(owner, frozenset()), _MAX_RUN_JSON)
        run = parse_run(found[0], folder.name, find) if found else None
        if run is not None and found is not None and (run.alive or wall - found[1] <= linger_s):
            return True
        pages = [number for number, is_page in _rank_files(descriptor, ENTRIES // 16) if is_page][:_JUDGED_PAGES]
        for number in pages:
            with contextlib.suppress(PageError):
                if find(*page_writer(_page(number), folder=descriptor)) is not None:
                    return True
    return False


class _Rank:
    """What is remembered of a rank from look to look."""

    def __init__(self, rank: int, rights: Rights, proof: Proof) -> None:
        self.events = Tail(f"rank-{rank:04d}.page.events.jsonl", rights)
        self.totals = series.PhaseTotals()
        self.page: RankPage | None = None
        self.steps: tuple[StepFact, ...] = ()
        self.proof = proof


class RunWatch:
    """The run in ``folder``, which belongs to the user ``owner``. ``host`` knows its processes if it is in a container.

    ``demand`` is how many ranks have files in it. ``events_left_out`` were too many for ``allowance`` in this look.
    """

    def __init__(
        self,
        folder: Path,
        owner: int,
        linger_s: float,
        gpu_owners: GpuOwners,
        allowance: Allowance,
        host: HostPids,
    ) -> None:
        self.owner = owner
        self.demand = self.events_left_out = 0
        self._folder = folder
        self._run = folder.name
        self._linger_s = linger_s
        self._gpu_owners, self._allowance, self._host = gpu_owners, allowance, host
        self._rights = Rights(owner, frozenset())
        self._events = Tail("events.jsonl", self._rights)
        self._told = (evaluations(folder.name), data_mixture(folder.name))
        self._relayed: OrderedDict[tuple[object, ...], None] = OrderedDict()
        self._launcher = Proof(owner, gpu_owners)
        self._ranks: dict[int, _Rank] = {}
        self._files: Sequence[tuple[int, bool]] = ()
        self._seen_alive: float | None = None

    def list_ranks(self, entries: int) -> None:
        """Read at most ``entries`` entries of the folder."""
        self._files = ()
        with contextlib.suppress(OSError), _opened(self._folder, self.owner) as folder:
            self._files = _rank_files(folder, entries)
        self.demand = len({number for number, _ in self._files})

    def read(self, now: float, wall: float, *, ranks: int = MAX_RANKS, event_bytes: int = EVENT_BYTES) -> Reading:
        """The reading of the folder at the monotonic second ``now``; empty if it has just been removed.

        At most ``ranks`` ranks are looked at, and ``event_bytes`` of its event files read.
        """
        self.events_left_out = 0
        try:
            with _opened(self._folder, self.owner) as folder:
                run = self._read_run(folder, now, wall)
                numbers = self._known_ranks(ranks)
                relayed = run is not None and run.alive
                events = _newest(self._read_events(folder, now, wall, event_bytes, relayed=relayed))
                pages, errors = self._read_pages(folder, numbers, now)
        except OSError:
            return Reading()
        samples: list[Sample] = []
        facts: list[Fact] = []
        if run is not None:
            facts.append(run)
            samples += series.run_samples(run)
        for page, pid, process in pages:
            supervised = run is not None and run.alive and run.takes_part
            if process is None and not supervised and now - page.changed > self._linger_s:
                continue
            fact = self._fact(page, pid, process)
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
        found = read_small("run.json", folder, self._rights, _MAX_RUN_JSON)
        if found is None:
            return None
        content, modified = found
        run = parse_run(content, self._run, lambda pid, start: self._living_launcher(pid, start, now))
        if run is None:
            return None
        if run.alive:
            self._seen_alive = now
        ended_s = wall - modified if self._seen_alive is None else now - self._seen_alive
        if ended_s > self._linger_s:
            return None
        # Another run's socket would have the agent ask that run's launcher.
        control = run.control if Path(run.control).parent == self._folder else ""
        return replace(run, job=self._launcher.job(run.job), control=control, user=self.owner)

    def _living_launcher(self, pid: int, start: int, now: float) -> int | None:
        here = self._host.find(self.owner, pid, start)
        return here if here is not None and self._launcher.owns(pid, start, now, here) else None

    def _known_ranks(self, most: int) -> list[int]:
        """The ranks that have a page. Those with any file at all are remembered, the others forgotten."""
        numbers = sorted({number for number, _ in self._files})[:most]
        known = self._ranks
        self._ranks = {n: known.get(n) or _Rank(n, self._rights, Proof(self.owner, self._gpu_owners)) for n in numbers}
        return sorted(number for number, is_page in self._files if is_page and number in self._ranks)

    def _read_events(self, folder: int, now: float, wall: float, most: int, *, relayed: bool) -> Iterator[Event]:
        """New events of the launcher, and those of the ranks that no launcher relays into its own stream."""
        lines = self._events.read(folder, most)
        most -= sum(map(len, lines))
        for line in lines:
            if event := self._event(line, now, wall):
                self._remember(event)
                yield event
        if relayed:
            return
        for number, rank in self._ranks.items():
            lines = rank.events.read(folder, most)
            most -= sum(map(len, lines))
            for line in lines:
                if event := self._event(line, now, wall, self._relayed, rank=number):
                    yield event

    def _event(
        self, line: bytes, now: float, wall: float, known: Container[tuple[object, ...]] = (), **fields: object
    ) -> Event | None:
        """The event in ``line`` unless it is ``known``, or more than the agent keeps: the window does so for minutes.

        What is made of very small values takes long to read: there must be room for it before.
        """
        size = weight(line)
        heavy = size > 2 * len(line)
        if heavy and not self._affords(size, now):
            return None
        event = parse_event(line, self._run, wall, **fields)
        if event is None or _identity(event) in known or not (heavy or self._affords(size, now)):
            return None
        return replace(event, user=self.owner, size=size)

    def _affords(self, size: int, now: float) -> bool:
        allowed = self._allowance.take(self.owner, size, now)
        self.events_left_out += not allowed
        return allowed

    def _remember(self, event: Event) -> None:
        """Note an event that the launcher may have from a rank of this node."""
        rank = event.data.get("rank")
        if isinstance(rank, int) and rank in self._ranks:
            self._relayed[_identity(event)] = None
            if len(self._relayed) > MAX_RELAYED:
                self._relayed.popitem(last=False)

    def _read_pages(
        self, folder: int, ranks: Sequence[int], now: float
    ) -> tuple[list[tuple[RankPage, int | None, str | None]], int]:
        """The usable pages with the number and state of their process here, and how many are not usable.

        Those are of another rank than the name says, or of another user's process.
        """
        pages = []
        for number in ranks:
            rank = self._ranks[number]
            with contextlib.suppress(PageError):
                page = rank.page = read_page(_page(number), rank.page, folder=folder)
                here = self._host.find(self.owner, page.pid, page.pid_start)
                owned = rank.proof.owns(page.pid, page.pid_start, now, here)
                if page.rank == number and owned is not False:
                    pages.append((page, here, None if here is None else process_letter(here)))
        return pages, len(ranks) - len(pages)

    def _fact(self, page: RankPage, pid: int | None, process: str | None) -> RankFact:
        rank = self._ranks[page.rank]
        workers = self._workers(page, pid)
        rank.steps = series.step_facts(page, rank.steps)
        return RankFact(
            run=self._run,
            job=rank.proof.job(page.job),
            rank=page.rank,
            local_rank=page.local_rank,
            world_size=page.world_size,
            generation=page.generation,
            gpu=rank.proof.gpu(page.gpu),
            pid=page.pid if pid is None else pid,
            state=page.state,
            process=process,
            phase=page.phase,
            phase_since=page.phase_since,
            changed=page.changed,
            steps_reported=page.steps_reported,
            committed_step=page.committed_step,
            workers=workers,
            steps=rank.steps,
            worker_process=tuple(process_letter(pid) for pid, _ in workers),
            user=self.owner,
            source=page.source,
            planned=page.planned,
            inside=page.pid if pid not in (None, page.pid) else None,
        )

    def _workers(self, page: RankPage, pid: int | None) -> tuple[tuple[int, str], ...]:
        """The helpers that the page names, by their numbers here; of a container without those that are gone."""
        if pid is None or pid == page.pid:
            return page.workers
        found = ((self._host.beside(self.owner, pid, worker), role) for worker, role in page.workers)
        return tuple((worker, role) for worker, role in found if worker is not None)

    def _rank_samples(self, fact: RankFact, page: RankPage, now: float) -> Iterator[Sample]:
        labels = (self._run, str(fact.rank))
        live = fact.live and fact.process != "Z"
        yield Sample(series.UP, float(live), labels)
        if not page.observed:
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
        yield from series.router_samples(page, labels)
        if not page.observed and (rate := series.tokens_per_second(page, now)) is not None:
            yield Sample(series.TOKENS_RATE, rate, labels)
            yield from series.model_samples(page, rate, labels)
        if fact.gpu is not None:
            yield Sample(series.JOB_INFO, 1.0, (str(fact.gpu), fact.job, *labels))


def _newest(events: Iterable[Event]) -> tuple[Event, ...]:
    kept: dict[str, deque[Event]] = {}
    for event in events:
        kept.setdefault(event.kind, deque(maxlen=MAX_EVENTS)).append(event)
    return tuple(event for each in kept.values() for event in each)


def _identity(event: Event) -> tuple[object, ...]:
    """The same for a rank's event and the launcher's copy of it."""
    return str(event.data.get("rank")), event.data["event"], event.at


@contextlib.contextmanager
def _opened(folder: Path, owner: int) -> Iterator[int]:
    """The folder, held open so that it cannot be exchanged. Raises OSError if it is not there or another user's."""
    descriptor = open_folder(folder)
    try:
        if os.fstat(descriptor).st_uid != owner:
            raise PermissionError(f"{folder} belongs to another user now")
        yield descriptor
    finally:
        os.close(descriptor)


def _rank_files(folder: int, entries: int) -> list[tuple[int, bool]]:
    """Ranks that have files among the first ``entries`` of the folder, and whether the file is the page."""
    with os.scandir(folder) as found:
        names = [entry.name for entry in islice(found, entries)]
    return [(int(match[1]), match[2] is None) for name in names if (match := _RANK_FILE.fullmatch(name))]


def _page(rank: int) -> Path:
    return Path(f"rank-{rank:04d}.page")


_OBJECT, _LIST, _VALUE = 240, 80, 64
"""Bytes that CPython takes for a small dictionary, a list, and a place in one of them with its value."""
_USUAL = 6
"""Times its own size that usual text takes."""


def weight(text: bytes) -> int:
    """The bytes of usual text whose values take as much memory: ``[],`` takes 80 bytes for three."""
    values = text.count(b"{") * _OBJECT + text.count(b"[") * _LIST + text.count(b",") * _VALUE
    return max(len(text), values // _USUAL)
