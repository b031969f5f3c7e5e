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
from opsd.agent.store import from_json, to_json
from opsd.agent.web import api
from opsd.agent.web.exposition import Exposition
from opsd.agent.window import Window
from opsd.collectors import NAMES, witnesses
from opsd.collectors.base import Reading
from opsd.runbooks import RUNBOOKS
from opsd.runbooks.base import Incident


class Pipeline:
    """All runbooks behind a window of a minute. Collectors that a test does not feed have nothing to report.

    ``failures`` are the tracebacks of runbooks. Raises AssertionError where something could not be passed on.
    """

    def __init__(self) -> None:
        self.failures: list[str] = []
        self._judge = Judge(RUNBOOKS, Log(self.failures.append), used_s=lambda: 0.0)
        self._window = Window("node", seconds=60, witnesses=witnesses())
        self._incidents: dict[tuple[str, str], Incident] = {}

    def clock_stepped(self, seconds: float) -> None:
        """The wall clock was stepped before the next tick."""
        self._window.clock_stepped(seconds)

    def tick(self, now: float, wall: float, readings: Mapping[str, Reading | None], *, exported: bool = True) -> None:
        """One round with these ``readings`` by collector, None for one that fails; ``exported`` to metrics and API."""
        self._window.begin(now, wall)
        for name in ("agent", *NAMES):
            reading = readings.get(name, Reading())
            self._window.forget(name) if reading is None else self._window.add(name, reading)
        opened = [lifecycle.opened(finding, wall) for finding in self._judge.findings(self._window)]
        self._incidents |= {(incident.kind, incident.key): incident for incident in opened}
        self._ask_about_all()
        assert not self._judge.errors, self.failures
        for incident in opened:
            assert from_json(to_json(incident)).id == incident.id
            json.loads(api.encode(api.incident(incident)))
        for reading in readings.values():
            if exported and reading is not None:
                assert_passes_on(reading)

    def _ask_about_all(self) -> None:
        """What the agent asks of runbooks about incidents, also those whose evidence is gone."""
        known = self._incidents.values()
        self._judge.healed(known, self._window)
        self._judge.remedies(known, self._window)
        for incident in known:
            self._judge.confirmed(incident, self._window.witnessed)


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
