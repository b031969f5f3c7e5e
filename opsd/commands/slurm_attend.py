"""``opsd slurm attend``: the launcher of a node, and a process beside it that requests spares for the run."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click

from opsd import exitcodes
from opsd.commands.options import option
from opsd.launch.io.reporting import print_now
from opsd.launch.io.run_log import tell
from opsd.launch.run.launchers import BATCH
from opsd.slurm.allocation import Allocation, AllocationError, allocation
from opsd.slurm.batch import STOPPING
from opsd.slurm.connect import choose
from opsd.slurm.spare_jobs import SpareJob, SpareRequester

LOOK_S = 0.2
_HANDED_ON = ("SLURM_JOB_PARTITION", "SLURM_JOB_ACCOUNT", BATCH, "LC_ALL")
"""Variables that Slurm's commands run without but a spare's launcher needs."""


def attend_command(
    opsd: Sequence[str], pool: str, folder: Path, told: Sequence[str], launcher: Sequence[str]
) -> tuple[str, ...]:
    """The command that runs ``launcher`` and requests spares, whose ``opsd launch`` gets the options ``told``."""
    own = ("slurm", "attend", f"--pool={pool}", f"--run-dir={folder}", f"--opsd={len(opsd)}", f"--told={len(told)}")
    return (*opsd, *own, "--", *opsd, *told, *launcher)


@click.command(hidden=True)
@option("--pool", required=True)
@option("--run-dir", "folder", type=click.Path(path_type=Path), required=True)
@option("--opsd", "of_opsd", type=int, required=True, help="Number of ARGS that are the opsd command of a spare.")
@option(
    "--told", "of_spare", type=int, required=True, help="Number of ARGS after those that are its launcher's options."
)
@click.argument("args", nargs=-1, type=click.UNPROCESSED, required=True)
@click.pass_context
def attend(context: click.Context, pool: str, folder: Path, of_opsd: int, of_spare: int, args: tuple[str, ...]) -> None:
    """Become the launcher in ARGS, after starting a detached process that requests spares while the launcher lives."""
    opsd, told, launcher = args[:of_opsd], args[of_opsd : of_opsd + of_spare], args[of_opsd + of_spare :]
    try:
        job = allocation(os.environ)
    except AllocationError as error:
        raise click.UsageError(str(error)) from error
    handed = {name: os.environ[name] for name in _HANDED_ON if name in os.environ}
    spare = SpareJob((*pool_options(pool, job),), tuple(opsd), tuple(told), handed)
    requester = SpareRequester(folder, job.node, job, spare, lambda: choose().slurm, say=partial(_say, folder))
    run_detached(requester)
    try:
        os.execvp(launcher[0], launcher)  # noqa: S606
    except OSError as error:
        click.echo(f"opsd: {launcher[0]} cannot be run: {error.strerror}", err=True)
        context.exit(exitcodes.NOT_FOUND)


def pool_options(pool: str, job: Allocation) -> tuple[str, ...]:
    """The sbatch options for ``pool``: a partition, ``reservation:NAME``, or ``same``."""
    kind, _, name = pool.rpartition(":")
    qos = (f"--qos={job.qos}",) if job.qos else ()
    if kind == "reservation":
        return (f"--reservation={name}", *job.same_queue, *qos)
    if pool == "same":
        return (*job.same_queue, *qos)
    return (f"--partition={pool}", *([f"--account={job.account}"] if job.account else []))


def run_detached(requester: SpareRequester) -> None:
    """Run ``requester`` until this process ends, in a process that is not its child.

    The launcher that this process becomes takes its descendants for ranks', and Slurm signals it directly.
    """
    launcher = os.getpid()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    if os.fork():
        os._exit(0)
    try:
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN)
        _request_until_end(requester, launcher)
    finally:
        os._exit(0)


def _request_until_end(requester: SpareRequester, launcher: int) -> None:
    ended = os.pidfd_open(launcher)
    while not select.select([ended], [], [], LOOK_S)[0]:
        requester.look()


def _say(folder: Path, sentence: str) -> None:
    """In the log of the run, which is copied to the job's output, or else there."""
    try:
        tell(folder, sentence)
    except OSError:
        print_now(sentence)
