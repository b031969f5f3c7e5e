"""``opsd slurm run``: the batch script of a run, in one line."""

from __future__ import annotations

import os
import secrets
import shlex
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from opsd import exitcodes
from opsd.checkpoints.claims import ClaimError
from opsd.commands.launch_options import NOTIFY
from opsd.commands.options import Seconds, exit_codes, option
from opsd.commands.slurm_attend import attend_command
from opsd.launch.io.reporting import print_now
from opsd.launch.io.run_log import BATCH_HOST, JOB_OUTPUT
from opsd.launch.run.announcer import RESUME
from opsd.launch.run.launchers import BATCH, NodeCount, start_of_job
from opsd.rundir import RUN_NAME, default_root, valid_name
from opsd.slurm.allocation import Allocation, AllocationError, allocation
from opsd.slurm.batch import Batch, Steps, srun, step_environment
from opsd.slurm.check import HETEROGENEOUS, broken, of_job
from opsd.slurm.connect import choose, known_jobs
from opsd.slurm.port import JobDetails, SlurmError
from opsd.slurm.requeue_helper import OPSD
from opsd.slurm.run_owner import REPLACES, RunOwnedError, replaceable

WAIT_FOR_POOL_S = 300.0
_PATH = click.Path(path_type=Path)


def _count(_context: click.Context, _parameter: click.Parameter, value: str | None) -> NodeCount | None:
    try:
        return NodeCount.parse(value) if value else None
    except ValueError:
        raise click.BadParameter(f"{value!r} is neither a number of nodes nor MIN:MAX") from None


def _run_id(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str:
    name = value or run_name(os.environ)
    if not RUN_NAME.fullmatch(name):
        raise click.BadParameter(f"{name!r} may have letters, digits, dot, dash and underscore only, 63 at most")
    return name


def run_name(environ: Mapping[str, str]) -> str:
    """One name for all starts of the job: its own, with the task's number in an array."""
    job, task = environ.get("SLURM_JOB_NAME", "job"), environ.get("SLURM_ARRAY_TASK_ID", "")
    return valid_name(f"{job}-{task}" if task else job)


class _Separated(click.Command):
    """A command whose options end at ``--``: which of the unknown ones take a value is not known here.

    So the program could not be found, and an option of its own, --run-id say, would be taken from it.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and "--" not in args and not {"--help", "-h"} & set(args):
            raise click.UsageError("write -- before the program, opsd slurm run [OPTIONS] -- train.py [ARGS]", ctx)
        return super().parse_args(ctx, args)


@click.command(
    cls=_Separated,
    context_settings={"ignore_unknown_options": True, "max_content_width": 110},
    epilog=exit_codes(
        {
            0: "the run is done, or the job is on its way back into the queue",
            1: "the run failed, or three starts in a row reported nothing",
            2: "the command line is wrong",
            3: "interrupted",
            70: "the same failure came back",
            74: "the disk or the quota of the run's folder is full",
            75: "the run should continue, but the job cannot be requeued",
            76: "another copy of the run has begun, or another job has the run",
        }
    ),
)
@option(
    "--nnodes",
    "count",
    callback=_count,
    metavar="N|MIN:MAX",
    help="Nodes that run ranks; all but the spares by default. With MIN:MAX see also --grow-after of opsd launch.",
)
@option("--spares", type=click.IntRange(0), default=0,
              help="Nodes of the job that stand by; with --nnodes at most so many.")  # fmt: skip
@option("--pool", metavar="PARTITION|reservation:NAME|same",
              help="Fetch a spare from there when a node is lost; same: from the job's own partition.")  # fmt: skip
@option("--wait", type=Seconds(0),
              help="Seconds to wait for a node when too few are left, before the job goes back into the queue. "
              f"[default: {WAIT_FOR_POOL_S:g} with a pool, else 0]")  # fmt: skip
@option("--run-id", "run", callback=_run_id, help="Name of the run; made from the job's name by default.")
@option("--runs", type=_PATH, metavar="DIR", help="The folder of the run is DIR/RUN; all nodes must see it.")
@option("--run-dir", type=_PATH, metavar="DIR", help="The folder of the run itself.")
@option("--opsd", "command", envvar="OPSD", help="What is started on each node; this opsd by default.")
@option("--notify", multiple=True, envvar=NOTIFY, metavar="URL|FILE",
              help="As of opsd launch. Better set OPSD_NOTIFY in the batch script.")  # fmt: skip
@option("--take-over", is_flag=True,
              help="Continue the run even if another job still has it; that one stops with exit code 76.")  # fmt: skip
@option("--dry-run", is_flag=True, help="Say what would be started on each node, and do nothing.")
@click.argument(
    "launch", nargs=-1, type=click.UNPROCESSED, required=True, metavar="[LAUNCH OPTIONS] -- PROGRAM [ARGS]..."
)
@click.pass_context
def run(context: click.Context, /, run: str, launch: tuple[str, ...], **options: Any) -> None:
    """Run PROGRAM on all nodes of this Slurm job, and have the job live and end as the run does.

    It stands in a batch script, as its last line, with exec: `exec opsd slurm run --spares 1 -- train.py`. The script
    needs --no-kill, --requeue, --open-mode=append and --signal=USR1@300, as in the templates of deploy/slurm. Options
    that are not listed here are those of opsd launch, for instance --nproc-per-node 8.
    """
    try:
        job = allocation(os.environ)
    except AllocationError as error:
        raise click.UsageError(str(error)) from error
    if (step := os.environ.get("SLURM_STEP_ID", "")).isdecimal() and int(step) < 1 << 31:
        raise click.UsageError("start it once in the job, in its batch script; srun would start it on every node")
    plan = Plan.of(job, run, launch, options)
    details, environ = _details(job.job)
    gres = details.gres
    commands = {node: srun(node, gres.get(node, {}), plan.command) for node in job.nodes}
    if options["dry_run"]:
        for command in commands.values():
            click.echo(shlex.join(command))
        return
    environ |= {**step_environment(os.environ), NOTIFY: " ".join(options["notify"])}
    context.exit(_start(job, plan, commands, environ, take_over=options["take_over"]))


@dataclass(frozen=True, slots=True)
class Plan:
    """What is started on each node: ``command``, for the run in ``folder``."""

    run: str
    folder: Path
    command: tuple[str, ...]
    needs: int = 1

    @classmethod
    def of(cls, job: Allocation, run: str, launch: tuple[str, ...], options: Mapping[str, Any]) -> Plan:
        """Raises click.UsageError if the job has too few nodes."""
        if options["runs"] and options["run_dir"]:
            raise click.UsageError("--runs and --run-dir exclude each other: the first is the folder of all runs")
        folder = options["run_dir"] or (options["runs"] or default_root()) / run
        have, spares = len(job.nodes), options["spares"]
        count = options["count"] or NodeCount(have - spares, have - spares)
        if not 1 <= count.least <= have:
            asked = f"--nnodes {count.least}" if options["count"] else f"--spares {spares}"
            needs = count.least if options["count"] else spares + 1
            raise click.UsageError(f"the job has {have} nodes, and {asked} needs {needs}; see #SBATCH --nodes")
        if spares > (spares := min(spares, have - count.least)):
            print_now(f"{spares} of {options['spares']} spares stand by: the job has {have} nodes")
        wait = options["wait"] if options["wait"] is not None else WAIT_FOR_POOL_S if options["pool"] else 0.0
        try:
            given = options["command"]
            opsd = tuple(shlex.split(given)) if given else OPSD
        except ValueError as error:
            raise click.UsageError(f"--opsd {options['command']} is no command of the shell: {error}") from error
        told = (
            "--nnodes", str(count.least) if count.least == count.most else f"{count.least}:{count.most}",
            "--spares", str(spares), "--wait-for-node", f"{wait:g}", "--run-id", run,
            "--run-dir", str(folder.absolute()), *launch,
        )  # fmt: skip
        hostlist = os.environ.get("SLURM_JOB_NODELIST") or ",".join(job.nodes)
        command = (*opsd, "launch", "--nodes", hostlist, *told)
        if options["pool"]:
            command = attend_command(opsd, options["pool"], folder.absolute(), told, command)
        return cls(run, folder.absolute(), command, count.least)


def _details(job: int) -> tuple[JobDetails, dict[str, str]]:
    """The details of the job, empty if Slurm does not answer, and variables for its launchers.

    Says which promises of opsd the job cannot keep. Raises click.UsageError for a heterogeneous job.
    """
    if "SLURM_HET_SIZE" in os.environ:
        raise click.UsageError(HETEROGENEOUS)
    slurm = choose().slurm
    try:
        details = slurm.details(job)
    except SlurmError as error:
        print_now(f"what the job has on each node is not known, and its steps get what Slurm gives them: {error}")
        return JobDetails({}), {}
    script = None
    with suppress(SlurmError):
        script = slurm.script(job) if details.batch else None
    asked = of_job(details, script, os.environ)
    for sentence in broken(asked, job):
        print_now(sentence)
    again = f"sbatch {details.command}" if details.command else "submit the job again"
    return details, {RESUME: again} if asked.requeue is False else {}


def _start(
    job: Allocation, plan: Plan, commands: Mapping[str, list[str]], environ: Mapping[str, str], *, take_over: bool
) -> int:
    try:
        plan.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print_now(f"the run's folder {plan.folder} cannot be made: {error.strerror}")
        return exitcodes.of_error(error, exitcodes.USAGE)
    own = environ.get("SLURMD_NODENAME", "")
    told = {**environ, BATCH_HOST: own, JOB_OUTPUT: _output(1), BATCH: secrets.token_hex(4)}
    start = start_of_job(plan.run, told)
    try:
        number = replaceable(plan.folder, start, known_jobs, take_over=take_over)
        told[REPLACES] = str(number)
    except RunOwnedError as error:
        print_now(str(error))
        return exitcodes.FENCED
    except ClaimError as error:
        print_now(str(error.strerror))
        return exitcodes.of_error(error)
    batch = Batch(plan.folder, start, job, lambda: choose().slurm, plan.needs, say=print_now)
    batch.listen()
    try:
        return batch.run(Steps(commands, told))
    except FileNotFoundError as error:
        print_now(f"{error.filename} cannot be run: {error.strerror}")
        return exitcodes.USAGE


def _output(descriptor: int) -> str:
    """The inode and the path of the file to which the job's output goes, "" if that is no file."""
    try:
        found = os.fstat(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
    except OSError:
        return ""
    return f"{found.st_ino}:{path}" if stat.S_ISREG(found.st_mode) else ""
