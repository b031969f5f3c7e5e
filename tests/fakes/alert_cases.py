"""Series that raise each alert, and scenarios that a real Prometheus scrapes.

Series that raise each alert, and the nearest ones that do not, in the notation of promtool.
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

Series = Mapping[str, str]

NODE = 'instance="node-17:9477"'
GPU = f'{NODE},gpu="3"'
RUN = 'run="train"'
RUNNING = {f'opsd_run_state{{{NODE},{RUN},state="running"}}': "1x2000", f"opsd_run_up{{{NODE},{RUN}}}": "1x2000"}


@dataclass(frozen=True)
class Case:
    """Series (in promtool's notation, a value every 15 s) of which each set in ``fires`` raises the alert ``at``."""

    fires: Sequence[Series]
    quiet: Sequence[Series]
    at: str = "10m"


def steps(a_minute: float, minutes: int, then: float | None = None) -> Series:
    """A run whose steps take 1 s, at a pace, and at another pace after some ``minutes``; a value every minute."""
    pace = f"0+{a_minute}x{minutes}" + ("" if then is None else f" {a_minute * minutes}+{then}x6000")
    return {
        f"opsd_rank_step{{{NODE},{RUN}}}": pace,
        f"opsd_rank_step_seconds{{{NODE},{RUN}}}": "1x10000",
        f'opsd_run_state{{{NODE},{RUN},state="running"}}': "1x10000",
    }


def forecast(seconds: str) -> Series:
    """A run that was planned for 100,000 s, and is expected to end later by its restarts."""
    return {
        f"opsd_run_planned_seconds{{{NODE},{RUN}}}": "100000x400",
        f"opsd_run_forecast_seconds{{{NODE},{RUN}}}": seconds,
        f'opsd_run_beyond_plan_seconds{{{NODE},{RUN},bucket="restart"}}': "20000x400",
        f'opsd_run_beyond_plan_seconds{{{NODE},{RUN},bucket="other"}}': "10x400",
    }


def full(node: int, severity: str = "critical", state: str = "open", mount: str = "/results") -> Series:
    """An incident of a file system that is full; ``mount`` is "" if it is none of the network."""
    where = f'instance="node-{node}:9477",kind="storage_full",severity="{severity}",state="{state}",mount="{mount}"'
    return {f"opsd_incidents{{{where}}}": "1x50"}


CASES: Mapping[str, Case] = {
    "ImexNotReady": Case(
        [{f"opsd_imex_state{{{NODE}}}": "2x50"}, {f"opsd_imex_state{{{NODE}}}": "5x10 7x40"}],
        [{f"opsd_imex_state{{{NODE}}}": "5x50"}, {f"opsd_imex_state{{{NODE}}}": "2x10 5x40"}],
    ),
    "RunUnsupervised": Case(
        [{**RUNNING, f"opsd_run_up{{{NODE},{RUN}}}": "1x30 0x20"}],
        [
            RUNNING,
            {
                f'opsd_run_state{{{NODE},{RUN},state="running"}}': "0x50",
                f'opsd_run_state{{{NODE},{RUN},state="finished"}}': "1x50",
                f"opsd_run_up{{{NODE},{RUN}}}": "0x50",
            },
        ],
    ),
    "AgentSilent": Case([{f'up{{{NODE},job="opsd"}}': "1x30 0x20"}], [{f'up{{{NODE},job="opsd"}}': "1x50"}]),
    "AgentMissing": Case([{'up{instance="x",job="node"}': "1x50"}], [{f'up{{{NODE},job="opsd"}}': "0x50"}]),
    "CollectorBlind": Case(
        [
            {f'opsd_collector_state{{{NODE},collector="host",state="error"}}': "1x50"},
            {f'opsd_collector_state{{{NODE},collector="host",state="hung"}}': "1x50"},
        ],
        [
            {f'opsd_collector_state{{{NODE},collector="host",state="no_data"}}': "1x50"},
            {f'opsd_collector_state{{{NODE},collector="host",state="error"}}': "0x50"},
        ],
    ),
    "CollectorLimited": Case(
        [{f'opsd_collector_state{{{NODE},collector="ranks",state="limited"}}': "1x50"}],
        [{f'opsd_collector_state{{{NODE},collector="ranks",state="limited"}}': "0x50"}],
    ),
    "AgentSlow": Case(
        [{f"opsd_agent_missed_ticks_total{{{NODE}}}": "0+6x60"}],
        [{f"opsd_agent_missed_ticks_total{{{NODE}}}": "0+1x60"}],
        at="12m",
    ),
    "JournalDown": Case([{f"opsd_journal_up{{{NODE}}}": "0x50"}], [{f"opsd_journal_up{{{NODE}}}": "1x50"}]),
    "PrologBlind": Case(
        [{f'opsd_prolog_verdict{{{NODE},verdict="unknown"}}': "1x50"}],
        [{f'opsd_prolog_verdict{{{NODE},verdict="unknown"}}': "0x50"}],
    ),
    "NodeToReplace": Case(
        [
            {f'opsd_repair_state{{{NODE},state="rma"}}': "1x50"},
            {
                f'opsd_repair_state{{{NODE},state="rma"}}': "1x50",
                f'opsd_slurm_node_flag{{{NODE},flag="drain"}}': "1x50",
            },
        ],
        [
            {f'opsd_repair_state{{{NODE},state="left"}}': "1x50"},
            {
                f'opsd_repair_state{{{NODE},state="rma"}}': "1x50",
                f'opsd_slurm_node_flag{{{NODE},flag="drain"}}': "0x50",
            },
        ],
    ),
    "LemonNode": Case(
        [{f"opsd_node_lemon{{{NODE}}}": "1x50"}],
        [{f"opsd_node_lemon{{{NODE}}}": "0x50"}, {}],
    ),
    "RepairLeft": Case(
        [
            {
                f'opsd_repair_state{{{NODE},state="left"}}': "1x250",
                f'opsd_slurm_node_reason_info{{{NODE},reason="opsd:gpu_xid-1 gpu_xid: x",reason_by="root"}}': "1x250",
            },
        ],
        [
            {f'opsd_repair_state{{{NODE},state="left"}}': "1x250"},
            {
                f'opsd_repair_state{{{NODE},state="left"}}': "1x250",
                f'opsd_slurm_node_reason_info{{{NODE},reason="mine",reason_by="ann"}}': "1x250",
            },
            {
                f'opsd_repair_state{{{NODE},state="rma"}}': "1x250",
                f'opsd_slurm_node_reason_info{{{NODE},reason="opsd:rma gpu_xid: x",reason_by="root"}}': "1x250",
            },
        ],
        at="40m",
    ),
    "RepairStuck": Case(
        [
            {f"opsd_repair_age_seconds{{{NODE}}}": "22000+15x250"},
            {f"opsd_repair_age_seconds{{{NODE}}}": "22000+15x250", f"opsd_slurm_jobs{{{NODE}}}": "0x250"},
        ],
        [
            {f"opsd_repair_age_seconds{{{NODE}}}": "600+15x250"},
            {f"opsd_repair_age_seconds{{{NODE}}}": "22000+15x250", f"opsd_slurm_jobs{{{NODE}}}": "1x250"},
            {
                f"opsd_repair_age_seconds{{{NODE}}}": "22000+15x250",
                f'opsd_repair_state{{{NODE},state="paused"}}': "1x250",
            },
            {f"opsd_repair_age_seconds{{{NODE}}}": "22000+15x20 _x230"},
        ],
        at="40m",
    ),
    "ConfigRefused": Case(
        [{f"opsd_config_last_reload_successful{{{NODE}}}": "0x50"}],
        [{f"opsd_config_last_reload_successful{{{NODE}}}": "1x50"}],
    ),
    "AgentCrowded": Case(
        [{f'opsd_http_refused_total{{{NODE},reason="slow"}}': "0+120x60"}],
        [
            {f'opsd_http_refused_total{{{NODE},reason="slow"}}': "0+6x60"},
            {f'opsd_http_refused_total{{{NODE},reason="host"}}': "0+120x60"},
        ],
        at="12m",
    ),
    "RunbookFailing": Case(
        [{f'opsd_runbook_errors_total{{{NODE},kind="gpu_ecc"}}': "0x30 1x20"}],
        [{f'opsd_runbook_errors_total{{{NODE},kind="gpu_ecc"}}': "1x50"}],
    ),
    "KernelLogLost": Case(
        [{f'opsd_kmsg_dropped_total{{{NODE},reason="overrun"}}': "0x30 5x20"}],
        [{f'opsd_kmsg_dropped_total{{{NODE},reason="overrun"}}': "5x50"}],
    ),
    "ExporterDoubtful": Case(
        [{f"opsd_dcgm_untrusted{{{NODE}}}": "1x50"}, {f"opsd_dcgm_disagreements{{{NODE}}}": "2x50"}],
        [{f"opsd_dcgm_untrusted{{{NODE}}}": "0x50", f"opsd_dcgm_disagreements{{{NODE}}}": "0x50"}],
    ),
    "RankPagesBroken": Case(
        [{f"opsd_rank_page_errors{{{NODE},{RUN}}}": "1x50"}], [{f"opsd_rank_page_errors{{{NODE},{RUN}}}": "0x50"}]
    ),
    "SparePoolEmpty": Case(
        [
            {f"opsd_spare_ready{{{NODE}}}": "0x50"},
            {f"opsd_spare_ready{{{NODE}}}": "1x50", f'opsd_rank_up{{{NODE},{RUN},rank="0"}}': "1x50"},
        ],
        [
            {f"opsd_spare_ready{{{NODE}}}": "1x50", f'opsd_rank_up{{{NODE},{RUN},rank="0"}}': "0x50"},
            {f"opsd_spare_ready{{{NODE}}}": "0x50", 'opsd_spare_ready{instance="node-18:9477"}': "1x50"},
            {f"opsd_slurm_up{{{NODE}}}": "1x50"},
        ],
    ),
    "PlanExceeded": Case(
        [forecast("100000x30 120000x400"), forecast("110001x400")],
        [forecast("110000x400"), forecast("90000x400"), {f"opsd_run_forecast_seconds{{{NODE},{RUN}}}": "120000x400"}],
        at="70m",
    ),
    "StorageFull": Case(
        [full(17, mount="")],
        [full(17, mount="", state="acknowledged")],
    ),
    "SlurmSilent": Case([{f"opsd_slurm_up{{{NODE}}}": "0x50"}], [{f"opsd_slurm_up{{{NODE}}}": "1x50"}]),
    "IncidentEscalated": Case(
        [{f'opsd_incidents{{{NODE},kind="gpu_lost",severity="critical",state="escalated"}}': "1x50"}],
        [{f'opsd_incidents{{{NODE},kind="gpu_lost",severity="critical",state="acting"}}': "1x50"}],
    ),
    "ActionFailed": Case(
        [{f'opsd_actions_total{{{NODE},verb="drain_node",outcome="failed"}}': "0x30 1x20"}],
        [{f'opsd_actions_total{{{NODE},verb="drain_node",outcome="ok"}}': "0x30 1x20"}],
    ),
}
SHARED: Mapping[str, Case] = {
    "StorageFull": Case(
        [{**full(17), **full(18)}, {**full(17, "warning"), **full(18)}],
        [{**full(17, state="acknowledged"), **full(18)}, full(17, state="symptom")],
    ),
}
"""Cases of alerts that are told once for a cluster, beside one of the same name that each node has."""

BURNS: Mapping[str, Case] = {
    "1h": Case([steps(60, 120, then=0)], [steps(60, 120, then=40), steps(60, 200)], at="175m"),
    "6h": Case([steps(60, 480, then=36)], [steps(60, 480, then=48)], at="14h"),
    "3d": Case([steps(60, 480, then=54)], [steps(60, 480, then=58.2)], at="81h"),
}
"""Goodput: nothing for an hour, 60 % for six hours, 90 % for three days; not two thirds, 80 % or 97 %."""


# Scenarios that a real Prometheus scrapes, and the alerts that it must have at each of their stages.
#
# A scenario is played in virtual time. Whenever something about its incidents changes that an alert may show, what
# the agent exports then is kept as a stage. One HTTP server then serves all scenarios, each as an agent of a cluster
# of its own, one stage after the other.


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
