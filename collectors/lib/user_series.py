"""Series from the newest event of a kind: evaluations, and what a run has read of its data. Pure.

The content of an event belongs to a user, so that names are bounded and what is no number is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from opsd.collectors.base import Event, Metric, Sample
from opsd.collectors.lib.run_files import named_numbers, number

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
METRICS: Final = (*EVALUATION.values(), *DATA.values())


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
