"""The agent as people run it: a process with a command line, signals and simulated GPUs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from opsd import exitcodes
from opsd.client import Reporter, process_start
from opsd.commands.metrics import catalogue
from opsd.simulated.gpus import SimulatedGpus
from opsd.slurm.deferred import DeferredUpdates
from opsd.stack.world import Port
from tests.fakes.clock import eventually
from tests.fakes.process import Opsd
from tests.fakes.schemas import Description
from tests.fakes.webhook import Webhook

pytestmark = pytest.mark.xdist_group("agent-process")


@pytest.fixture
def gpus(tmp_path: Path) -> Iterator[SimulatedGpus]:
    with SimulatedGpus.create(tmp_path / "gpus.state", count=2) as created:
        yield created


@pytest.fixture
def opsd(tmp_path: Path) -> Opsd:
    return Opsd(tmp_path)


@pytest.fixture
def gpu_opsd(tmp_path: Path, library: str, gpus: SimulatedGpus) -> Opsd:
    return Opsd(tmp_path, library, gpus)


def test_sigterm_stops_the_agent_while_a_driver_call_hangs(gpu_opsd: Opsd, gpus: SimulatedGpus) -> None:
    """A driver call of a minute delays neither the loop, nor the scrape, nor the end; the log says why."""
    with gpu_opsd.agent("--set=agent.deadline_s=0.3", "--set=agent.interval_s=0.2") as process:
        assert eventually(gpu_opsd.shows('opsd_collector_state{collector="nvml",state="ok"} 1.0'))
        gpus[0].hang_s = 60
        assert eventually(gpu_opsd.shows('opsd_collector_state{collector="nvml",state="hung"} 1.0'))
        assert "DCGM_FI_DEV_GPU_TEMP" not in (gpu_opsd.get("/metrics") or "")
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
        assert process.returncode == exitcodes.OK
        assert time.monotonic() - began < 30
        assert '"state": "hung"' in log
        assert "Traceback" not in log
    gpus[0].hang_s = 0


def test_a_lost_gpu_shows_and_the_others_stay(gpu_opsd: Opsd, gpus: SimulatedGpus) -> None:
    """The other GPUs' series are there, the lost one's are not."""
    with gpu_opsd.agent("--set=agent.interval_s=0.2"):
        assert eventually(lambda: (gpu_opsd.get("/metrics") or "").count("\nDCGM_FI_DEV_GPU_TEMP{") == 2)
        gpus[1].lost = True
        assert eventually(lambda: (gpu_opsd.get("/metrics") or "").count("\nDCGM_FI_DEV_GPU_TEMP{") == 1)
        status = json.loads(gpu_opsd.get("/api/v1/status") or "{}")
        assert [bool(gpu["lost"]) for gpu in status["gpus"]] == [False, True]
        gpus[1].lost = False


def test_orders_to_slurm_are_taken_by_an_agent_that_may_carry_them_out(opsd: Opsd, tmp_path: Path) -> None:
    """One that is meant to drain, or that is root."""
    with opsd.agent():
        assert DeferredUpdates(tmp_path / "state").enabled == (os.geteuid() == 0)
    with opsd.agent("--set=policy.drain=true"):
        assert DeferredUpdates(tmp_path / "state").enabled


def test_everything_is_there_at_once(gpu_opsd: Opsd, tmp_path: Path) -> None:
    """The first scrape has GPUs, host, ranks and the agent itself; status prints them for people."""
    (tmp_path / "shm/run").mkdir(parents=True)
    reporter = Reporter(tmp_path / "shm/run/rank-0000.page", rank=0, gpu=1, run="run")
    reporter.step(tokens=10, loss=2.0)
    with gpu_opsd.agent():
        metrics = gpu_opsd.get("/metrics") or ""
        for name in ("DCGM_FI_DEV_GPU_TEMP", "opsd_host_cpu_ratio", "opsd_rank_step", "opsd_build_info"):
            assert f"\n{name}{{" in metrics
        shown = gpu_opsd.run("status", "--config", str(gpu_opsd.config))
        assert shown.returncode == exitcodes.OK
        for word in ("no open incidents", "simulated", "run"):
            assert word in shown.stdout
        assert gpu_opsd.run("incidents", "--config", str(gpu_opsd.config)).stdout == "no incidents\n"
        answer = gpu_opsd.run("incidents", "list", "--json", "--config", str(gpu_opsd.config)).stdout
        assert json.loads(answer) == {"incidents": [], "repairs": []}


def test_once_prints_one_collection(gpu_opsd: Opsd) -> None:
    """As a table for people and as OpenMetrics for scripts."""
    table = gpu_opsd.run("agent", "--once", "--config", str(gpu_opsd.config))
    assert table.returncode == exitcodes.OK
    assert "opsd_gpu_up" in table.stdout
    text = gpu_opsd.run("agent", "--once", "--format=openmetrics", "--config", str(gpu_opsd.config))
    assert text.stdout.endswith("# EOF\n")
    assert 'opsd_collector_up{collector="nvml"} 1.0' in text.stdout


def test_once_says_what_failed(gpu_opsd: Opsd, gpus: SimulatedGpus) -> None:
    """A collector that hangs is a failure of the command, after its deadline."""
    gpus[0].hang_s = 20
    hung = gpu_opsd.run("agent", "--once", "--set=agent.deadline_s=0.3", "--config", str(gpu_opsd.config))
    assert hung.returncode == exitcodes.FAILED
    assert "nvml hung" in hung.stdout
    gpus[0].hang_s = 0


def test_a_port_that_is_taken_is_one_sentence(opsd: Opsd) -> None:
    """A second agent does not start, and says what to do."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", opsd.port))
        taken.listen()
        second = opsd.run("agent", "--config", str(opsd.config))
    assert second.returncode == exitcodes.FAILED
    assert f"cannot listen on 127.0.0.1:{opsd.port}: Address already in use" in second.stderr
    assert "Traceback" not in second.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set=agent.lisen=1"], "opsd: unknown key agent.lisen; did you mean agent.listen?\n"),
        (["--config", "/nonexistent"], "opsd: /nonexistent: cannot be read"),
        (["--format=xml"], "Invalid value for '--format'"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(opsd: Opsd, arguments: list[str], said: str) -> None:
    """Nothing is started, and the exit code is that of wrong usage."""
    wrong = opsd.run("agent", *arguments)
    assert wrong.returncode == exitcodes.USAGE
    assert said in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_an_agent_without_a_journal_goes_on_and_says_so(opsd: Opsd, tmp_path: Path) -> None:
    """A state folder that cannot be written costs the memory of incidents and nothing else."""
    (tmp_path / "state").write_text("in the way")
    with opsd.agent() as process:
        assert eventually(opsd.shows("opsd_journal_up 0.0"))
        assert "cannot be written" in json.loads(opsd.get("/api/v1/status") or "{}")["journal"]["problem"]
        assert opsd.get("/healthz")
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    assert log.count("journal.db cannot be written") == 1


@pytest.mark.parametrize("journal", ["whole", "damaged", "in the way"])
def test_incidents_survive_an_agent_that_is_killed(opsd: Opsd, tmp_path: Path, journal: str) -> None:
    """A rank crash found by the first agent is the same incident, by its id, to the second."""
    (tmp_path / "memory").mkdir()
    if journal == "in the way":
        (tmp_path / "state").write_text("as on a disk that takes nothing")
    folder = tmp_path / "shm/run"
    folder.mkdir(parents=True)
    Reporter(folder / "rank-0000.page", rank=0, world_size=1, run="run").step(tokens=1)
    crash = {
        "t": time.time(), "node": "n", "event": "rank_exited", "generation": 0, "run": "run", "rank": 0, "pid": 1,
        "exit": "signal SIGKILL", "step": 0, "phase": "forward", "culprit": True, "error": None, "log_tail": [],
        "last_step_t": time.time(), "noticed_s": 0.1,
    }  # fmt: skip
    (folder / "events.jsonl").write_text(json.dumps(crash) + "\n")

    def ids() -> list[str]:
        incidents = json.loads(opsd.get("/api/v1/incidents") or '{"incidents": []}')["incidents"]
        return [incident["id"] for incident in incidents]

    with opsd.agent(RUNTIME_DIRECTORY=str(tmp_path / "memory")) as process:
        assert eventually(lambda: len(ids()) == 1)
        first = ids()
        assert journal == "in the way" or eventually(lambda: _journaled(tmp_path / "state/journal.db"))
        process.kill()
        process.wait()
    if journal == "damaged":
        (tmp_path / "state/journal.db").write_bytes(b"no database" * 1000)
    with opsd.agent(RUNTIME_DIRECTORY=str(tmp_path / "memory" if journal == "in the way" else tmp_path)):
        assert ids() == first
        shown = opsd.run("incidents", "show", first[0], "--config", str(opsd.config))
        assert "signal SIGKILL" in shown.stdout
        assert "opsd runbook show rank_crash" in shown.stdout


def test_a_killed_agent_leaves_its_window_in_memory(opsd: Opsd, tmp_path: Path) -> None:
    """The next one goes on with it, and begins empty, which it says, if it cannot be read."""
    memory = tmp_path / "memory"
    memory.mkdir()
    for kept in (True, False):
        with opsd.agent(RUNTIME_DIRECTORY=str(memory)) as process:
            assert eventually(lambda: (memory / "window").exists())
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=60)
        assert ("window begins empty" in log) is not kept
        (tmp_path / "state/journal.db").unlink()
        (memory / "window").write_bytes(b"not a window")


def test_a_second_agent_does_not_begin_on_the_same_journal(opsd: Opsd) -> None:
    """It would page each open incident again; its exit status and its sentence say why."""
    with opsd.agent():
        second = opsd.run("agent", "--config", str(opsd.config), "--set", 'agent.listen="127.0.0.1:0"')
        assert (second.returncode, "is in use by another agent (process" in second.stderr) == (exitcodes.FAILED, True)
        assert "Traceback" not in second.stderr
        assert opsd.get("/healthz")


def _journaled(path: Path) -> bool:
    import sqlite3

    with contextlib.closing(sqlite3.connect(path)) as database:
        return bool(database.execute("SELECT count(*) FROM incidents").fetchone()[0])


def test_nobody_there_is_one_sentence(opsd: Opsd) -> None:
    """A question to an agent that does not run ends with the failure code."""
    answer = opsd.run("status", "--config", str(opsd.config))
    assert answer.returncode == exitcodes.FAILED
    assert answer.stderr.startswith(f"opsd: no agent answers at http://127.0.0.1:{opsd.port}")
    assert "Traceback" not in answer.stderr


def test_systemd_is_told(opsd: Opsd, tmp_path: Path) -> None:
    """Ready once it listens, a sign of life every tick, and that it is stopping."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(str(tmp_path / "notify"))
        notified.settimeout(30)
        with opsd.agent("--set=agent.interval_s=0.1", NOTIFY_SOCKET=str(tmp_path / "notify")) as process:
            assert [notified.recv(100) for _ in range(3)] == [b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1"]
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
        messages = []
        notified.settimeout(0.1)
        with contextlib.suppress(TimeoutError):
            while True:
                messages.append(notified.recv(100))
        assert messages[-1] == b"STOPPING=1"


def test_an_incident_that_gets_worse_is_acted_on(gpu_opsd: Opsd, gpus: SimulatedGpus) -> None:
    """A restart of the program would have done, then the GPU's firmware stops: the node is to be drained, and told."""
    act = ("--set=policy.mode=act", "--set=policy.drain=true")
    with (
        Webhook() as webhook,
        gpu_opsd.agent("--set=agent.interval_s=0.2", f"--set=notify.webhook={webhook.url}", *act),
    ):

        def incident() -> dict[str, Any]:
            found = json.loads(gpu_opsd.get("/api/v1/incidents?state=current") or '{"incidents": []}')["incidents"]
            return next((one for one in found if one["kind"] == "gpu_xid"), {})

        def verbs() -> list[str]:
            return [action["verb"] for action in incident().get("actions", ()) if action["outcome"] != "running"]

        assert eventually(gpu_opsd.shows('opsd_collector_state{collector="nvml",state="ok"} 1.0'))
        gpus[0].raise_xid(69)
        assert eventually(lambda: verbs() == ["notify"], 60)
        assert incident()["state"] == "verifying"
        gpus[0].raise_xid(119)
        assert eventually(lambda: "drain_node" in verbs(), 60), incident()
        assert "Xid 119" in incident()["summary"]
        assert eventually(lambda: any("gpu_xid worse: GPU 0" in str(post["text"]) for post in webhook.posts), 30)
    assert [post["state"] for post in webhook.posts][:2] == ["opened", "worse"]
    assert {post["id"] for post in webhook.posts} == {webhook.posts[0]["id"]}


def test_a_person_has_an_incident_and_closes_it(gpu_opsd: Opsd, gpus: SimulatedGpus, tmp_path: Path) -> None:
    """On the command line; list, status, pages, API and metric say who has it, also after a restart."""
    config = ("--config", str(gpu_opsd.config))

    def known() -> list[dict[str, Any]]:
        found = json.loads(gpu_opsd.get("/api/v1/incidents?state=current") or '{"incidents": []}')["incidents"]
        return [incident for incident in found if incident["kind"] == "gpu_lost"]

    with gpu_opsd.agent("--set=agent.interval_s=0.2"):
        assert eventually(lambda: (gpu_opsd.get("/metrics") or "").count("\nDCGM_FI_DEV_GPU_TEMP{") == 2)
        gpus[1].lost = True
        (incident,) = eventually(known)
        id = incident["id"]
        assert "nobody; take it: opsd incidents ack gpu_lost-" in gpu_opsd.run("status", *config).stdout
        assert eventually((tmp_path / "state/control.sock").exists)
        done = gpu_opsd.run("incidents", "ack", id, "--by", "ada", "--for", "4h", *config)
        assert (done.returncode, done.stderr) == (exitcodes.OK, "") and "ada since" in done.stdout
        assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    with gpu_opsd.agent("--set=agent.interval_s=0.2"):
        (incident,) = eventually(known)
        assert incident["ack"]["by"] == "ada" and incident["ack"]["until"] - incident["ack"]["at"] == 4 * 3600
        assert eventually(
            gpu_opsd.shows(
                'opsd_incidents{gpu="1",kind="gpu_lost",mount="",severity="critical",state="acknowledged"} 1.0'
            )
        )
        for page in ("/", f"/incident/{id}"):
            assert "ada since" in (gpu_opsd.get(page) or "")
        for command in ("status",), ("incidents", "show", id):
            assert "who has it ada since" in gpu_opsd.run(*command, *config).stdout
        assert "ada has it since" in gpu_opsd.run("incidents", *config).stdout
        assert eventually((tmp_path / "state/control.sock").exists)
        reason = ("--by", "ada", "--reason", "its slot is empty")
        assert gpu_opsd.run("incidents", "close", id, *reason, *config).stdout == f"closed {id}\n"
        assert known() == []
        assert "closed by ada: its slot is empty" in gpu_opsd.run("incidents", "show", id, *config).stdout
        again = gpu_opsd.run("incidents", "close", id, *reason, *config)
        assert again.returncode == exitcodes.FAILED and f"{id} is over since" in again.stderr
    silent = gpu_opsd.run("incidents", "ack", id, *config)
    assert silent.returncode == exitcodes.FAILED and "does an agent run on this node?" in silent.stderr
    assert gpu_opsd.run("incidents", "ack", id, "--for", "4", *config).returncode == exitcodes.USAGE


# A running agent that reads its configuration again.


def status(opsd: Opsd) -> dict[str, Any]:
    return json.loads(opsd.get("/api/v1/status") or "{}")


def test_a_hangup_reloads_the_configuration(opsd: Opsd) -> None:
    """It ended the agent, which systemd took for a clean exit. A file that is wrong changes nothing."""
    good = opsd.config.read_text()
    with opsd.agent("--set=agent.interval_s=0.1") as process:
        opsd.config.write_text(good + '[policy]\nmode = "recommend"\n[thermal]\nenabled = false\n')
        process.send_signal(signal.SIGHUP)
        assert eventually(lambda: status(opsd).get("mode") == "recommend")
        assert eventually(lambda: "thermal" not in [each["name"] for each in status(opsd)["collectors"]])
        opsd.config.write_text("[agent]\nlisen = 1\n")
        process.send_signal(signal.SIGHUP)
        assert eventually(opsd.shows("opsd_config_last_reload_successful 0.0"))
        said = status(opsd)
        assert "unknown key agent.lisen" in said["config"]["problem"]
        assert (said["mode"], process.poll()) == ("recommend", None)
        assert opsd.get("/healthz")
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    assert process.returncode == exitcodes.OK
    assert "configuration refused, the old one stays" in log
    assert "Traceback" not in log


def test_the_command_says_what_came_of_it(opsd: Opsd) -> None:
    """Done, refused, or needing a restart; it finds the agent by what the kernel knows of its journal."""
    good = opsd.config.read_text()
    reload = ("config", "reload", "--config", str(opsd.config), "--url", f"http://127.0.0.1:{opsd.port}")
    with opsd.agent("--set=agent.interval_s=0.1"):
        assert eventually((opsd.folder / "state/journal.lock").exists)
        assert opsd.run(*reload).stdout == "reloaded\n"
        opsd.config.write_text(good.replace("[agent]", "[agent]\ndeadline_s = 3.0"))
        assert opsd.run(*reload).stdout == "reloaded; at the next start of the agent: agent.deadline_s\n"
        opsd.config.write_text(good.replace("[agent]", "[agent]\nweb_config = '/none.yml'"))
        refused = opsd.run(*reload)
        assert refused.returncode == exitcodes.FAILED
        assert "refused, the old configuration stays: /none.yml" in refused.stderr
        opsd.config.write_text("[agent]\nlisen = 1\n")  # the command cannot tell from it where the agent is
        unusable = opsd.run(*reload[:4])
        assert unusable.returncode == exitcodes.FAILED
        assert "refused, the agent was not told" in unusable.stderr and "unknown key agent.lisen" in unusable.stderr
        opsd.config.write_text(good)
    nobody = opsd.run(*reload)
    assert nobody.returncode == exitcodes.FAILED
    assert "no agent answers" in nobody.stderr


# A real agent's answers over HTTP, held against the description that it serves.


def test_the_api_of_a_real_agent_is_as_described(tmp_path: Path, library: str) -> None:
    """Every route of its own description, with a run, a rank and an incident."""
    gpus = SimulatedGpus.create(tmp_path / "gpus.state", count=2)
    opsd = Opsd(tmp_path, library, gpus)
    folder = tmp_path / "shm/run"
    folder.mkdir(parents=True)
    own = {
        "run": "run", "job": "", "node": "n", "state": "running", "generation": 1, "launcher_pid": os.getpid(),
        "launcher_start": 1, "world_size": 1, "control": "", "folder": str(tmp_path), "logs": str(tmp_path),
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(own))
    Reporter(folder / "rank-0000.page", rank=0, gpu=1, run="run").step(tokens=10, loss=float("nan"))
    with gpus, opsd.agent("--set=agent.interval_s=0.2"):
        assert eventually(lambda: (opsd.get("/metrics") or "").count("\nDCGM_FI_DEV_GPU_TEMP{") == 2)
        gpus[1].lost = True
        incidents = eventually(lambda: json.loads(opsd.get("/api/v1/incidents") or "{}").get("incidents"))
        description = Description(opsd.get("/api/v1/openapi.json") or "")
        assert len(description.paths) >= 10
        ids = {"incidents": incidents[0]["id"], "jobs": "run", "repairs": None}
        for path in description.paths:
            if (id := ids.get(path.split("/")[3], "")) is not None:
                body = opsd.get(path.replace("{id}", id))
                assert body is not None and description.errors(path, 200, body) == [], path
        status = json.loads(opsd.get("/api/v1/status") or "{}")
        assert status["ranks"] and status["runs"] and len(status["gpus"]) == 2
        assert "null" in (opsd.get("/api/v1/ranks") or "")


# What a scrape of the real agent holds on a node with GPUs, RDMA ports and a run.


GPUS = 2

ELSEWHERE = {
    "opsd_gpu_retired_pages", "opsd_gpu_retired_pages_pending", "opsd_gpu_fabric_problem",
    "opsd_gpu_fabric_info",
    "DCGM_FI_PROF_PIPE_FP64_ACTIVE", "DCGM_FI_PROF_PIPE_FP32_ACTIVE", "DCGM_FI_PROF_PIPE_FP16_ACTIVE",
    "opsd_run_seconds_total", "opsd_run_planned_seconds", "opsd_run_forecast_seconds", "opsd_run_beyond_plan_seconds",
}  # fmt: skip
"""What the simulated H100 does not tell, and what is off by default."""

OF_THE_KERNEL = (
    "opsd_host_pressure", "opsd_host_numa", "opsd_host_clock_offset", "opsd_host_clock_max_error", "opsd_host_gpu_",
)  # fmt: skip
"""Not told by every kernel, or not while no service keeps the clock right, or only on machines with a real GPU."""

OF_INCIDENTS = ("opsd_incident_brief_info", "opsd_incident_gpu_seconds")
"""Not told while there is no incident."""

OF_SOME_RUNS = ("opsd_evaluation_", "opsd_rank_router_")
"""Gauges of runs that evaluate their checkpoints, or have a mixture of experts; this one does neither."""


def start_run(folder: Path) -> list[Reporter]:
    """A run of this process with two ranks that have trained a step and saved a checkpoint."""
    folder.mkdir(parents=True)
    run = {
        "job": "4242", "node": "n", "state": "running", "generation": 1, "launcher_pid": os.getpid(),
        "launcher_start": process_start(os.getpid()), "world_size": GPUS, "control": "", "folder": str(folder),
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(run))
    mixture = {"t": 0.0, "event": "data_mixture", "rank": 0, "step": 0, "tokens": {"web": 8192}, "epochs": {"web": 0.1}}
    (folder / "events.jsonl").write_text(json.dumps(mixture) + "\n")
    pages = [folder / f"rank-{rank:04d}.page" for rank in range(GPUS)]
    reporters = [Reporter(page, rank=rank, gpu=rank, job="4242", run="train") for rank, page in enumerate(pages)]
    for reporter in reporters:
        reporter.model(flops_per_token=18e9, peak_flops=989e12)
        reporter.step(tokens=4096, loss=2.0, grad_norm=1.0, learning_rate=1e-3)
        reporter.checkpoint_committed(0)
    return reporters


@pytest.fixture(scope="module")
def scrape(tmp_path_factory: pytest.TempPathFactory, library: str) -> Iterator[str]:
    """One scrape, in Prometheus' own format, of an agent that has looked several times."""
    folder = tmp_path_factory.mktemp("node")
    Port(folder / "infiniband/mlx5_0")
    reporters = start_run(folder / "shm" / "train")
    with SimulatedGpus.create(folder / "gpus.state", count=GPUS) as gpus:
        gpus[0].set_processes([(os.getpid(), 1 << 30)])
        gpus[1].partition(["1g.10gb"])
        opsd = Opsd(folder, library, gpus)
        options = [
            f"--set=infiniband.root={folder / 'infiniband'}",
            '--set=infiniband.expect=["mlx5_0"]',
            "--set=agent.interval_s=0.2",
        ]
        with opsd.agent(*options):
            assert eventually(lambda: "\nopsd_agent_ticks_total 5" in (opsd.get("/metrics") or ""))
            yield opsd.get("/metrics") or ""
    assert reporters


def test_every_series_is_in_the_catalogue(scrape: str) -> None:
    """With the labels that `opsd metrics --list` names, and there is nothing else."""
    known = {metric.name: set(metric.labels) for _, metric in catalogue()}
    seen = {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(scrape)
        for sample in family.samples
    }
    assert {name: labels for name, labels in seen.items() if known.get(name) != labels} == {}


@pytest.mark.parametrize("source", ["agent", "nvml", "host", "infiniband", "ranks"])
def test_every_metric_is_there_from_the_start(scrape: str, source: str) -> None:
    """Counters too, at 0: one that appears with its first event makes increase() blind for that event."""
    seen = {sample.name for family in text_string_to_metric_families(scrape) for sample in family.samples}
    orphans = {"opsd_gpu_orphan_processes", "opsd_gpu_orphan_memory_bytes"}
    missing = {metric.name for name, metric in catalogue() if source in name.split(", ")} - seen
    assert {
        name
        for name in missing - ELSEWHERE - orphans
        if not name.startswith((*OF_THE_KERNEL, *OF_INCIDENTS, *OF_SOME_RUNS))
    } == set()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian package prometheus) is not installed")
def test_promtool_finds_nothing_wrong(scrape: str) -> None:
    """But for dcgm-exporter's label names and one of its metrics' names, which are what they are."""
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=scrape, capture_output=True, text=True, check=False
    )
    said = (checked.stdout + checked.stderr).splitlines()
    theirs = (
        "label names should be written in 'snake_case' not 'camelCase'",
        "metric name should not include type 'counter'",
    )
    assert [line for line in said if not (line.startswith("DCGM_FI_") and line.endswith(theirs))] == []
