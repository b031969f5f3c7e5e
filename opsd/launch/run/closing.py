"""The last words of the launcher that leads: ``opsd.report``, in a process of its own, so that nothing holds it up."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import opsd
from opsd import exitcodes
from opsd.launch.io.reporting import flush, print_message
from opsd.slurm.allocation import AllocationError, allocation, in_job
from opsd.slurm.commands import CommandSlurm
from opsd.slurm.port import Slurm, SlurmError

REPORT_S = 15.0
STOPPED_S = 5.0
"""The same for a run that a signal stops: Slurm ends its job soon."""
RESUME = "OPSD_RESUME"
"""Set by the batch script: the command that resumes a run whose job Slurm does not requeue."""
SLURM_S = 3.0
"""Time for each of at most three of Slurm's commands."""


@dataclass(frozen=True, slots=True)
class Closing:
    """The ``summary`` of a run that has ended, in one line, and its report, None if there is none."""

    summary: str
    report: Path | None = None


def print_closing_block(folder: Path, code: int, reason: str, resume: str) -> Closing:
    """Make the report of the run in ``folder``, which ends with ``code``, and print its closing block.

    A report that cannot be made in time is left out; `opsd report` makes it later.
    """
    told = [] if code in (exitcodes.OK, exitcodes.NOT_FOUND) else [resume]
    closing = Closing(f"ended with {code}: {reason}")
    try:
        made = subprocess.run(
            [sys.executable, "-m", "opsd.report", str(folder.resolve()), *told],
            cwd=Path(opsd.__file__).parents[1],  # where -m finds this opsd, not one of the user's
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            timeout=STOPPED_S if code in (exitcodes.REQUEUE, exitcodes.INTERRUPTED) else REPORT_S,
            start_new_session=True, check=True,
        )  # fmt: skip
        said = json.loads(made.stdout)
    except subprocess.TimeoutExpired:
        print_message(f"the report is not made in time; `opsd report {shlex.quote(str(folder))}` makes it")
    except (OSError, subprocess.SubprocessError, ValueError):
        pass
    else:
        print_message(said["block"], tone="good" if code == exitcodes.OK else "bad")
        closing = Closing(said["summary"], Path(said["page"]) if said["page"] else None)
    flush()
    return closing


def summarize_job(
    summary: str,
    slurm: Callable[[], Slurm] = lambda: CommandSlurm(deadline_s=SLURM_S),
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Put how the run ended into the comment of the Slurm job, if it is in one; a failure is one line."""
    if in_job(environ):
        try:
            slurm().summarize(allocation(environ).job, summary)
        except (SlurmError, AllocationError) as error:
            print_message(f"the job's comment has no summary of the run: {error}")
            flush()


def resume_command(
    arguments: Sequence[str],
    run: str,
    *,
    named: bool,
    several: bool,
    secrets: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> str:
    """The command that continues a run started with ``opsd`` and these ``arguments``.

    Without Slurm, each start on one node has a name of its own unless it is ``named``. The command is printed and
    stored, and has ``URL`` in the place of each of ``secrets``.
    """
    if again := environ.get(RESUME):
        return again
    if job := environ.get("SLURM_JOB_ID"):
        array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
        return f"scontrol requeue {f'{array}_{task}' if array and task else job}"
    if several:
        return "the same command on each node"
    if arguments[:1] not in (["launch"], ["train"]):
        return "the same command" if named else f"the same command with --run-id {run}"
    own = [] if named else ["--run-id", run]
    for secret in secrets:
        arguments = [argument.replace(secret, "URL") for argument in arguments]
    return shlex.join(["opsd", arguments[0], *own, *arguments[1:]])
