"""The series of ranks and runs, and the functions from what rank pages and ``run.json`` say to samples. Pure.

Series from the newest event of a kind: evaluations, and what a run has read of its data. Pure.

The content of an event belongs to a user, so that names are bounded and what is no number is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from typing import Final

from opsd.collectors.base import Event, Metric, MetricKind, RunFact, Sample, StepFact
from opsd.collectors.lib.run_files import RUN_STATES, named_numbers, number
from opsd.rank_page import PHASES, RankPage

MAX_NAMES: Final = 32
"""Results of an evaluation, and sources of data, that are exported, in the order of their names."""

EVALUATION: Final = {
    "step": Metric("opsd_evaluation_step", "Step of the checkpoint that was evaluated last.", labels=("run",)),
    "tokens": Metric("opsd_evaluation_tokens", "Tokens that it was trained on.", labels=("run",)),
    "results": Metric("opsd_evaluation_result", "Result of the last evaluation.", labels=("run", "name")),
    "reference": Metric(
        "opsd_evaluation_reference", "The same of the reference run at equal tokens.", labels=("run", "name")
    ),
}
DATA: Final = {
    "tokens": Metric(
        "opsd_data_source_tokens", "Tokens that the run has drawn from the source.", labels=("run", "source")
    ),
    "epochs": Metric(
        "opsd_data_source_epochs",
        "How often the run has been through the source; above 1 it repeats.",
        labels=("run", "source"),
    ),
}
USER_METRICS: Final = (*EVALUATION.values(), *DATA.values())


class NewestEvent:
    """Remembers the newest ``counts`` event of one run that is of ``kind``; its ``metrics`` are by the event's keys."""

    def __init__(
        self,
        run: str,
        kind: str,
        metrics: Mapping[str, Metric],
        counts: Callable[[Mapping[str, object]], bool] = lambda _data: True,
    ) -> None:
        self._run, self._kind, self._metrics, self._counts = run, kind, metrics, counts
        self._newest: Mapping[str, object] = {}

    def note(self, event: Event) -> None:
        """Take in an event of the run."""
        if event.kind == self._kind and self._counts(event.data):
            self._newest = event.data

    def samples(self) -> Iterator[Sample]:
        """The series; none before the first event."""
        for key, metric in self._metrics.items():
            content = self._newest.get(key)
            if len(metric.labels) == 1:
                if (value := number(content)) is not None:
                    yield Sample(metric, value, (self._run,))
            else:
                for name, value in named_numbers(content, MAX_NAMES).items():
                    yield Sample(metric, value, (self._run, name))


def evaluations(run: str) -> NewestEvent:
    """The newest evaluation of ``run`` that has results; one that failed is passed over."""
    return NewestEvent(run, "evaluation", EVALUATION, lambda data: bool(named_numbers(data.get("results"), MAX_NAMES)))


def data_mixture(run: str) -> NewestEvent:
    """The newest state of the run's data. Going back to a checkpoint takes it back, too."""
    return NewestEvent(run, "data_mixture", DATA)


RATE_STEPS: Final = 10
"""Steps that the throughput is averaged over."""


def _rank(
    name: str, help_text: str, unit: str = "", *labels: str, kind: MetricKind = "gauge", kept: bool = True
) -> Metric:
    return Metric(f"opsd_rank_{name}", help_text, kind, unit, ("run", "rank", *labels), kept)


UP = _rank("up", "1 while the process of the rank lives and has not finished.", kept=False)
STEP = _rank("step", "Last completed step.")
STEP_SECONDS = _rank("step_seconds", "Duration of the last completed step.", "seconds", kept=False)
PHASE = _rank("phase", "1 for the phase the rank is in, 0 for the others.", "", "phase", kept=False)
PHASE_AGE = _rank("phase_age_seconds", "Time since the rank entered its phase.", "seconds", kept=False)
PHASE_SECONDS = _rank("phase_seconds_total", "Time spent in completed steps.", "seconds", "phase", kind="counter")
CHANGE_AGE = _rank(
    "last_change_age_seconds", "Time since the last change of phase or completed step.", "seconds", kept=False
)
TOKENS = _rank("tokens_total", "Tokens trained on by this process.", kind="counter", kept=False)
TOKENS_RATE = _rank("tokens_per_second", f"Throughput over the last {RATE_STEPS} steps; sinks while no step ends.")
LOSS = _rank("loss", "Loss of the last completed step.")
GRAD_NORM = _rank("grad_norm", "Gradient norm of the last completed step.")
LEARNING_RATE = _rank("learning_rate", "Learning rate of the last completed step.")
COMMITTED = _rank("committed_step", "Step of the newest checkpoint that is durable.")
PAGE_ERRORS = Metric("opsd_rank_page_errors", "Rank pages that cannot be used right now.", labels=("run",))
JOB_INFO = Metric(
    "opsd_gpu_job_info",
    "Which job has a GPU, and which rank works on it where one has a page; join on the label gpu.",
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
ROUTER_LOAD = _rank(
    "router_load_ratio", "Tokens of the fullest expert over the mean of its layer, in the worst layer.", "ratio"
)
ROUTER_LIMIT = _rank("router_load_limit_ratio", "That load if all tokens went to the same experts.", "ratio")
ROUTER_ENTROPY = _rank(
    "router_entropy_ratio",
    "Entropy of the weights of a token's experts over the greatest, in the lowest layer.",
    "ratio",
)
ROUTER_DROPPED = _rank("router_dropped_ratio", "Share of the tokens that found no place at an expert.", "ratio")
RUN_UP = Metric("opsd_run_up", "1 while the launcher of the run lives.", labels=("run",))

METRICS: Final = (
    UP, STEP, STEP_SECONDS, PHASE, PHASE_AGE, PHASE_SECONDS, CHANGE_AGE, TOKENS, TOKENS_RATE, LOSS, GRAD_NORM,
    LEARNING_RATE, MODEL_FLOPS, PEAK_FLOPS, MFU, ROUTER_LOAD, ROUTER_LIMIT, ROUTER_ENTROPY, ROUTER_DROPPED,
    COMMITTED, PAGE_ERRORS, JOB_INFO, RUN_STATE, RUN_GENERATION, RUN_UP, *USER_METRICS,
)  # fmt: skip
LABELS: Final = {
    "run": "runs on the node, 64 at most",
    "rank": "ranks on the node, 256 at most",
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

    def __init__(self) -> None:
        self._seconds = [0.0] * len(PHASES)
        self._process: tuple[int, float] | None = None
        self._counted = 0

    def update(self, page: RankPage) -> Mapping[str, float]:
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
        return dict(zip(PHASES, self._seconds, strict=True))


def tokens_per_second(page: RankPage, now: float) -> float | None:
    """Throughput over the last steps; a step that takes longer than the one before drags it down while it lasts."""
    recent = page.steps[-RATE_STEPS:]
    if not recent:
        return None
    began, last = recent[0].end - recent[0].duration_s, recent[-1]
    elapsed = max(last.end, now - last.duration_s) - began
    return sum(step.tokens for step in recent) / elapsed if elapsed > 0 else None


def step_samples(step: StepFact, labels: tuple[str, ...]) -> Iterator[Sample]:
    """The samples of a completed step of a rank."""
    yield Sample(STEP, step.step, labels)
    yield Sample(STEP_SECONDS, step.duration_s, labels)
    for metric, value in ((LOSS, step.loss), (GRAD_NORM, step.grad_norm), (LEARNING_RATE, step.learning_rate)):
        if value is not None and not math.isnan(value):
            yield Sample(metric, value, labels)


def model_samples(page: RankPage, rate: float, labels: tuple[str, ...]) -> Iterator[Sample]:
    """The samples of a rank's MFU, none if the trainer does not say what a token takes; ``rate``: tokens per second."""
    if page.flops_per_token is None or page.peak_flops is None:
        return
    yield Sample(MODEL_FLOPS, page.flops_per_token, labels)
    yield Sample(PEAK_FLOPS, page.peak_flops, labels)
    yield Sample(MFU, rate * page.flops_per_token / page.peak_flops, labels)


def router_samples(page: RankPage, labels: tuple[str, ...]) -> Iterator[Sample]:
    """The samples of the routers of a mixture of experts, none of a dense model."""
    if page.router is not None:
        metrics = (ROUTER_LOAD, ROUTER_LIMIT, ROUTER_ENTROPY, ROUTER_DROPPED)
        yield from (Sample(metric, value, labels) for metric, value in zip(metrics, page.router, strict=True))


def run_samples(run: RunFact) -> Iterator[Sample]:
    """The samples of a run."""
    for state in RUN_STATES:
        yield Sample(RUN_STATE, float(state == run.state), (run.run, state))
    yield Sample(RUN_GENERATION, run.generation, (run.run,))
    yield Sample(RUN_UP, float(run.alive), (run.run,))


def step_facts(page: RankPage, known: tuple[StepFact, ...]) -> tuple[StepFact, ...]:
    """The steps of ``page``; those among ``known``, the facts of an earlier look, are not made again."""
    last = known[-1].end if known else None
    new = [*takewhile(lambda step: step.end != last, reversed(page.steps))]
    made = (
        StepFact(
            s.step,
            s.end,
            s.duration_s,
            s.tokens,
            s.loss,
            s.grad_norm,
            dict(zip(PHASES, s.phase_s, strict=True)),
            s.learning_rate,
        )
        for s in reversed(new)
    )
    return (*known, *made)[-len(page.steps) :] if page.steps else ()
