"""What a run has read of its data, by source, from the event ``data_mixture``. Pure; the content belongs to a user."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from opsd.collectors.base import Event, Metric, Sample
from opsd.collectors.lib.run_files import named_numbers

MAX_SOURCES: Final = 32
"""Sources of a run that are exported, in the order of their names."""

TOKENS = Metric("opsd_data_source_tokens", "Tokens that the run has drawn from the source.", labels=("run", "source"))
EPOCHS = Metric(
    "opsd_data_source_epochs",
    "How often the run has been through the source; above 1 it repeats.",
    labels=("run", "source"),
)
METRICS: Final = (TOKENS, EPOCHS)


class DataMixture:
    """Remembers the newest state of one run's data. Going back to a checkpoint takes it back, too."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._newest: Mapping[str, object] = {}

    def note(self, event: Event) -> None:
        """Take in an event of the run."""
        if event.kind == "data_mixture":
            self._newest = event.data

    def samples(self) -> Iterator[Sample]:
        """The series; none for a trainer that does not tell."""
        for metric, name in ((TOKENS, "tokens"), (EPOCHS, "epochs")):
            for source, value in named_numbers(self._newest.get(name), MAX_SOURCES).items():
                yield Sample(metric, value, (self._run, source))
