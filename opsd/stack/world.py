"""Prometheus and Alertmanager around agents on simulated nodes.

A simulated GPU node: simulated GPUs, an RDMA port, and a run whose ranks only write their rank pages.
"""

from __future__ import annotations

import json
import os
import pwd
import random
import re
import shutil
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import yaml

from opsd.client import Reporter, process_start
from opsd.dashboards.alerts import linked
from opsd.dependents import Dependents
from opsd.ports import free_port
from opsd.preflight.inbox import Inbox
from opsd.simulated.gpus import STATE_ENV, SimulatedGpus, build

GPUS = 8
NODE, JOB, RUN = "node-17", "4242", "train"
LOAD_WATTS, IDLE_WATTS = 640.0, 90.0
TENSOR_SHARE, RANK_BYTES = 0.49, 60 << 30
STEP_S = 0.5
CHECKPOINT_STEPS = 40
TOKENS = 65_536
MIXTURE, SOURCE_TOKENS = {"web": 0.85, "code": 0.15}, 1 << 24
MODEL_FLOPS, PEAK_FLOPS = 19.2e9, 989e12
"""FLOPs per token of a 3 B model, and per second of an H100 in bf16."""

_COMMAND = """#!{python} -ISu
import sys
name, arguments = sys.argv[0].rpartition("/")[2], sys.argv[1:]
values = {values!r}
if arguments == ["--version"]:
    print("slurm 24.11.5")
elif "--Format" in arguments:
    fields = arguments[arguments.index("--Format") + 1].split(",")
    wanted = (field.partition(":") for field in fields)
    print("".join(values[name][field] + separator for field, _, separator in wanted))
"""


class StackNode:
    """The files that the agent reads, in ``folder``. Raises NoCompilerError if GPUs cannot be simulated.

    The node has the ranks ``first_rank`` and up of ``world_size``, or no run if ``run`` is "". ``leader`` is the node
    with rank 0, if it is another one.
    """

    def __init__(
        self, folder: Path, *, name: str = NODE, job: str = JOB, run: str = RUN, first_rank: int = 0,
        world_size: int = GPUS, leader: StackNode | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.name = folder, name
        self._job, self._run, self._first_rank, self._world_size = job, run, first_rank, world_size
        self._library = build(folder)
        self.gpus = SimulatedGpus.create(folder / "gpus.state", count=GPUS)
        self._port = Port(folder / "infiniband" / "mlx5_0")
        self._slurm = write_slurm_commands(folder / "slurm", name, job)
        self._stop, self._restart = threading.Event(), threading.Event()
        self._down_s = 0.0
        self._thread = threading.Thread(target=self._train, name="ranks", daemon=True)
        if not run:
            return
        for gpu in self.gpus:
            gpu.thermal_tau_s = 2.0
            gpu.nvlink_bytes_per_second = 200e9
        self._shm = folder / "shm" / run
        self._shm.mkdir(parents=True)
        self._leads = leader is None
        self.run_folder: Path = self._shm if leader is None else leader.run_folder
        self._events, self._metrics = self.run_folder / "events.jsonl", self.run_folder / "metrics.jsonl"
        self._begin_generation(1)
        self._thread.start()

    def configuration(self, port: int) -> Path:
        """The agent's configuration file; it listens on ``port`` of the loopback address."""
        file = self.folder / "opsd.toml"
        file.write_text(
            f'[agent]\nlisten = "127.0.0.1:{port}"\nnode = "{self.name}"\njob_label = true\nrun_seconds = true\n'
            f'[nvml]\nlibrary = "{self._library}"\n'
            f'[infiniband]\nroot = "{self.folder / "infiniband"}"\n'
        )
        return file

    def environment(self) -> dict[str, str]:
        """Environment variables with which an agent sees this node."""
        return {
            **os.environ,
            STATE_ENV: str(self.gpus.path),
            "OPSD_STATE_DIR": str(self.folder / "state"),
            "OPSD_SHM": str(self.folder / "shm"),
            "PATH": f"{self._slurm}:{os.environ['PATH']}",
        }

    def overheat(self, gpu: int) -> None:
        """Make the cooling of a GPU fail: it is throttled within seconds."""
        self.gpus[gpu].cooling = 0.45

    def restart(self, down_s: float) -> None:
        """Let the first rank of the node die; the run goes on from its newest checkpoint after ``down_s`` seconds."""
        self._down_s = down_s
        self._restart.set()

    def close(self) -> None:
        """End the run."""
        self._stop.set()
        if self._run:
            self._thread.join()
        self.gpus.close()

    def _write_run(self, state: str, generation: int) -> None:
        """run.json, as the launcher of the run writes it."""
        run = {
            "job": self._job, "node": self.name, "state": state, "generation": generation, "launcher_pid": os.getpid(),
            "launcher_start": process_start(os.getpid()), "world_size": self._world_size, "control": "",
            "folder": str(self.run_folder),
        }  # fmt: skip
        draft = self._shm / ".run.json"
        draft.write_text(json.dumps(run))
        draft.rename(self._shm / "run.json")

    def _begin_generation(self, number: int) -> None:
        """Ranks with new pages."""
        self._write_run("running", number)
        if self._leads:
            said = {"world_size": self._world_size, "standby": 0, "ranks": []}
            _append(self._events, event="generation_started", generation=number, **said)
        self._generation = number
        for gpu in self.gpus:  # no two boards draw the same
            gpu.load(utilization=98, power_watts=LOAD_WATTS + 6 * (gpu.index % 4), memory_ratio=0.8)
            gpu.set_processes([(os.getpid(), RANK_BYTES)])
        self._ranks = [
            Reporter(
                self._shm / f"rank-{rank:04d}.page", rank=rank, local_rank=gpu, world_size=self._world_size, gpu=gpu,
                generation=number, node=self.name, job=self._job, run=self._run,
            )
            for gpu, rank in enumerate(range(self._first_rank, self._first_rank + GPUS))
        ]  # fmt: skip
        for reporter in self._ranks:
            reporter.model(MODEL_FLOPS, PEAK_FLOPS)

    def _train(self) -> None:
        """All ranks in lockstep, with the loss of a healthy run."""
        step, noise = 0, random.Random(0)
        while not self._stop.is_set():
            if self._restart.is_set():
                self._restart.clear()
                self._end_generation(step)
                step -= step % CHECKPOINT_STEPS
                self._begin_generation(self._generation + 1)
            self._step(step, noise)
            step += 1

    def _end_generation(self, step: int) -> None:
        """The first rank of the node dies at ``step``; the launcher restarts all."""
        if self._leads:
            _append(
                self._events, event="rank_exited", generation=self._generation, rank=self._first_rank,
                pid=os.getpid(), exit="signal SIGKILL", step=step, phase="forward", culprit=True, error=None,
                log_tail=[], last_step_t=round(time.time(), 4), noticed_s=0.0,
            )  # fmt: skip
        self._write_run("restarting", self._generation)
        for gpu in self.gpus:
            gpu.load(utilization=0, power_watts=IDLE_WATTS, memory_ratio=0.0)
            gpu.set_processes([])
        self._stop.wait(self._down_s)

    def _step(self, step: int, noise: random.Random) -> None:
        for phase, share in (("data", 0.05), ("forward", 0.3), ("backward", 0.45), ("collective", 0.15)):
            phases = [rank.phase(phase) for rank in self._ranks]
            for entered in phases:
                entered.__enter__()
            self._stop.wait(STEP_S * share)
            for entered in phases:
                entered.__exit__(None, None, None)
        curve = 2.0 + 8.0 / (1 + step / 20)
        if self._leads:
            _append(
                self._metrics, step=step, generation=self._generation, step_s=STEP_S, data_s=STEP_S * 0.05,
                loss=curve, tokens=TOKENS * self._world_size // GPUS,
            )  # fmt: skip
        if step % CHECKPOINT_STEPS == 0 and self._leads:
            self._evaluate(step, curve)
            self._tell_data(step)
        for rank in self._ranks:
            loss = curve + noise.gauss(0, 0.01)
            rank.step(
                step=step, tokens=TOKENS // GPUS, loss=loss, grad_norm=1.0 + noise.gauss(0, 0.02), learning_rate=3e-4
            )
            if step % CHECKPOINT_STEPS == 0:
                rank.checkpoint_committed(step)
        for gpu in self.gpus:
            gpu.tensor_share = TENSOR_SHARE + noise.gauss(0, 0.01)
        self._port.carry(1 << 30)

    def _evaluate(self, step: int, loss: float) -> None:
        """Evaluation results equal to the reference's."""
        results = {"loss": round(loss + 0.05, 4), "cloze_accuracy": round(1 / loss, 4)}
        reference = {name: round(value * 1.005, 4) for name, value in results.items()}
        tokens = step * TOKENS
        _append(
            self._events,
            event="evaluation",
            generation=self._generation,
            step=step,
            tokens=tokens,
            results=results,
            reference=reference,
        )

    def _tell_data(self, step: int) -> None:
        """Two weighted sources; the smaller is soon exhausted."""
        drawn = {source: round(step * TOKENS * weight) for source, weight in MIXTURE.items()}
        passes = {source: tokens / SOURCE_TOKENS for source, tokens in drawn.items()}
        _append(self._events, event="data_mixture", generation=self._generation, step=step, tokens=drawn, epochs=passes)


def _append(file: Path, **line: object) -> None:
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps({"t": time.time(), **line}) + "\n")


def write_slurm_commands(folder: Path, node: str, job: str) -> Path:
    """Write sinfo, squeue and scontrol to ``folder``, which is returned: one node with one job of this user.

    An agent believes no rank page about its job.
    """
    times = dict.fromkeys(("SubmitTime", "StartTime", "EndTime"), "N/A")
    of_node = {"NodeList": node, "StateComplete": "allocated", "Timestamp": "Unknown", "User": "Unknown"}
    of_job = {
        "JobID": job, "JobArrayID": job, "State": "RUNNING", "Reason": "None", "Partition": "gpu", "NodeList": node,
        "UserName": pwd.getpwuid(os.getuid()).pw_name, "BatchHost": node, "RestartCnt": "0", "Name": "train",
    }  # fmt: skip
    values = {"sinfo": {**of_node, "Reason": "none", "Comment": ""}, "squeue": {**of_job, **times, "Comment": ""}}
    folder.mkdir()
    for name in ("sinfo", "squeue", "scontrol"):
        command = folder / name
        command.write_text(_COMMAND.format(python=os.path.realpath(sys.executable), values=values))
        command.chmod(0o755)
    return folder


_STATE: Final = {
    "link_layer": "InfiniBand",
    "state": "4: ACTIVE",
    "phys_state": "5: LinkUp",
    "rate": "400 Gb/sec (4X NDR)",
}
_COUNTERS: Final = (
    "VL15_dropped", "excessive_buffer_overrun_errors", "link_downed", "link_error_recovery",
    "local_link_integrity_errors", "multicast_rcv_packets", "multicast_xmit_packets", "port_rcv_constraint_errors",
    "port_rcv_data", "port_rcv_errors", "port_rcv_packets", "port_rcv_remote_physical_errors",
    "port_rcv_switch_relay_errors", "port_xmit_constraint_errors", "port_xmit_data", "port_xmit_discards",
    "port_xmit_packets", "port_xmit_wait", "symbol_error", "unicast_rcv_packets", "unicast_xmit_packets",
)  # fmt: skip
_HW_COUNTERS: Final = (
    "duplicate_request", "implied_nak_seq_err", "lifespan", "local_ack_timeout_err", "np_cnp_sent",
    "np_ecn_marked_roce_packets", "out_of_buffer", "out_of_sequence", "packet_seq_err", "req_cqe_error",
    "req_cqe_flush_error", "req_remote_access_errors", "req_remote_invalid_request", "resp_cqe_error",
    "resp_cqe_flush_error", "resp_local_length_error", "resp_remote_access_errors", "rnr_nak_retry_err",
    "roce_adp_retrans", "roce_adp_retrans_to", "roce_slow_restart", "roce_slow_restart_cnps",
    "roce_slow_restart_trans", "rp_cnp_handled", "rp_cnp_ignored", "rx_atomic_requests", "rx_icrc_encapsulated",
    "rx_read_requests", "rx_write_requests",
)  # fmt: skip


class Port:
    """Port 1 of a ConnectX-7: a folder with the files of its driver. ``device`` must not exist yet."""

    def __init__(self, device: Path) -> None:
        self._folder = device / "ports" / "1"
        self._words = 0
        counters = [f"counters/{name}" for name in _COUNTERS] + [f"hw_counters/{name}" for name in _HW_COUNTERS]
        for group in ("counters", "hw_counters"):
            (self._folder / group).mkdir(parents=True)
        for name, text in (_STATE | dict.fromkeys(counters, "0")).items():
            (self._folder / name).write_text(f"{text}\n")

    def carry(self, data: int) -> None:
        """Count ``data`` bytes sent and received, in words of four bytes like the hardware."""
        self._words += data // 4
        for name in ("port_xmit_data", "port_rcv_data"):
            (self._folder / "counters" / name).write_text(f"{self._words}\n")


# Prometheus, Alertmanager and an agent as processes on loopback ports, with the shipped configuration.


DEPLOY = Path(__file__).parents[2] / "deploy"
PROGRAMS = ("prometheus", "prometheus-alertmanager")
START_S = 30.0


class StackError(Exception):
    """The stack could not be started; the message says what is missing or which log to read."""


class Stack:
    """The stack, with its files in ``folder``. Raises StackError.

    ``scrape_s`` is the scrape interval in seconds, ``rules_s`` overrides the evaluation interval of the rules.
    ``node_exporters`` are further addresses to scrape. ``nodes`` are closed with the stack; without any there is one,
    whose instance is its address instead of its name. ``silent`` are names of nodes that do not answer. A ``temporary``
    folder is removed with the stack, however that ends.
    """

    def __init__(
        self, folder: Path, *, scrape_s: float = 15.0, rules_s: float | None = None,
        node_exporters: Sequence[str] = (), nodes: Sequence[StackNode] = (), silent: Sequence[str] = (),
        temporary: bool = False,
    ) -> None:  # fmt: skip
        if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
            raise StackError(f"{' and '.join(missing)} missing; install the Debian packages of the same name")
        if not (DEPLOY / "alertmanager").is_dir():
            raise StackError(f"{DEPLOY} is missing; the stack is started from a checkout")
        self.folder, self._scrape_s, self._rules_s = folder, scrape_s, rules_s
        self._node_exporters, self._silent, self._named = node_exporters, silent, bool(nodes)
        self._dependents = Dependents()
        if temporary:
            self._dependents.folder(folder)
        self._nodes = nodes or (StackNode(folder),)
        prometheus, alertmanager, self._nowhere, *agents = (free_port() for _ in range(3 + len(self._nodes)))
        self.prometheus, self.alertmanager, self.agent = (
            f"http://127.0.0.1:{port}" for port in (prometheus, alertmanager, agents[0])
        )
        self.inbox = Inbox()
        self.node = self._nodes[0]
        try:
            self._start(agents, prometheus, alertmanager)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that Prometheus returns now. Raises ValueError for an invalid expression."""
        asked = urllib.parse.urlencode({"query": expression})
        try:
            answer = get(f"{self.prometheus}/api/v1/query?{asked}")
        except urllib.error.HTTPError as error:
            raise ValueError(f"{expression}: {error.read().decode()}") from error
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def close(self) -> None:
        """End everything."""
        self._dependents.close()
        for node in self._nodes:
            node.close()
        self.inbox.close()

    def _start(self, agents: Sequence[int], prometheus: int, alertmanager: int) -> None:
        for node, port in zip(self._nodes, agents, strict=True):
            command = [sys.executable, "-m", "opsd", "agent", "--config", str(node.configuration(port))]
            self._run("agent" if node is self.node else node.name, command, node.environment())
        self._run(
            "alertmanager",
            [
                "prometheus-alertmanager", f"--config.file={self._alertmanager_file()}",
                f"--storage.path={self.folder}/alertmanager", f"--web.listen-address=127.0.0.1:{alertmanager}",
                "--cluster.listen-address=",
            ],
        )  # fmt: skip
        self._run(
            "prometheus",
            [
                "prometheus", f"--config.file={self._prometheus_file(agents, alertmanager)}",
                f"--storage.tsdb.path={self.folder}/prometheus", f"--web.listen-address=127.0.0.1:{prometheus}",
            ],
        )  # fmt: skip
        for name, url in (
            ("agent", f"{self.agent}/readyz"),
            ("alertmanager", f"{self.alertmanager}/-/ready"),
            ("prometheus", f"{self.prometheus}/-/ready"),
        ):
            if not eventually(lambda url=url: _answers(url), START_S):  # type: ignore[misc]
                raise StackError(f"{name} does not answer; see {self.folder}/{name}.log")

    def _run(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self._dependents.start(command, log, environment)

    def _targets(self, agents: Sequence[int]) -> Iterator[Mapping[str, object]]:
        names = [*(node.name for node in self._nodes), *self._silent]
        for name, port in zip(names, [*agents, *(self._nowhere for _ in self._silent)], strict=True):
            labels = {"cluster": "demo", **({"instance": f"{name}:9477"} if self._named else {})}
            yield {"targets": [f"127.0.0.1:{port}"], "labels": labels}

    def _prometheus_file(self, agents: Sequence[int], alertmanager: int) -> Path:
        """The shipped configuration, with targets and rules in the folder of the stack."""
        rules = self.folder / "rules"
        rules.mkdir()
        for name, text in linked().items():
            (rules / name).write_text(
                text if self._rules_s is None else re.sub(r"interval: \w+", f"interval: {self._rules_s:g}s", text)
            )
        (self.folder / "opsd-targets.json").write_text(json.dumps([*self._targets(agents)]))
        config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
        config["global"].update(scrape_interval=f"{self._scrape_s:g}s", scrape_timeout=f"{min(5.0, self._scrape_s):g}s")
        config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{alertmanager}"]
        config["scrape_configs"] = [job for job in config["scrape_configs"] if job["job_name"] == "opsd"]
        if self._node_exporters:
            static = [{"targets": [*self._node_exporters], "labels": {"cluster": "demo"}}]
            config["scrape_configs"].append({"job_name": "node", "static_configs": static})
        file = self.folder / "prometheus.yml"
        file.write_text(yaml.safe_dump(config))
        return file

    def _alertmanager_file(self) -> Path:
        """The shipped configuration, with every receiver's address replaced by that of the inbox."""
        text = (DEPLOY / "alertmanager" / "alertmanager.yml").read_text(encoding="utf-8")
        secrets = self.folder / "secrets"
        secrets.mkdir()
        (secrets / "slack-webhook").write_text(f"{self.inbox.url}/slack")
        (secrets / "pagerduty-key").write_text("0" * 32)
        config = yaml.safe_load(text.replace("/etc/prometheus/secrets", str(secrets)))
        config["global"]["pagerduty_url"] = f"{self.inbox.url}/pagerduty"
        config["templates"] = [str(DEPLOY / "alertmanager" / "templates" / "*.tmpl")]
        for receiver in config["receivers"]:
            for webhook in receiver.get("webhook_configs", ()):
                webhook["url"] = f"{self.inbox.url}/webhook"
        file = self.folder / "alertmanager.yml"
        file.write_text(yaml.safe_dump(config))
        return file


def get(url: str) -> Any:
    """The JSON at ``url``."""
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310
        return json.load(answer)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):  # noqa: S310
            return True
    except OSError:
        return False


def eventually(condition: Callable[[], bool], within_s: float) -> bool:
    """True once ``condition`` is, False after the time limit."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
