"""The newest evaluation of a run as series, from the event ``evaluation``. Pure; the content belongs to a user."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from opsd.collectors.base import Event, Metric, Sample
from opsd.collectors.lib.run_files import named_numbers, number

MAX_RESULTS: Final = 32
"""Results of an evaluation that are exported, in the order of their names."""

STEP = Metric("opsd_evaluation_step", "Step of the checkpoint that was evaluated last.", labels=("run",))
TOKENS = Metric("opsd_evaluation_tokens", "Tokens that it was trained on.", labels=("run",))
RESULT = Metric("opsd_evaluation_result", "Result of the last evaluation.", labels=("run", "name"))
REFERENCE = Metric(
    "opsd_evaluation_reference", "The same of the reference run at equal tokens.", labels=("run", "name")
)
METRICS: Final = (STEP, TOKENS, RESULT, REFERENCE)


class Evaluations:
    """Remembers the newest evaluation of one run that has results; one that failed is passed over."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._newest: Mapping[str, object] = {}

    def note(self, event: Event) -> None:
        """Take in an event of the run."""
        if event.kind == "evaluation" and named_numbers(event.data.get("results"), MAX_RESULTS):
            self._newest = event.data

    def samples(self) -> Iterator[Sample]:
        """The series; none before the first evaluation."""
        for metric, name in ((STEP, "step"), (TOKENS, "tokens")):
            if (value := number(self._newest.get(name))) is not None:
                yield Sample(metric, value, (self._run,))
        for metric, name in ((RESULT, "results"), (REFERENCE, "reference")):
            for result, value in named_numbers(self._newest.get(name), MAX_RESULTS).items():
                yield Sample(metric, value, (self._run, result))
