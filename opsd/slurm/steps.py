"""The steps of a run: one srun per node, so that the loss of a node ends only its own step."""

from __future__ import annotations

import ctypes
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_JOB_WIDE = re.compile(
    r"S(?:LURM|RUN)_(?!JOB_)(\w+_PER_\w+|NTASKS|NPROCS|GPUS|GPU_BIND|GPU_FREQ|TRES\w*|GRES\w*|STEP_GRES|MEM_BIND\w*|HINT|EXACT"
    r"|EXCLUSIVE|DISTRIBUTION|OVERCOMMIT|CORE_SPEC|THREAD_SPEC|HOSTFILE|ARBITRARY_NODELIST|SPREAD_JOB|USE_MIN_NODES)"
)
"""Variables that srun takes for its options, as sbatch sets them or a shell exports them."""


def srun(node: str, gres: Mapping[str, int], command: Sequence[str]) -> list[str]:
    """The command that runs ``command`` once on ``node`` with ``gres``, and all processors and memory of the job there.

    ``gres`` is what the job has on that node (see ``JobDetails``). Slurm gives a step the GPUs that were asked for the
    whole job, a task or a socket; with ``--gpus`` it gives as many as are named, of each type (22.05.8). A step that
    names no processors has all of them. One that asks for all gets none, if tasks or GPUs were asked for unevenly.
    A step of several nodes would end when the first of them fails, and without --no-kill when Slurm notices a dead
    node. The task gets the environment of the batch script, also in a job of ``sbatch --export=NONE``, whose steps have
    none by default.
    """
    gpus = {name: count for name, count in gres.items() if name.partition(":")[0] == "gpu"}
    others = ",".join(f"{name}:{count}" for name, count in gres.items() if name not in gpus)
    told = ",".join(f"{name[4:]}:{count}" if name[4:] else str(count) for name, count in gpus.items())
    bound = [
        *([f"--gpus={told}"] if told else []),
        *([f"--gres={others}"] if told and others else []), "--mem=0",
    ]  # fmt: skip
    return [
        "srun", "--no-kill", "--wait=0", "--kill-on-bad-exit=0", "--overlap", "--export=ALL", "--nodes=1", "--ntasks=1",
        f"--nodelist={node}", *bound, *command,
    ]  # fmt: skip


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without what was asked for the whole job: srun would ask the same for the step."""
    return {name: value for name, value in environ.items() if _JOB_WIDE.fullmatch(name) is None}


class Steps:
    """One srun process per node, each in its own session: srun answers SIGTERM by killing its task.

    None of them outlives this process. The srun of a dead node gives up after a while and cancels its step by number,
    and by then the job may have been started again with steps of the same numbers.
    """

    def __init__(self, commands: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> None:
        """Start them all. Raises OSError if there is no srun."""
        self._running = {
            node: subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                env=dict(environ),
                start_new_session=True,
                preexec_fn=_end_with_parent,  # noqa: PLW1509  # there are no threads here
            )
            for node, command in commands.items()
        }

    @property
    def codes(self) -> dict[str, int]:
        """Exit codes of srun by node, for the steps that have ended."""
        found = {node: process.poll() for node, process in self._running.items()}
        return {node: code for node, code in found.items() if code is not None}

    @property
    def left(self) -> frozenset[str]:
        """The nodes whose step has not ended, according to srun: that of a dead node may seem to run for minutes."""
        return frozenset(self._running) - self.codes.keys()

    def abandon(self) -> None:
        """Kill the remaining sruns without stopping their steps; Slurm ends those with the job."""
        for node in self.left:
            self._running[node].kill()
            self._running[node].wait()

    def signal(self, number: signal.Signals) -> None:
        """Forward SIGUSR1 to the tasks, which srun does without the controller; SIGTERM kills them."""
        for node in self.left:
            with suppress(ProcessLookupError):
                self._running[node].send_signal(number)


def _end_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
