"""A simulated GPU node: simulated GPUs, an RDMA port, and a run whose ranks only write their rank pages."""

from __future__ import annotations

import json
import os
import pwd
import random
import sys
import threading
import time
from pathlib import Path

from opsd.client import Reporter, process_start
from opsd.simulated.gpus import STATE_ENV, SimulatedGpus, build
from opsd.stack.ports import Port

GPUS = 8
NODE, JOB, RUN = "node-17", "4242", "train"
LOAD_WATTS = 640.0
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
    """The files that the agent reads, in ``folder``. Raises NoCompilerError if GPUs cannot be simulated."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._library = build(folder)
        self.gpus = SimulatedGpus.create(folder / "gpus.state", count=GPUS)
        self._port = Port(folder / "infiniband" / "mlx5_0")
        self._slurm = write_slurm_commands(folder / "slurm", NODE, JOB)
        self._stop = threading.Event()
        for gpu in self.gpus:
            gpu.thermal_tau_s = 2.0
            gpu.load(utilization=98, power_watts=LOAD_WATTS, memory_ratio=0.8)
            gpu.nvlink_bytes_per_second = 200e9
        self._ranks = self._begin_run(folder / "shm" / RUN)
        self._thread = threading.Thread(target=self._train, name="ranks", daemon=True)
        self._thread.start()

    def configuration(self, port: int) -> Path:
        """The agent's configuration file; it listens on ``port`` of the loopback address."""
        file = self.folder / "opsd.toml"
        file.write_text(
            f'[agent]\nlisten = "127.0.0.1:{port}"\nnode = "{NODE}"\njob_label = true\nrun_seconds = true\n'
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

    def close(self) -> None:
        """End the run."""
        self._stop.set()
        self._thread.join()
        self.gpus.close()

    def _begin_run(self, folder: Path) -> list[Reporter]:
        folder.mkdir(parents=True)
        run = {
            "job": JOB, "node": NODE, "state": "running", "generation": 1, "launcher_pid": os.getpid(),
            "launcher_start": process_start(os.getpid()), "world_size": GPUS, "control": "", "folder": str(folder),
        }  # fmt: skip
        (folder / "run.json").write_text(json.dumps(run))
        self._events, self._metrics = folder / "events.jsonl", folder / "metrics.jsonl"
        _append(self._events, event="generation_started", generation=1, world_size=GPUS, standby=0, ranks=[])
        pages = [folder / f"rank-{rank:04d}.page" for rank in range(GPUS)]
        reporters = [Reporter(page, rank=rank, gpu=rank, job=JOB, run=RUN) for rank, page in enumerate(pages)]
        for reporter in reporters:
            reporter.model(MODEL_FLOPS, PEAK_FLOPS)
        return reporters

    def _train(self) -> None:
        """All ranks in lockstep, with the loss of a healthy run."""
        step, noise = 0, random.Random(0)
        while not self._stop.is_set():
            for phase, share in (("data", 0.05), ("forward", 0.3), ("backward", 0.45), ("collective", 0.15)):
                phases = [rank.phase(phase) for rank in self._ranks]
                for entered in phases:
                    entered.__enter__()
                self._stop.wait(STEP_S * share)
                for entered in phases:
                    entered.__exit__(None, None, None)
            curve = 2.0 + 8.0 / (1 + step / 20)
            _append(self._metrics, step=step, generation=1, step_s=STEP_S, data_s=STEP_S * 0.05)
            if step % CHECKPOINT_STEPS == 0:
                self._evaluate(step, curve)
                self._tell_data(step)
            for rank in self._ranks:
                loss = curve + noise.gauss(0, 0.01)
                rank.step(tokens=TOKENS // GPUS, loss=loss, grad_norm=1.0 + noise.gauss(0, 0.02), learning_rate=3e-4)
                if step % CHECKPOINT_STEPS == 0:
                    rank.checkpoint_committed(step)
            self._port.carry(1 << 30)
            step += 1

    def _evaluate(self, step: int, loss: float) -> None:
        """Evaluation results equal to the reference's."""
        results = {"loss": round(loss + 0.05, 4), "cloze_accuracy": round(1 / loss, 4)}
        reference = {name: round(value * 1.005, 4) for name, value in results.items()}
        tokens = step * TOKENS
        _append(
            self._events,
            event="evaluation",
            generation=1,
            step=step,
            tokens=tokens,
            results=results,
            reference=reference,
        )

    def _tell_data(self, step: int) -> None:
        """Two weighted sources; the smaller is soon exhausted."""
        drawn = {source: round(step * TOKENS * weight) for source, weight in MIXTURE.items()}
        passes = {source: tokens / SOURCE_TOKENS for source, tokens in drawn.items()}
        _append(self._events, event="data_mixture", generation=1, step=step, tokens=drawn, epochs=passes)


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
        "JobID": job, "State": "RUNNING", "Reason": "None", "UserName": pwd.getpwuid(os.getuid()).pw_name,
        "Partition": "gpu", "NodeList": node, "BatchHost": node, "RestartCnt": "0", "Name": "train",
    }  # fmt: skip
    values = {"sinfo": {**of_node, "Reason": "none", "Comment": ""}, "squeue": {**of_job, **times, "Comment": ""}}
    folder.mkdir()
    for name in ("sinfo", "squeue", "scontrol"):
        command = folder / name
        command.write_text(_COMMAND.format(python=os.path.realpath(sys.executable), values=values))
        command.chmod(0o755)
    return folder
