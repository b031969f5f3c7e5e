"""The same losses under what people use today: torchrun, NVIDIA's ft_launcher, and sbatch --requeue alone.

Each launcher gets one agent more than the run needs, rendezvous on the job's first node, and no other help.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import pairwise

from tests.integration.slurm.cluster import FAST, Cluster
from tests.integration.slurm.cold import ACTIVE, SETTLED_STEP, STEPS
from tests.integration.slurm.training import Training, make_data
from tests.integration.slurm.trials import Scenario, Trial, failure

LIMIT_S = 150.0
"""Without a new step for so long a run is given up; torch's stores wait 60 s."""
REQUEUE_LIMIT_S = 240.0
STALL_S = 0.5
PORT = 29_400
RANK = r"^[^ ]*python[0-9.]* -u -m opsd.trainer"
SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name} --nodes={nodes} --ntasks-per-node=1 --open-mode=append --output={folder}/job.out
export {exports} OPSD_RUN_DIR={folder}/run
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
for node in "${{nodes[@]}}"; do
    srun --no-kill --wait=0 --kill-on-bad-exit=0 --nodes=1 --ntasks=1 --nodelist="$node" \\
        --output={folder}/launcher-"$node".log --open-mode=append \\
        {python} -m {launcher} --nnodes={active} --nproc-per-node=1 --rdzv-backend=c10d --rdzv-id={name} \\
        --rdzv-endpoint="${{nodes[0]}}:{port}" --monitor-interval=0.1 --max-restarts=9 {flags} {program} &
done
wait
"""


class PeerTraining(Training):
    """The trainer under ``launcher``, a module; with ``--no-kill`` or ``--requeue`` among the ``options``."""

    launcher = "torch.distributed.run"

    def script(self, program: Sequence[str]) -> str:
        """See ``Training.script``."""
        return SCRIPT.format(
            name=self.name,
            nodes=self.active + self.spares,
            folder=self.folder,
            exports=self.exports,
            python=sys.executable,
            launcher=self.launcher,
            active=self.active,
            port=PORT,
            flags=" ".join(self.flags),
            program=" ".join(program),
        )

    @property
    def places(self) -> list[str]:
        """The nodes with a rank, in the order of their names; the first is where the agents meet."""
        living = (host for host in self.cluster.nodes.values() if host.on)
        return [host.name for host in living if not host.run("pgrep", "-f", RANK, check=False).returncode]

    def ended(self, job: int) -> bool:
        """True once Slurm no longer runs the job."""
        return not self.cluster.controller.run("squeue", "-h", f"--jobs={job}", check=False).stdout.strip()


class NvidiaTraining(PeerTraining):
    """The same under nvidia-resiliency-ext."""

    launcher = "nvidia_resiliency_ext.fault_tolerance.launcher"


def _trial(training: PeerTraining, victim: int, limit_s: float) -> Trial:
    job = training.submit()
    try:
        training.until(lambda: training.step >= SETTLED_STEP, "the first steps")
        before = len(training.metrics())
        training.until(lambda: len(training.metrics()) >= before + 5, "steps")
        training.cluster.nodes[training.places[victim]].power_off()
        lines = len(training.metrics())
        training.until(
            lambda: _stall(training, lines) is not None or training.ended(job), "steps after the loss", limit_s
        )
        stall = _stall(training, lines)
        return stall if stall is not None else Trial(0.0, 0, "the job has ended")
    except (TimeoutError, RuntimeError, IndexError) as error:
        return failure(error)


def _stall(training: Training, lines: int) -> Trial | None:
    """The first pause between two steps that is longer than any between two steps of a run, from line ``lines`` on."""
    found = training.metrics()[max(0, lines - 2) :]
    for before, after in pairwise(found):
        if after["t"] - before["t"] - after["step_s"] > STALL_S or after["step"] <= before["step"]:
            return Trial(after["t"] - before["t"], before["step"] + 1 - after["step"])
    return None


def redundant(kind: type[PeerTraining], victim: int, trials: int, note: Callable[[Trial], None]) -> None:
    """A node with a rank loses power, and one agent more than needed is there."""
    flags = ["--ignore-missing-fault-tol-cfg"] if kind is NvidiaTraining else []
    with Cluster([f"n{number}" for number in range(1, ACTIVE + 2)]) as cluster:
        data = make_data(cluster.shared)
        for number in range(trials):
            training = kind(cluster, data, f"peer-{number}", ACTIVE, 1, STEPS, flags=flags, options=["--no-kill"])
            note(_trial(training, victim, LIMIT_S))
            cluster.restore()


def requeued(trials: int, note: Callable[[Trial], None]) -> None:
    """No spare, no --no-kill: Slurm requeues the job by itself, with the settings that make it fast."""
    with Cluster([f"n{number}" for number in range(1, ACTIVE + 3)], FAST) as cluster:
        data = make_data(cluster.shared)
        for number in range(trials):
            training = PeerTraining(
                cluster, data, f"requeued-{number}", ACTIVE, 0, STEPS, options=["--requeue"]
            )  # fmt: skip
            note(_trial(training, -1, REQUEUE_LIMIT_S))
            cluster.restore()


def installed(name: str) -> bool:
    """Whether the peer of the scenario ``name`` can be tried here."""
    return not name.startswith("ft_launcher") or find_spec("nvidia_resiliency_ext") is not None


SCENARIOS: dict[str, Scenario] = {
    "torchrun_node_killed": partial(redundant, PeerTraining, -1),
    "torchrun_head_killed": partial(redundant, PeerTraining, 0),
    "ft_launcher_node_killed": partial(redundant, NvidiaTraining, -1),
    "ft_launcher_head_killed": partial(redundant, NvidiaTraining, 0),
    "sbatch_requeue_tuned": requeued,
}
