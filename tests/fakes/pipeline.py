"""The way of the data through an agent, without threads: window, runbooks, incidents, metrics, API."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict

from prometheus_client.parser import text_string_to_metric_families

from opsd.agent import lifecycle
from opsd.agent.judge import Judge
from opsd.agent.logs import Log
from opsd.agent.records import from_json, to_json
from opsd.agent.web import api
from opsd.agent.web.exposition import Exposition
from opsd.agent.window import Window
from opsd.collectors import NAMES
from opsd.collectors.base import Reading
from opsd.runbooks import RUNBOOKS


class Pipeline:
    """All runbooks behind a window of a minute. Collectors that a test does not feed have nothing to report.

    ``failures`` are the tracebacks of runbooks. Raises AssertionError where something could not be passed on.
    """

    def __init__(self) -> None:
        self.failures: list[str] = []
        self._judge = Judge(RUNBOOKS, Log(self.failures.append), used_s=lambda: 0.0)
        self._window = Window("node", seconds=60)

    def tick(self, now: float, wall: float, readings: Mapping[str, Reading]) -> None:
        """One round with these ``readings`` by collector."""
        self._window.begin(now, wall)
        for name in ("agent", *NAMES):
            self._window.add(name, readings.get(name, Reading()))
        opened = [lifecycle.opened(finding, wall) for finding in self._judge.findings(self._window)]
        self._judge.healed(opened, self._window)
        self._judge.remedies(opened, self._window)
        assert not self._judge.errors, self.failures
        for incident in opened:
            assert from_json(to_json(incident)).id == incident.id
            json.loads(api.encode(api.incident(incident)))
        for reading in readings.values():
            assert_passes_on(reading)


def assert_passes_on(reading: Reading) -> None:
    """Metrics can be scraped and are bounded, events and facts can be sent."""
    body, _ = Exposition(lambda: (reading.samples,)).render()
    series = [sample for family in text_string_to_metric_families(body.decode()) for sample in family.samples]
    written = {(sample.metric.name, sample.labels) for sample in reading.samples}
    assert len(series) >= len(written), "a line of the exposition was not a series"
    for event in reading.events:
        json.loads(api.encode(asdict(event)))
        assert len(event.message) <= 256 and re.fullmatch(r"\w+", event.kind)
    for fact in reading.facts:
        json.loads(api.encode(asdict(fact)))
