"""Scenarios that a real Prometheus scrapes, and the alerts that it must have at each of their stages.

A scenario is played in virtual time. Whenever something about its incidents changes that an alert may show, what the
agent exports then is kept as a stage. One HTTP server then serves all scenarios, each as an agent of a cluster of its
own, one stage after the other.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import yaml

from opsd.agent.lifecycle import holder
from opsd.agent.web.exposition import Exposition
from opsd.collectors.base import Sample
from opsd.dashboards.alerts import alerts, linked
from opsd.ports import free_port
from opsd.runbooks.base import SHARED_MOUNT, Incident, Severity
from opsd.scenarios.model import Scenario
from opsd.scenarios.player import play
from opsd.stack.world import eventually, get
from tests.fakes.metamorphic import mode_of

Alert = tuple[str, str, str, str]
"""Name, severity, GPU and network file system."""

START_S, SHOWN_S = 60.0, 150.0
"""Limits of a hang, not of a busy machine: dozens of agents are scraped at once."""
SCRAPE = "4s"
GRAVEST = (Severity.CRITICAL, Severity.WARNING, Severity.INFO)
NAMES = {alert.runbook: alert.name for alert in alerts()}
ESCALATED = "IncidentEscalated"


@dataclass
class Told:
    """A scenario as Prometheus sees it: what is exported at each stage, and the alerts that belong to it."""

    name: str
    stages: list[tuple[bytes, frozenset[Alert]]] = field(default_factory=list)

    def at(self, stage: int) -> tuple[bytes, frozenset[Alert]]:
        """The stage, or the last one if there are fewer."""
        return self.stages[min(stage, len(self.stages) - 1)]


def expected(incidents: Sequence[Incident]) -> frozenset[Alert]:
    """The alerts of these incidents, judged by the incidents alone."""
    mine = [incident for incident in incidents if not holder(incident) and not incident.cause]
    shown = set()
    for incident in mine:
        mount = str(incident.data.get(SHARED_MOUNT) or "")
        severity = incident.severity
        if mount:
            same = [other.severity for other in mine if other.data.get(SHARED_MOUNT) == mount]
            severity = min(same, key=GRAVEST.index)
        gpu = "" if incident.culprit.gpu is None or mount else str(incident.culprit.gpu)
        shown.add((NAMES[incident.kind], severity.value, gpu, mount))
        if incident.state == "escalated":
            shown.add((ESCALATED, incident.severity.value, "", ""))
    return frozenset(shown)


def tell(name: str, scenario: Scenario) -> Told:
    """Play ``scenario`` in the mode in which opsd does most."""
    told = Told(name)

    def looked(incidents: Sequence[Incident], samples: Sequence[Sequence[Sample]]) -> None:
        now = expected(incidents)
        if not told.stages or told.stages[-1][1] != now:
            body, _ = Exposition(lambda: samples).render()
            told.stages.append((body, now))

    play(scenario, mode_of(scenario), looked=looked)
    return told


class Replay:
    """A real Prometheus with the shipped rules that scrapes ``told``, with its files in ``folder``."""

    def __init__(self, folder: Path, told: Sequence[Told]) -> None:
        self._told, self._stage = told, 0
        self._folder, self._port = folder, free_port()

    @contextmanager
    def running(self) -> Iterator[Replay]:
        """Server and Prometheus, until the end of the block."""
        by_path = {f"/{quote(told.name)}": told for told in self._told}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(handler) -> None:
                body, _ = by_path[handler.path].at(self._stage)
                handler.send_response(200)
                handler.send_header("Content-Type", "text/plain; version=0.0.4")
                handler.send_header("Content-Length", str(len(body)))
                handler.end_headers()
                handler.wfile.write(body)

            def log_message(handler, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        config = self._configuration(server.server_address[1], [*by_path])
        command = [
            "prometheus", f"--config.file={config}", f"--storage.tsdb.path={self._folder}/tsdb",
            f"--web.listen-address=127.0.0.1:{self._port}",
        ]  # fmt: skip
        with (self._folder / "prometheus.log").open("wb") as log, subprocess.Popen(command, stderr=log) as prometheus:
            try:
                assert eventually(self._scraped, START_S), (self._folder / "prometheus.log").read_text()[-2000:]
                yield self
            finally:
                prometheus.terminate()
                server.shutdown()
                server.server_close()

    def disagreements(self) -> list[str]:
        """What Prometheus shows at any stage that the incidents do not, and the other way round."""
        for stage in range(max(len(told.stages) for told in self._told)):
            self._stage = stage
            if not eventually(lambda: not self._differences(), SHOWN_S):
                return [f"stage {stage} of {line}" for line in self._differences()]
        return []

    def _differences(self) -> list[str]:
        shown = self._shown()
        pairs = ((told.name, told.at(self._stage)[1], shown.get(told.name, frozenset())) for told in self._told)
        return [
            f"{name}: {sorted(wanted - there)} have no alert, {sorted(there - wanted)} no incident"
            for name, wanted, there in pairs
            if wanted != there
        ]

    def _shown(self) -> Mapping[str, frozenset[Alert]]:
        """The alerts about incidents that fire, by scenario."""
        found: dict[str, set[Alert]] = {}
        about = {*NAMES.values()} & {alert.name for alert in alerts() if "opsd_incidents" in alert.expr}
        for alert in get(f"http://127.0.0.1:{self._port}/api/v1/alerts")["data"]["alerts"]:
            labels = alert["labels"]
            if labels["alertname"] in about and alert["state"] == "firing":
                where = (labels["alertname"], labels["severity"], labels.get("gpu", ""), labels.get("mount", ""))
                found.setdefault(labels["cluster"], set()).add(where)
        return {name: frozenset(every) for name, every in found.items()}

    def _scraped(self) -> bool:
        try:
            targets = get(f"http://127.0.0.1:{self._port}/api/v1/targets")["data"]["activeTargets"]
        except OSError:
            return False
        return bool(targets) and all(target["health"] == "up" for target in targets)

    def _configuration(self, port: int, paths: Sequence[str]) -> Path:
        """The shipped rules, evaluated each second, and a scrape of every path."""
        rules = self._folder / "rules"
        rules.mkdir()
        for name, text in linked().items():
            content = yaml.safe_load(text)
            for group in content["groups"]:
                group["interval"] = "1s"
            (rules / name).write_text(yaml.safe_dump(content))
        targets = [
            {
                "targets": [f"127.0.0.1:{port}"],
                "labels": {"cluster": told.name, "instance": told.name, "__metrics_path__": path},
            }
            for told, path in zip(self._told, paths, strict=True)
        ]
        config = {
            "global": {"scrape_interval": SCRAPE, "scrape_timeout": SCRAPE},
            "rule_files": [f"{rules}/*.yml"],
            "scrape_configs": [{"job_name": "opsd", "static_configs": targets}],
        }
        file = self._folder / "prometheus.yml"
        file.write_text(yaml.safe_dump(config))
        return file
