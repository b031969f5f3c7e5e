"""``opsd requeue``: a job back into the queue without its bad nodes, and started as soon as it can be."""

from __future__ import annotations

import getpass
import json
import os
from contextlib import suppress
from dataclasses import asdict

import click

from opsd import exitcodes
from opsd.commands.options import Seconds, exit_codes, option
from opsd.slurm.allocation import AllocationError, allocation
from opsd.slurm.connect import choose
from opsd.slurm.drain import OWN_PREFIX
from opsd.slurm.port import SlurmError
from opsd.slurm.requeue import LIMIT_S, REASON, ExcludedNodes, Requeued, preview, requeue_now, whose_hold
from opsd.slurm.requeue_helper import helper_of, requeue_from_inside


def _reason(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if not value.startswith(OWN_PREFIX) or not value.isprintable():
        raise click.BadParameter(f"{value!r} is not one line that begins with {OWN_PREFIX}")
    return value


def _job(context: click.Context, parameter: click.Parameter, value: str | None) -> int:
    """Python reads 12_3, as Slurm calls a task of an array, as 123, which is another job."""
    array, _, task = (value or "").partition("_")
    if array.isdecimal() and task:
        raise click.BadParameter(
            f"{value} is a task of an array; scontrol show job {value} tells its own number, JobId"
        )
    if value is None:
        raise click.UsageError("this is not inside a Slurm job: name the job, as in `opsd requeue 4242`", context)
    if not value.isdecimal() or int(value) < 1:
        raise click.BadParameter(f"{value!r} is not the number of a job")
    return int(value)


@click.command(
    epilog=exit_codes(
        {
            0: "the job is back in the queue, or will be",
            1: "it is held, cannot be requeued, or Slurm refuses",
            2: "the command line is wrong",
        }
    )
)
@click.argument("job", callback=_job, envvar="SLURM_JOB_ID", metavar="[JOB]", required=False)
@option("--lost", multiple=True, metavar="NODE", help="A node that is dead: taken down as well, if that is allowed.")
@option("--without", "unfit", multiple=True, metavar="NODE", help="A node that the job is not to come back on.")
@option("--reason", default=REASON, callback=_reason, help="Why nodes are taken down.")
@option(
    "--restarts", type=click.IntRange(0), help="Leave the job alone if it was restarted more often. [default: as now]"
)
@option("--lead", default=0.0, type=Seconds(0), hidden=True)
@option("--log", default="", hidden=True)
@option("--dry-run", is_flag=True, help="Say what would be done and which right is missing, and do nothing.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object; what happens meanwhile goes to stderr.")
@option("--limit", default=LIMIT_S, type=Seconds(1), help="Seconds to keep trying.")
def requeue(
    job: int,
    lost: tuple[str, ...],
    unfit: tuple[str, ...],
    reason: str,
    restarts: int | None,
    lead: float,
    log: str,
    dry_run: bool,
    as_json: bool,
    limit: float,
) -> int:
    """Put JOB (default: the one this runs in) back into the queue and have it start as soon as it can.

    Faster than Slurm by itself, which waits for dead nodes and then two minutes more; opsd slurm check says which
    settings help. The owner of the job needs no further rights unless the node of the batch script is dead.

    A hold that a person has set (scontrol hold, uhold, requeuehold) is never released. That of Slurm after a start that
    failed, as by a prolog, is released once.
    """
    slurm, without = choose().slurm, ExcludedNodes(lost, unfit, reason)

    def say(sentence: str) -> None:
        with suppress(OSError):  # a full disk below the output must not keep the job from its restart
            click.echo(sentence, err=as_json)

    try:
        if dry_run:
            would = preview(slurm, job, without, getpass.getuser())
            click.echo(json.dumps({"job": job, **asdict(would)}, indent=1) if as_json else would.text)
            return exitcodes.OK if would.possible else exitcodes.FAILED
        if os.environ.get("SLURM_JOB_ID") == str(job):
            done = requeue_from_inside(
                slurm, allocation(os.environ), without, restarts=restarts, limit_s=limit, say=say
            )
        else:
            helper = None
            if log:
                own = allocation(os.environ)
                helper = helper_of(slurm, own, job, without, restarts=restarts, limit_s=limit, log=log)
            done = requeue_now(
                slurm, job, without, restarts=restarts, defer_s=lead, helper=helper, limit_s=limit, say=say
            )
    except (SlurmError, AllocationError) as error:
        click.echo(f"opsd: {error}", err=True)
        return exitcodes.FAILED
    if as_json:
        click.echo(json.dumps(asdict(done), indent=1))
    if done.held:
        click.echo(
            f"opsd: job {done.job} is on hold ({done.held}), which {whose_hold(done.held)} and which stays; scontrol "
            f"release {done.job} lets it start",
            err=True,
        )
        return exitcodes.FAILED
    if not as_json:
        click.echo(_told(done))
    return exitcodes.OK


def _told(done: Requeued) -> str:
    if done.handed_over:
        return f"job {done.job} is being stopped and will start again at once"
    if done.state != "pending":
        return f"job {done.job} runs again; it has been restarted {done.restarts} times"
    avoided = f", and not on {', '.join(done.avoided)}" if done.avoided else ""
    return f"job {done.job} is in the queue and starts as soon as there are nodes for it{avoided}"
