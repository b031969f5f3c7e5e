"""The shipped configuration in real Prometheus and Alertmanager, around an agent with simulated GPUs."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("yaml")
import shutil
import subprocess
import urllib.parse
import urllib.request

import pytest

from opsd.commands.main import cli
from opsd.dashboards.boards import NAMES, text_of
from opsd.ports import free_port
from opsd.preflight.base import Context
from opsd.preflight.checks import run_alerts
from opsd.preflight.judge import judge
from opsd.settings.sections import PreflightSettings
from opsd.simulated.gpus import NoCompilerError, SimulatedGpus
from opsd.stack.world import Stack, StackError, get
from tests.fakes.clock import eventually
from tests.fakes.process import Opsd
from tests.pictures.cluster import node_exporter

# The shipped configuration in real Prometheus and Alertmanager, around an agent with simulated GPUs.


VARIABLES = {
    "cluster": ".*",
    "node": ".*",
    "gpu": ".*",
    "job": "4242",
    "run": "train",
    "check": ".*",
    "__rate_interval": "10s",
}

NOT_HERE = {
    "run:opsd_goodput:ratio_rate": "goodput needs as much history as its window is long",
    "run:opsd_rank_tokens:usual6h": "the usual throughput needs more than a few seconds of history",
    "opsd_nccl_stalled_seconds": "there is no NCCL on this machine",
    "opsd_storage_response_seconds": "there is no network file system on this machine",
    "opsd_storage_io_bytes_total": "there may be no disk that the kernel shows on this machine",
    "opsd_storage_busy_seconds_total": "there may be no disk that the kernel shows on this machine",
    "opsd_storage_nvme_temperature_celsius": "there may be no NVMe drive in this machine",
    "opsd_thermal_zone_celsius": "there may be no thermal zone in this machine",
    "opsd_host_clock_": "a machine may have no time service",
    "opsd_ib_transmit_wait_ticks_total": "no port waits for credit",
    "opsd_ib_congestion_events_total": "no port tells of congestion",
    "opsd_collector_state": "no collector is blind",
    "opsd_gpu_ecc_errors_total": "no GPU has memory errors",
    "opsd_gpu_nvlink_errors_total": "no link has errors",
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": "no packet is sent again",
    "opsd_xid_total": "no GPU has an Xid",
    "opsd_runbook_errors_total": "no runbook raises errors",
    "opsd_actions_total": "the agent only observes",
    "opsd_incidents_opened_total": "an incident that opened before the first scrape does not count",
    "opsd_run_state": "nothing restarts",
    "opsd_node_faults": "no Slurm keeps a comment of this node",
    "opsd_node_lemon": "no Slurm keeps a comment of this node",
    "opsd_repair_attempts": "nothing is repaired",
    "opsd_run_seconds_total": "the run of the stack has no launcher, whose events the ledger is made of",
    "opsd_spare_": "the node is no spare",
    'opsd_gpu_up{cluster=~"$cluster"} == 0)': "no GPU is lost",
}
"""Series of panels that may show nothing here, and why that is right."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack in which GPU 3 overheats."""
    with ExitStack() as ending:
        exporter = ending.enter_context(node_exporter())
        try:
            folder = tmp_path_factory.mktemp("stack")
            running = ending.enter_context(Stack(folder, scrape_s=1.0, rules_s=1.0, node_exporters=[exporter]))
        except (NoCompilerError, StackError) as error:
            pytest.skip(str(error))
        assert eventually(lambda: bool(running.query("instance_gpu:opsd_gpu_throttle:ratio_rate1m")), 60)
        running.node.overheat(3)
        yield running


@pytest.mark.slow
@pytest.mark.xdist_group("stack")
def test_a_fault_reaches_everybody_who_is_to_be_told(stack: Stack) -> None:
    """The webhook with node, GPU, job, cost and next step; Slack and the pager in words."""
    assert eventually(lambda: bool(stack.inbox.alerts("GpuThrottle")), 60)
    _, alert = stack.inbox.alerts("GpuThrottle")[0]
    said = alert["annotations"]
    assert (alert["status"], alert["labels"]["gpu"], alert["labels"]["cluster"]) == ("firing", "3", "demo")
    assert (said["node"], said["job"]) == ("127.0.0.1", "4242")
    assert said["cost"].startswith("8 GPUs of job 4242")
    assert said["next_step"].endswith("opsd runbook show gpu_throttle")
    assert said["who_acts"].startswith(("you act", "opsd ")) and " -pl " in said["next_step"]
    assert eventually(lambda: {m.receiver for m in stack.inbox.messages} == {"webhook", "slack", "pagerduty"}, 30)
    (slack, *_) = [m.body for m in stack.inbox.messages if m.receiver == "slack" and "GPU 3" in str(m.body)]
    assert slack["attachments"][0]["title"].startswith("[CRITICAL] GPU 3 of")
    assert "Next: " in slack["attachments"][0]["text"]


@pytest.mark.slow
@pytest.mark.xdist_group("stack")
def test_the_link_in_the_alert_leads_to_the_page(stack: Stack) -> None:
    """On the agent that the alert is about."""
    assert eventually(lambda: bool(stack.inbox.alerts("GpuThrottle")), 60)
    _, alert = stack.inbox.alerts("GpuThrottle")[0]
    with urllib.request.urlopen(alert["annotations"]["runbook_url"], timeout=10) as answer:
        assert "A GPU is throttled" in answer.read().decode()


@pytest.mark.slow
@pytest.mark.xdist_group("stack")
def test_nothing_else_is_told(stack: Stack) -> None:
    """One fault, one alert; what follows from it is not a second one."""
    assert eventually(lambda: bool(stack.inbox.alerts("GpuThrottle")), 60)
    names = {
        a["labels"]["alertname"] for m in stack.inbox.messages if m.receiver == "webhook" for a in m.body["alerts"]
    }
    of_this_machine = {"StorageFull", "HostMemory", "CollectorBlind", "AgentSlow", "KernelLogLost"}
    assert names - of_this_machine == {"GpuThrottle"}


@pytest.mark.slow
@pytest.mark.xdist_group("stack")
def test_every_target_is_scraped_and_every_rule_evaluated(stack: Stack) -> None:
    """Prometheus itself finds nothing wrong."""
    targets = get(f"{stack.prometheus}/api/v1/targets")["data"]["activeTargets"]
    assert {target["labels"]["job"]: target["health"] for target in targets} == {"opsd": "up", "node": "up"}
    groups = get(f"{stack.prometheus}/api/v1/rules")["data"]["groups"]
    assert {
        rule["name"]: rule.get("lastError") for group in groups for rule in group["rules"] if rule["health"] == "err"
    } == {}


def queries() -> Iterator[tuple[str, str, str]]:
    """Board, panel and expression of everything that Grafana would ask."""
    for name in NAMES:
        board = json.loads(text_of(name))
        for annotation in board["annotations"]["list"]:
            if "expr" in annotation:
                yield name, "annotations", annotation["expr"]
        for panel in board["panels"]:
            for inner in panel["panels"] if panel["type"] == "row" else [panel]:
                yield from ((name, inner["title"], target["expr"]) for target in inner["targets"])


@pytest.mark.slow
@pytest.mark.xdist_group("stack")
def test_every_panel_shows_data(stack: Stack) -> None:
    """Each query is understood, and answers with data or is listed above with the reason."""

    def filled(expression: str) -> str:
        return re.sub(r"\$(\w+)", lambda found: VARIABLES[found[1]], expression)

    def empty() -> set[tuple[str, str, str]]:
        return {
            (board, panel, expression)
            for board, panel, expression in queries()
            if not stack.query(filled(expression)) and not any(name in expression for name in NOT_HERE)
        }

    assert eventually(lambda: not empty(), 45), empty()
    assert stack.query(filled('max(run:opsd_rank_step:max{cluster=~"$cluster", run=~"$run"})'))[0]["value"][1] > "0"


OUTSIDE = Path(__file__).parents[1] / "outside/boards"

OF_OTHERS = {"instance": ".+", "Hostname": ".+", "gpu": ".+", "worker": ".*", "slurm_job": "4242"}

ELSEWHERE = re.compile(r"node_|kube_|slurm_job_info|label_move|rate\(\w+\{[^}]*\}\)")
"""What an agent does not export, and what is no PromQL."""


@pytest.mark.slow
@pytest.mark.xdist_group("stack")
@pytest.mark.parametrize(
    ("board", "asked", "left"), [("dcgm-exporter-12239", 16, 0), ("soperator-jobs-overview", 22, 13)]
)
def test_boards_of_others_show_data(stack: Stack, board: str, asked: int, left: int) -> None:
    """Unchanged, and with the new name of ``Hostname``: each of their queries about GPUs answers.

    Where it asks for a job, the answer is about the GPUs of the job.
    """
    every = [query["expr"] for query in json.loads((OUTSIDE / f"{board}.json").read_text())]
    known = [expression for expression in every if not ELSEWHERE.search(expression)]
    assert (len(known), len(every) - len(known)) == (asked, left)
    filled = [re.sub(r"\$(\w+)", lambda found: OF_OTHERS[found[1]], expression) for expression in known]
    filled += [each.replace("Hostname", "hostname") for each in filled if "Hostname" in each]
    assert eventually(lambda: all(map(stack.query, filled)), 45), [each for each in filled if not stack.query(each)]
    foreign = [expression.replace("4242", "77") for expression in filled if "4242" in expression]
    assert not any(map(stack.query, foreign)) and bool(foreign) == (left > 0)


@pytest.mark.slow
@pytest.mark.xdist_group("stack")
def test_a_node_that_is_down_has_no_other_alerts(stack: Stack) -> None:
    """Alertmanager holds back what its last scrape said, what one fault brings about, and nothing of other nodes."""

    def labels(name: str, instance: str) -> dict[str, str]:
        return {"alertname": name, "instance": instance, "severity": "critical"}

    sent = [labels("AgentSilent", "a:1"), labels("GpuThrottle", "a:1"), labels("GpuThrottle", "b:1")]
    sent += [{**labels("LossNan", "c:1")}, {**labels("LossSpike", "c:1")}]
    sent += [{**labels(name, "d:1"), "gpu": gpu} for name, gpu in (("GpuLost", "3"), ("GpuXid", "3"), ("GpuXid", "4"))]
    body = json.dumps([{"labels": each, "annotations": {"summary": "x", "runbook_url": "http://x/"}} for each in sent])
    post(f"{stack.alertmanager}/api/v2/alerts", body)

    def held() -> set[tuple[str, str, str]]:
        listed: list[dict[str, Any]] = get(f"{stack.alertmanager}/api/v2/alerts")
        return {
            (a["labels"]["alertname"], a["labels"]["instance"], a["labels"].get("gpu", ""))
            for a in listed
            if a["status"]["inhibitedBy"]
        }

    assert eventually(
        lambda: held() == {("GpuThrottle", "a:1", ""), ("LossSpike", "c:1", ""), ("GpuXid", "d:1", "3")}, 20
    ), held()


def post(url: str, body: str) -> None:
    request = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10):
        pass


@pytest.mark.slow
@pytest.mark.xdist_group("stack")
def test_without_the_programs_it_says_what_to_install(tmp_path: Path) -> None:
    """In one sentence, before anything is started."""
    done = CliRunner().invoke(cli, ["stack"], env={"PATH": str(tmp_path)})
    assert done.exit_code == 1
    assert "opsd: prometheus and prometheus-alertmanager missing; install" in done.output


# A real Prometheus leads from a counter of the agent to the incident.


CONFIG = """
global: {{scrape_interval: 1s}}
scrape_configs: [{{job_name: opsd, static_configs: [{{targets: ["127.0.0.1:{port}"]}}]}}]
"""


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus (a Debian package) is not installed")
def test_prometheus_has_the_incident_of_a_counter(tmp_path: Path, library: str) -> None:
    """Of the incidents opened and of the Xids; the agent knows the id."""
    gpus = SimulatedGpus.create(tmp_path / "gpus.state", count=2)
    opsd, port = Opsd(tmp_path, library, gpus), free_port()
    file = tmp_path / "prometheus.yml"
    file.write_text(CONFIG.format(port=opsd.port))
    command = [
        "prometheus", f"--config.file={file}", f"--storage.tsdb.path={tmp_path}/tsdb",
        f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage",
    ]  # fmt: skip

    def asked(query: str) -> list[dict[str, Any]]:
        values = urllib.parse.urlencode({"query": query, "start": 0, "end": 4e9})
        try:
            url = f"http://127.0.0.1:{port}/api/v1/query_exemplars?{values}"
            with urllib.request.urlopen(url, timeout=10) as answer:
                return list(json.load(answer)["data"])
        except OSError:
            return []

    with (
        gpus,
        opsd.agent("--set=agent.interval_s=0.2"),
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as prometheus,
    ):
        try:
            assert eventually(opsd.shows('opsd_collector_state{collector="nvml",state="ok"} 1.0'))
            gpus[0].raise_xid(119)
            for query in ('opsd_incidents_opened_total{kind="gpu_xid"}', 'opsd_xid_total{code="119"}'):
                assert eventually(lambda query=query: asked(query), 60), query
                (series,) = asked(query)
                id = series["exemplars"][0]["labels"]["incident_id"]
                assert json.loads(opsd.get(f"/api/v1/incidents/{id}") or "{}")["kind"] == "gpu_xid"
        finally:
            prometheus.kill()


# `opsd preflight --alerts` with the shipped rules and routes in real Prometheus and Alertmanager.


@pytest.mark.long
def test_each_alert_is_received_once_and_then_over(tmp_path: Path) -> None:
    """All rules are known, every receiver is told, the inbox has each alert once; afterwards none is left firing."""
    try:
        stack = Stack(tmp_path)
    except StackError as error:
        pytest.skip(str(error))
    with stack:
        stack.inbox.close()  # its address becomes that of the check
        address = stack.inbox.url.removeprefix("http://")
        context = Context(
            "n1", "standard", 60.0, fire_alerts=True,
            settings=PreflightSettings(
                alertmanager=stack.alertmanager, prometheus=stack.prometheus, alert_inbox=address
            ),
        )  # fmt: skip
        outcome = run_alerts.run(context, lambda share, subject: None)
        assert judge(run_alerts.CHECK, outcome, 0.0).verdict == "pass", outcome.findings
        assert outcome.facts["GpuThrottle"] == "webhook, pagerduty, slack"
        assert len(outcome.facts) == outcome.measurements[0].value > 50
        assert eventually(lambda: not get(f"{stack.alertmanager}/api/v2/alerts?filter=test%3D%22true%22"), 20.0)
