"""The last words of the launcher that leads: ``opsd.report``, in a process of its own, so that nothing holds it up."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import opsd
from opsd import exitcodes
from opsd.launch.io.reporting import flush, print_message

REPORT_S = 15.0
STOPPED_S = 5.0
"""The same for a run that was told to stop: Slurm ends its job soon."""


def print_closing_block(folder: Path, code: int, resume: str) -> None:
    """Make the report of the run in ``folder``, which ends with ``code``, and print its closing block.

    A report that cannot be made in time is left out; `opsd report` makes it later.
    """
    told = [] if code == exitcodes.OK else [resume]
    try:
        made = subprocess.run(
            [sys.executable, "-m", "opsd.report", str(folder.resolve()), *told],
            cwd=Path(opsd.__file__).parents[1],  # where -m finds this opsd, not one of the user's
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            timeout=STOPPED_S if code in (exitcodes.REQUEUE, exitcodes.INTERRUPTED) else REPORT_S,
            start_new_session=True, check=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        print_message(f"the report is not made in time; `opsd report {shlex.quote(str(folder))}` makes it")
    except (OSError, subprocess.SubprocessError):
        pass
    else:
        text = made.stdout.decode(errors="replace").rstrip()
        print_message(text, tone="good" if code == exitcodes.OK else "bad")
    flush()


def resume_command(
    arguments: Sequence[str], run: str, *, named: bool, several: bool, environ: Mapping[str, str] = os.environ
) -> str:
    """What a user types to go on with a run that was started with ``opsd`` and these ``arguments``.

    Without Slurm, each start on one node has a name of its own unless it is ``named``.
    """
    if job := environ.get("SLURM_JOB_ID"):
        array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
        return f"scontrol requeue {f'{array}_{task}' if array and task else job}"
    if several:
        return "the same command on each node"
    if arguments[:1] not in (["launch"], ["train"]):
        return "the same command" if named else f"the same command with --run-id {run}"
    own = [] if named else ["--run-id", run]
    return shlex.join(["opsd", arguments[0], *own, *arguments[1:]])
