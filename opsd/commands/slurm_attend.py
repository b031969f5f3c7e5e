"""``opsd slurm attend``: the launcher of a node, and beside it somebody who fetches spares for the run."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from opsd import exitcodes
from opsd.launch.run.launchers import BATCH
from opsd.slurm.allocation import Allocation, AllocationError, allocation
from opsd.slurm.batch import STOPPING
from opsd.slurm.connect import choose
from opsd.slurm.spare_jobs import SpareJob, SpareRequester

LOOK_S = 0.2
_HANDED_ON = ("SLURM_JOB_PARTITION", "SLURM_JOB_ACCOUNT", BATCH, "LC_ALL")
"""Of the environment, what Slurm's commands run without and a guest has to have."""


def attend_command(
    opsd: Sequence[str], pool: str, folder: Path, told: Sequence[str], launcher: Sequence[str]
) -> tuple[str, ...]:
    """The command that runs ``launcher`` and fetches spares, to which ``opsd launch`` is ``told`` the same."""
    own = ("slurm", "attend", f"--pool={pool}", f"--run-dir={folder}", f"--opsd={len(opsd)}", f"--told={len(told)}")
    return (*opsd, *own, "--", *opsd, *told, *launcher)


@click.command(hidden=True)
@click.option("--pool", required=True)
@click.option("--run-dir", "folder", type=click.Path(path_type=Path), required=True)
@click.option("--opsd", "of_opsd", type=int, required=True, help="So many of the ARGS are the opsd of a guest,")
@click.option("--told", "of_guest", type=int, required=True, help="and so many what its launcher is told.")
@click.argument("args", nargs=-1, type=click.UNPROCESSED, required=True)
@click.pass_context
def attend(context: click.Context, pool: str, folder: Path, of_opsd: int, of_guest: int, args: tuple[str, ...]) -> None:
    """Become the launcher in ARGS, after a process was parted off that fetches spares as long as it lives."""
    opsd, told, launcher = args[:of_opsd], args[of_opsd : of_opsd + of_guest], args[of_opsd + of_guest :]
    try:
        job = allocation(os.environ)
    except AllocationError as error:
        raise click.UsageError(str(error)) from error
    handed = {name: os.environ[name] for name in _HANDED_ON if name in os.environ}
    spare = SpareJob((*pool_options(pool, job),), tuple(opsd), tuple(told), handed)
    fetcher = SpareRequester(folder, job.node, job, spare, lambda: choose().slurm, say=_say)
    part_off(fetcher)
    try:
        os.execvp(launcher[0], launcher)  # noqa: S606
    except OSError as error:
        click.echo(f"opsd slurm run: {launcher[0]} cannot be run: {error.strerror}", err=True)
        context.exit(exitcodes.NOT_FOUND)


def pool_options(pool: str, job: Allocation) -> tuple[str, ...]:
    """The options of sbatch that name the ``pool``: a partition, ``reservation:NAME``, or ``same``."""
    account = (f"--account={job.account}",) if job.account else ()
    kind, _, name = pool.rpartition(":")
    if kind == "reservation":
        return (f"--reservation={name}", *job.same_queue)
    return (f"--partition={job.partition if pool == 'same' else pool}", *account)


def part_off(fetcher: SpareRequester) -> None:
    """Have ``fetcher`` work beside this process until it ends, in one that is no child of it.

    The launcher that this process becomes takes what descends from it for its ranks', and Slurm signals it directly.
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
        _fetch(fetcher, launcher)
    finally:
        os._exit(0)


def _fetch(fetcher: SpareRequester, launcher: int) -> None:
    ended = os.pidfd_open(launcher)
    while not select.select([ended], [], [], LOOK_S)[0]:
        fetcher.look()


def _say(sentence: str) -> None:
    print(f"opsd slurm run: {sentence}", file=sys.stderr, flush=True)
