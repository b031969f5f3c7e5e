"""Training ranks on this node: their rank pages, their runs, and what launcher and ranks report as events.

The folder ``<root>/<run>/`` belongs to the user of the run while the agent may be root; ``tail`` says how it is read.
The name of a run is always that of its folder, whatever the files in it claim.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Generic

from pydantic import Field

from opsd.collectors.base import (
    Event,
    Fact,
    Metric,
    MetricKind,
    NoData,
    Plugin,
    RankFact,
    Reading,
    RunFact,
    Sample,
    StepFact,
)
from opsd.collectors.lib.pages import Client, P, RankPageLike, rank_fact, step_facts
from opsd.collectors.lib.processes import process_letter
from opsd.collectors.lib.run_files import RUN_NAME, RUN_STATES, parse_event, parse_run
from opsd.collectors.lib.tail import Tail, read_small
from opsd.collectors.lib.user_series import METRICS as USER_METRICS
from opsd.collectors.lib.user_series import data_mixture, evaluations
from opsd.settings.section import AnyPath, CollectorSettings

MAX_RUNS: Final = 64
MAX_RANKS: Final = 256
"""Runs, and ranks of a run, looked at on one node; the rest is left out."""
MAX_EVENTS: Final = 200
"""Events of one kind and run that are passed on in one look, the newest; a trainer may write one in each step."""
MAX_RELAYED: Final = 10_000
"""Events of ranks remembered as passed on by their launcher."""
RATE_STEPS: Final = 10
"""Steps that the throughput is averaged over."""

_RANK_FILE = re.compile(r"rank-(\d{4}|[1-9]\d{4,5})\.page(\.events\.jsonl)?", re.ASCII)
_MAX_RUN_JSON = 64 << 10


def _rank(name: str, help_text: str, unit: str = "", *labels: str, kind: MetricKind = "gauge") -> Metric:
    return Metric(f"opsd_rank_{name}", help_text, kind, unit, ("run", "rank", *labels))


UP = _rank("up", "1 while the process of the rank lives and has not finished.")
STEP = _rank("step", "Last completed step.")
STEP_SECONDS = _rank("step_seconds", "Duration of the last completed step.", "seconds")
PHASE = _rank("phase", "1 for the phase the rank is in, 0 for the others.", "", "phase")
PHASE_AGE = _rank("phase_age_seconds", "Time since the rank entered its phase.", "seconds")
PHASE_SECONDS = _rank("phase_seconds_total", "Time spent in completed steps.", "seconds", "phase", kind="counter")
CHANGE_AGE = _rank("last_change_age_seconds", "Time since the last change of phase or completed step.", "seconds")
TOKENS = _rank("tokens_total", "Tokens trained on by this process.", kind="counter")
TOKENS_RATE = _rank("tokens_per_second", f"Throughput over the last {RATE_STEPS} steps; sinks while no step ends.")
LOSS = _rank("loss", "Loss of the last completed step.")
GRAD_NORM = _rank("grad_norm", "Gradient norm of the last completed step.")
LEARNING_RATE = _rank("learning_rate", "Learning rate of the last completed step.")
COMMITTED = _rank("committed_step", "Step of the newest checkpoint that is durable.")
PAGE_ERRORS = Metric("opsd_rank_page_errors", "Rank pages that cannot be used right now.", labels=("run",))
JOB_INFO = Metric(
    "opsd_gpu_job_info",
    "Which rank works on a GPU; join on the label gpu.",
    "info",
    labels=("gpu", "job_id", "run", "rank"),
)
RUN_STATE = Metric("opsd_run_state", "1 for the state of the run, 0 for the others.", labels=("run", "state"))
RUN_GENERATION = Metric("opsd_run_generation", "Generation of ranks the run is in.", labels=("run",))
MODEL_FLOPS = _rank("flops_per_token", "Operations that the model needs per token, as the trainer says.")
PEAK_FLOPS = _rank("peak_flops_per_second", "What the rank's device could do at most: the denominator of its MFU.")
MFU = _rank(
    "mfu_ratio",
    "Model FLOPs utilisation: opsd_rank_tokens_per_second x flops_per_token / peak_flops_per_second.",
    "ratio",
)
RUN_UP = Metric("opsd_run_up", "1 while the launcher of the run lives.", labels=("run",))

METRICS: Final = (
    UP, STEP, STEP_SECONDS, PHASE, PHASE_AGE, PHASE_SECONDS, CHANGE_AGE, TOKENS, TOKENS_RATE, LOSS, GRAD_NORM,
    LEARNING_RATE, MODEL_FLOPS, PEAK_FLOPS, MFU, COMMITTED, PAGE_ERRORS, JOB_INFO, RUN_STATE, RUN_GENERATION, RUN_UP,
    *USER_METRICS,
)  # fmt: skip
LABELS: Final = {
    "run": "runs on the node, 64 at most",
    "rank": "ranks on the node, 256 of a run at most",
    "phase": "phases of a rank page",
    "gpu": "GPUs of the node by index",
    "job_id": "one per rank",
    "state": "states of a run",
    "name": "results of the newest evaluation of a run, 32 at most",
    "source": "sources of a run's data, 32 at most",
}


class PhaseTotals:
    """Seconds a rank has spent in each phase over all its completed steps, through restarts of its process.

    A page keeps its recent steps only. Steps that came and went between two looks count like the ones still seen.
    """

    def __init__(self, phases: Sequence[str]) -> None:
        self._phases = phases
        self._seconds = [0.0] * len(phases)
        self._process: tuple[int, float] | None = None
        self._counted = 0

    def update(self, page: RankPageLike) -> Mapping[str, float]:
        """Take in what is new on ``page`` and return the seconds per phase."""
        if self._process != (page.pid, page.created):
            self._process, self._counted = (page.pid, page.created), 0
        new = page.steps_reported - self._counted
        seen = page.steps[-new:] if new > 0 else ()
        for step in seen:
            for index, seconds in enumerate(step.phase_s):
                self._seconds[index] += seconds * new / len(seen)
        if seen:
            self._counted = page.steps_reported
        return dict(zip(self._phases, self._seconds, strict=True))


def tokens_per_second(page: RankPageLike, now: float) -> float | None:
    """Throughput over the last steps; a step that takes longer than the one before drags it down while it lasts."""
    recent = page.steps[-RATE_STEPS:]
    if not recent:
        return None
    began, last = recent[0].end - recent[0].duration_s, recent[-1]
    elapsed = max(last.end, now - last.duration_s) - began
    return sum(step.tokens for step in recent) / elapsed if elapsed > 0 else None


class RanksSettings(CollectorSettings):
    """Training ranks on this node, through their rank pages."""

    root: AnyPath = Field(
        default=Path("/dev/shm/opsd"),  # noqa: S108
        description="Folder in shared memory with one folder per run; OPSD_SHM wins.",
    )


class RanksCollector(Generic[P]):
    """The runs under ``root`` and their ranks. ``client`` is the module ``opsd.client``.

    A rank or run that has ended is reported for ``linger_s`` more, so that how it ended is seen, and then no longer.
    ``folders`` are the run folders last seen.
    """

    name = "ranks"
    metrics = METRICS

    def __init__(
        self,
        root: Path,
        client: Client[P],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        linger_s: float = 60.0,
    ) -> None:
        self._root = root
        self._client = client
        self._clock = clock
        self._wall = wall
        self._linger_s = linger_s
        self._runs: dict[str, _Run[P]] = {}
        self.folders: tuple[str, ...] = ()

    def collect(self) -> Reading | NoData:
        """Read all runs. Raises OSError if the root cannot be read."""
        try:
            with os.scandir(self._root) as entries:
                names = [e.name for e in entries if RUN_NAME.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return NoData(f"no run has been started on this node: {self._root} does not exist")
        names = sorted(names)[:MAX_RUNS]
        self._runs = {
            name: self._runs.get(name) or _Run(self._root / name, self._client, self._linger_s) for name in names
        }
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


class _Rank(Generic[P]):
    """What is remembered of a rank from look to look."""

    def __init__(self, rank: int, phases: Sequence[str]) -> None:
        self.events = Tail(f"rank-{rank:04d}.page.events.jsonl")
        self.totals = PhaseTotals(phases)
        self.page: P | None = None
        self.steps: tuple[StepFact, ...] = ()


class _Run(Generic[P]):
    """One run's folder, and what is remembered of it from look to look."""

    def __init__(self, folder: Path, client: Client[P], linger_s: float) -> None:
        self._folder = folder
        self._run = folder.name
        self._client = client
        self._linger_s = linger_s
        self._events = Tail("events.jsonl")
        self._told = (evaluations(folder.name), data_mixture(folder.name))
        self._relayed: OrderedDict[tuple[object, ...], None] = OrderedDict()
        self._ranks: dict[int, _Rank[P]] = {}
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
            samples += _run_samples(run)
        for page in pages:
            process = self._client.process_state(page)
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
            samples.append(Sample(PAGE_ERRORS, errors, (self._run,)))
        return Reading(tuple(samples), events, tuple(facts))

    def _read_run(self, folder: int, now: float, wall: float) -> RunFact | None:
        found = read_small("run.json", folder, _MAX_RUN_JSON)
        if found is None:
            return None
        content, modified = found
        run = parse_run(content, self._run, lambda pid, start: self._client.process_start(pid) == start)
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
        self._ranks = {n: self._ranks.get(n) or _Rank(n, self._client.PHASES) for n in numbers}
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

    def _read_pages(self, ranks: Sequence[int]) -> tuple[list[P], int]:
        """The usable pages, and how many cannot be used. A page of another rank than its name says is one of these."""
        pages = []
        for number in ranks:
            rank, path = self._ranks[number], self._folder / f"rank-{number:04d}.page"
            with contextlib.suppress(self._client.PageError):
                page = rank.page = self._client.read_page(path, rank.page)
                if page.rank == number:
                    pages.append(page)
        return pages, len(ranks) - len(pages)

    def _fact(self, page: RankPageLike, process: str | None) -> RankFact:
        rank = self._ranks[page.rank]
        rank.steps = step_facts(page, self._client.PHASES, rank.steps)
        return rank_fact(page, self._run, process, [process_letter(pid) for pid, _ in page.workers], rank.steps)

    def _rank_samples(self, fact: RankFact, page: RankPageLike, now: float) -> Iterator[Sample]:
        labels = (self._run, str(fact.rank))
        live = fact.live and fact.process != "Z"
        yield Sample(UP, float(live), labels)
        yield Sample(TOKENS, page.tokens, labels)
        for phase, seconds in self._ranks[fact.rank].totals.update(page).items():
            yield Sample(PHASE_SECONDS, seconds, (*labels, phase))
        if fact.committed_step is not None:
            yield Sample(COMMITTED, fact.committed_step, labels)
        if fact.steps:
            yield from _step_samples(fact.steps[-1], labels)
        if not live:
            return
        for phase in self._client.PHASES:
            yield Sample(PHASE, float(phase == fact.phase), (*labels, phase))
        yield Sample(PHASE_AGE, max(0.0, now - fact.phase_since), labels)
        yield Sample(CHANGE_AGE, max(0.0, now - fact.changed), labels)
        if (rate := tokens_per_second(page, now)) is not None:
            yield Sample(TOKENS_RATE, rate, labels)
            yield from _model_samples(page, rate, labels)
        if fact.gpu is not None:
            yield Sample(JOB_INFO, 1.0, (str(fact.gpu), fact.job, *labels))


def _newest(events: Iterable[Event]) -> tuple[Event, ...]:
    kept: dict[str, deque[Event]] = {}
    for event in events:
        kept.setdefault(event.kind, deque(maxlen=MAX_EVENTS)).append(event)
    return tuple(event for each in kept.values() for event in each)


def _identity(event: Event) -> tuple[object, ...]:
    """The same for a rank's event and the launcher's copy of it."""
    return str(event.data.get("rank")), event.data["event"], event.at


def _step_samples(step: StepFact, labels: tuple[str, ...]) -> Iterator[Sample]:
    yield Sample(STEP, step.step, labels)
    yield Sample(STEP_SECONDS, step.duration_s, labels)
    for metric, value in ((LOSS, step.loss), (GRAD_NORM, step.grad_norm), (LEARNING_RATE, step.learning_rate)):
        if value is not None and not math.isnan(value):
            yield Sample(metric, value, labels)


def _model_samples(page: RankPageLike, rate: float, labels: tuple[str, ...]) -> Iterator[Sample]:
    """``rate`` is in tokens per second; nothing if the trainer has not told what a token takes."""
    if page.flops_per_token is None or page.peak_flops is None:
        return
    yield Sample(MODEL_FLOPS, page.flops_per_token, labels)
    yield Sample(PEAK_FLOPS, page.peak_flops, labels)
    yield Sample(MFU, rate * page.flops_per_token / page.peak_flops, labels)


def _run_samples(run: RunFact) -> Iterator[Sample]:
    for state in RUN_STATES:
        yield Sample(RUN_STATE, float(state == run.state), (run.run, state))
    yield Sample(RUN_GENERATION, run.generation, (run.run,))
    yield Sample(RUN_UP, float(run.alive), (run.run,))


COLLECTOR = Plugin(
    "ranks", RanksSettings, lambda settings, context: RanksCollector(settings.root, context.rank_pages), LABELS
)
