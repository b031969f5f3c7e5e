"""The trainer as a Slurm job of an ordinary user on the test cluster, by the templates of deploy/slurm."""

from __future__ import annotations

import compileall
import json
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opsd.demo.scene import copy_text
from tests.fakes.tree import ROOT
from tests.integration.slurm.cluster import Cluster, wait_until
from tests.integration.slurm.templates import USER, adapted

OPSD = """#!/bin/sh
[ ! -e /run/opsd.toml ] || export OPSD_CONFIG=/run/opsd.toml
export PYTHONPATH={packages} {exports}
exec {python} -m opsd "$@"
"""
"""opsd as it is installed on each node, with the settings of that node and what its environment is."""


def install(folder: Path) -> Path:
    """Put what the wheel holds where pip would, compiled; returns the folder of packages.

    An editable install is not what a user has: standbys import the modules of installed packages only.
    """
    packages = folder / "site-packages"
    if not packages.exists():
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())
        for name in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
            shutil.copytree(ROOT / name, packages / name, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(packages, quiet=1)
    return packages


def make_data(folder: Path, text_bytes: int = 1_000_000) -> Path:
    """Token shards of Python's own sources, which all nodes can read."""
    copy_text(folder / "text", text_bytes)
    made = subprocess.run(
        [sys.executable, "-m", "opsd.trainer.data", str(folder / "text"), "--out", str(folder / "data")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if made.returncode:
        raise RuntimeError(f"the shards could not be made: {made.stderr}")
    return folder / "data"


@dataclass
class Training:
    """One run of the tiny model over ``active`` nodes, one rank on each, and so many ``spares``.

    ``flags`` are for the launcher, ``settings`` for the trainer, ``options`` for sbatch.
    """

    cluster: Cluster
    data: Path
    name: str
    active: int = 3
    spares: int = 1
    steps: int = 200
    flags: Sequence[str] = ()
    settings: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    options: Sequence[str] = ()
    pool: str = ""
    """A partition from which spares are fetched."""

    @property
    def folder(self) -> Path:
        """Where everything of the run is, seen by all hosts."""
        return self.cluster.shared / self.name

    @property
    def leader(self) -> str:
        """The node of the leader."""
        return str(self.events("generation_started")[-1]["node"])

    def ask(self, host: str, **request: str) -> dict[str, Any]:
        """The answer of the launcher on ``host`` on its control socket."""
        program = (
            "import json, sys; from pathlib import Path; from opsd.control import ask_launcher; "
            "print(json.dumps(ask_launcher(Path(sys.argv[1]), json.loads(sys.argv[2]), timeout_s=10.0)))"
        )
        socket = f"/dev/shm/opsd/{self.name}/control.sock"
        done = self.cluster.nodes[host].run(sys.executable, "-c", program, socket, json.dumps(request))
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def submit(self) -> int:
        """Submit the job; returns its number."""
        self.folder.mkdir(exist_ok=True)
        self.folder.chmod(0o777)
        if not (self.folder / "run").is_symlink():
            (self.folder / "run").symlink_to(self.name)
        (self.folder / "job.sbatch").write_text(self.script(self.program))
        given = [*self.options, "--parsable", str(self.folder / "job.sbatch")]
        return int(self.cluster.controller.run("sbatch", *given, user=USER).stdout.strip())

    @property
    def program(self) -> list[str]:
        """What the ranks run."""
        values = {
            "data.shards": self.data,
            "data.batch": 2 * self.active,
            "run.steps": self.steps,
            "schedule.decay_start": self.steps * 4 // 5,
            "schedule.decay_end": self.steps,
            "checkpoint.every": 20,
        } | dict(self.settings)
        return ["-m", "opsd.trainer", "tiny", *(f"--set={key}={value}" for key, value in values.items())]

    @property
    def nodes(self) -> str:
        """How many the job asks for."""
        return str(self.active + self.spares)

    def script(self, program: Sequence[str]) -> str:
        """The batch script that has ``program`` run on all nodes of the job: a template, as a user adapts it."""
        opsd = self.folder / "opsd"
        opsd.write_text(OPSD.format(exports=self.exports, python=sys.executable, packages=install(self.cluster.shared)))
        opsd.chmod(0o755)
        template, more = "train-requeue.sbatch", dict[str, str]()
        if self.pool:
            template, more = "train-pool.sbatch", {"POOL": self.pool}
        elif self.spares:
            template, more = "train-spares.sbatch", {"NODES": str(self.active), "SPARES": str(self.spares)}
        return adapted(
            template, job_name=self.name, nodes=self.nodes, gpus_per_node="", time="",
            output=str(self.folder / "job.out"), RANKS="1", RUNS=str(self.folder), OPSD=str(opsd),
            PROGRAM=f"({shlex.join([*self.flags, *program])})", **more,
        )  # fmt: skip

    @property
    def exports(self) -> str:
        """What the environment of the launchers has to have, for the shell's export."""
        usual = {"OMP_NUM_THREADS": 1, "GLOO_SOCKET_IFNAME": "eth0", "HOME": self.folder, "PYTHONUNBUFFERED": 1}
        return " ".join(f"{key}={value}" for key, value in {**usual, **self.environment}.items())

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """What has happened, all or of one kind."""
        try:
            lines = (self.folder / "run/events.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        records = (json.loads(line) for line in lines if line.endswith("}"))
        return [record for record in records if kind in (None, record["event"])]

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, in the order of writing."""
        try:
            lines = (self.folder / "run/metrics.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def losses(self) -> dict[int, float]:
        """The loss of each step; the last word counts."""
        return {line["step"]: line["loss"] for line in self.metrics()}

    @property
    def step(self) -> int:
        """The highest step so far, 0 before the first."""
        return max((line["step"] for line in self.metrics()), default=0)

    def until(self, condition: Callable[[], object], what: str, timeout_s: float = 120.0) -> None:
        """Wait for something in the run."""
        try:
            wait_until(condition, what, timeout_s)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; {self.report()}") from error

    def until_steady(self) -> None:
        """Wait until ranks make steps, a checkpoint is durable and the spares are known to stand by."""
        self.until(lambda: self.events("checkpoint_committed"), "a checkpoint")
        self.until(lambda: self.standing_by() == self.spares, "the spares")

    def standing_by(self) -> int:
        """How many launchers are members without ranks."""
        plans = sorted((self.folder / "run/generations").glob("*.json"))
        started = self.events("generation_started")
        joined = {event["joined"] for event in self.events("launcher_joined")}
        known = set(started[-1]["spares"]) if started else set()
        return len(known | (joined - set(started[-1]["nodes"]))) if started and plans else 0

    @property
    def places(self) -> list[str]:
        """The nodes that run ranks, by node rank."""
        nodes: list[str] = self.events("generation_started")[-1]["nodes"]
        return nodes

    def finish(self, timeout_s: float = 240.0) -> int:
        """Wait for the end; returns the launchers' exit code."""
        self.until(lambda: self.events("finished"), "the end of the run", timeout_s)
        return int(self.events("finished")[-1]["exit_code"])

    def gap_s(self, generation: int) -> float:
        """Seconds between the last step before ``generation`` and its first one."""
        lines = self.metrics()
        before = max(float(line["t"]) for line in lines if line["generation"] < generation)
        return min(float(line["t"]) for line in lines if line["generation"] == generation) - before

    def lost_steps(self, generation: int) -> int:
        """How many steps ``generation`` had to do again."""
        lines = self.metrics()
        before = max(int(line["step"]) for line in lines if line["generation"] < generation)
        return before + 1 - min(int(line["step"]) for line in lines if line["generation"] == generation)

    def report(self) -> str:
        """What the job and its launchers have said, for a test that fails."""
        logs = [*sorted(self.folder.glob("*.log")), self.folder / "job.out"]
        texts = [f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in logs if log.exists()]
        return "\n".join([*map(json.dumps, self.events()[-12:]), *texts])
