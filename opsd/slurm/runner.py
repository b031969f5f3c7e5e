"""Running one of Slurm's commands: an argument list, a deadline, no shell."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from opsd.slurm.port import SlurmMissing, SlurmUnavailable


class Output(NamedTuple):
    """Exit code and output of a command."""

    code: int
    stdout: str
    stderr: str


class Runner(Protocol):
    """Runs a command. Tests substitute recorded outputs."""

    def __call__(self, argv: Sequence[str], deadline_s: float, stdin: str = "") -> Output:
        """The output of ``argv``. Raises SlurmUnavailable after ``deadline_s`` seconds, SlurmMissing without it."""


_LENT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")


def clean_environment(env: Mapping[str, str]) -> dict[str, str]:
    """``env`` without the variables that change what Slurm's commands do or print; times are printed as epoch seconds.

    Inside a job these variables would select its own job, node list and output formats.
    """
    meddling = ("SLURM", "SBATCH_", "SQUEUE_", "SINFO_", "SCANCEL_", "SALLOC_", "SCONTROL_", "SACCT_")
    kept = {name: value for name, value in env.items() if name in _LENT or not name.startswith(meddling)}
    return {**kept, "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}


def run_command(argv: Sequence[str], deadline_s: float, stdin: str = "") -> Output:
    """Run ``argv`` in its own session, which is killed when the deadline passes.

    Returns by the deadline even if the command cannot be killed (its binary may be on a hung file system). Raises
    SlurmUnavailable and SlurmMissing.
    """
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            env=clean_environment(os.environ),
            start_new_session=True,
        )
    except OSError as error:
        raise SlurmMissing(
            f"{argv[0]} cannot be run ({error.strerror}): install Slurm's client commands or put them into PATH"
        ) from error
    try:
        stdout, stderr = process.communicate(stdin, timeout=deadline_s)
    except subprocess.TimeoutExpired as error:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=0.2)
        raise SlurmUnavailable(f"{argv[0]} has not answered within {deadline_s:g} s") from error
    return Output(process.returncode, stdout, stderr)
