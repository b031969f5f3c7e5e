"""``opsd launch``: the command line, with torchrun's flags."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from opsd import exitcodes
from opsd.launch.hangs.capture import find_py_spy
from opsd.launch.hangs.hang import HangLimits
from opsd.launch.hangs.hang_watch import HangWatch
from opsd.launch.io.behind import flush_all
from opsd.launch.io.console import Console
from opsd.launch.io.control import ControlServer
from opsd.launch.io.events import EventLog
from opsd.launch.io.loop import Loop
from opsd.launch.io.member import Member
from opsd.launch.io.messages import say
from opsd.launch.io.secret import SecretError, job_secret
from opsd.launch.ranks.process import become_subreaper
from opsd.launch.ranks.program import Program, ProgramNotFound
from opsd.launch.ranks.ranks import RankStarter
from opsd.launch.ranks.rundir import RunError, RunFolders, memory_root, prune
from opsd.launch.ranks.settings import Settings
from opsd.launch.ranks.standby import StandbyPool
from opsd.launch.run.fellows import DEFAULT_PORT, Count, Fellows, FellowsError, find_fellows
from opsd.launch.run.options import local_size, node_count, rank_list, run_name, shown_ranks, streams
from opsd.launch.run.placement import Shape
from opsd.launch.run.readiness import spare_readiness
from opsd.launch.run.run_control import RunControl
from opsd.launch.run.supervisor import Supervisor
from opsd.launch.run.together import control_of

FLUSH_S = 5.0
"""What files and readers are given to take the last of events and messages when the launcher ends."""
_FILE = click.Path(path_type=Path)


@click.command(
    context_settings={
        "allow_interspersed_args": False,
        "token_normalize_func": lambda token: token.replace("_", "-"),
        "max_content_width": 110,
    },
    epilog="Exit codes: 0 all ranks finished; 1 failed, restarts used up; 2 wrong command line; 3 interrupted; "
    "70 the same failure came back; 75 stopped in good order, or too few nodes are left: run the job again; "
    "76 another copy of the run has begun; "
    "127 the program does not exist.",
)
@click.option(
    "--nproc-per-node",
    "local_size",
    default="1",
    show_default=True,
    callback=local_size,
    envvar="PET_NPROC_PER_NODE",
    metavar="N|cpu|gpu|auto",
    help="Ranks on this node.",
)
@click.option(
    "--nnodes",
    "count",
    default="1",
    show_default=True,
    callback=node_count,
    envvar="PET_NNODES",
    metavar="N|MIN:MAX",
    help="Nodes that run ranks; one launcher on each. Further nodes are spares.",
)
@click.option("--spares", type=click.IntRange(0), default=0, show_default=True, help="Nodes that stand by.")
@click.option("--nodes", default="", help="Their names, n[1-4], or n1=ADDRESS,n2=…; those of the Slurm job by default.")
@click.option("--node-name", default="", help="The name of this node among them; Slurm's or the host's by default.")
@click.option(
    "--port", type=click.IntRange(1, 65535), help="Where the launchers listen; made from the Slurm job by default."
)
@click.option(
    "--node-timeout",
    type=click.FloatRange(0.5, 300),
    default=2.0,
    show_default=True,
    help="Seconds of silence after which a node is lost, unless it is known to answer slowly.",
)
@click.option(
    "--join-timeout",
    type=click.FloatRange(1),
    default=600.0,
    show_default=True,
    help="Seconds within which the nodes must have come.",
)
@click.option(
    "--wait-for-node",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="Seconds to wait for a node to come back when too few are left, before the run is given back to Slurm.",
)
@click.option("--standalone", is_flag=True, help="Accepted for torchrun; launchers meet by themselves.")
@click.option("--node-rank", type=click.IntRange(0), default=0, envvar="PET_NODE_RANK", hidden=True)
@click.option("--rdzv-backend", default="static", envvar="PET_RDZV_BACKEND", hidden=True)
@click.option("--rdzv-endpoint", default="", envvar="PET_RDZV_ENDPOINT", hidden=True)
@click.option("--rdzv-conf", default="", envvar="PET_RDZV_CONF", hidden=True)
@click.option("--monitor-interval", type=float, default=0.0, envvar="PET_MONITOR_INTERVAL", hidden=True)
@click.option("--rdzv-id", envvar="PET_RDZV_ID", help="The ranks' TORCHELASTIC_RUN_ID; the run's name by default.")
@click.option("--master-addr", default="127.0.0.1", show_default=True, envvar="PET_MASTER_ADDR", help="MASTER_ADDR.")
@click.option(
    "--master-port",
    type=click.IntRange(1, 65535),
    envvar="PET_MASTER_PORT",
    help="MASTER_PORT of every generation; a fresh one for each by default.",
)
@click.option("--role", default="default", envvar="PET_ROLE", help="The ranks' ROLE_NAME.")
@click.option(
    "--max-restarts",
    type=click.IntRange(0),
    default=8,
    show_default=True,
    envvar="PET_MAX_RESTARTS",
    help="Restarts within any --restart-window committed steps.",
)
@click.option(
    "--restart-window",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="Committed steps after which earlier restarts no longer count.",
)
@click.option(
    "--same-failures",
    type=click.IntRange(0),
    default=3,
    show_default=True,
    help="Stop when the same failure came this often without progress; 0: never for that.",
)
@click.option(
    "--hang-limit",
    type=click.FloatRange(0),
    default=5.0,
    show_default=True,
    help="Seconds without any change that are a hang, unless three times the p99 step is longer; 0: never judge.",
)
@click.option(
    "--data-hang-limit",
    type=click.FloatRange(1),
    default=20.0,
    show_default=True,
    help="The same while waiting for data; leaves the agent time to repair a loader.",
)
@click.option(
    "--startup-limit",
    type=click.FloatRange(1),
    default=1800.0,
    show_default=True,
    help="Seconds without change allowed until the first three steps are done: loading, compiling.",
)
@click.option(
    "--stop-timeout",
    type=click.FloatRange(0),
    default=120.0,
    show_default=True,
    help="Seconds to checkpoint and end after SIGTERM or SIGUSR1; a second signal leaves 20 s, a third none.",
)
@click.option("--no-standby", is_flag=True, help="Keep no warm interpreters for the next restart.")
@click.option("--standby-import", multiple=True, metavar="MODULE", help="Import MODULE too in warm interpreters.")
@click.option("--log-dir", type=_FILE, envvar="PET_LOG_DIR", help="Where logs go; RUN_DIR/logs by default.")
@click.option(
    "-r",
    "--redirects",
    default="0",
    callback=streams,
    envvar="PET_REDIRECTS",
    help="3: output to the log files only, not to the console; or by local rank, 0:3,1:0.",
)
@click.option("-t", "--tee", default="0", callback=streams, envvar="PET_TEE", help="Overrules --redirects; same form.")
@click.option("--local-ranks-filter", "chosen", default="", callback=rank_list, help="Show only these local ranks.")
@click.option("-m", "--module", is_flag=True, help="PROGRAM is a module, as in python -m.")
@click.option("--no-python", is_flag=True, help="PROGRAM is any executable.")
@click.option("--run-id", "run", callback=run_name, help="Name of the run; from the Slurm job or the time by default.")
@click.option("--run-dir", type=_FILE, help="Folder kept for the run; ~/.local/state/opsd/runs/RUN by default.")
@click.option("--events", type=_FILE, metavar="FILE", help="Also write the events to FILE, one JSON object a line.")
@click.argument("program")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def launch(program: str, args: tuple[str, ...], module: bool, no_python: bool, **options: Any) -> int:
    """Start and supervise the ranks of a job, where torchrun is used today.

    The flags and the environment of the ranks are torchrun's. All output of a rank goes to one log file, and from
    there to the console. On several nodes start it once on each, with the same arguments; the folder of the run must
    be one that all of them see.
    """
    if module and no_python:
        raise click.UsageError("--module and --no-python exclude each other; leave one out.")
    try:
        found = Program.find("module" if module else "executable" if no_python else "script", program, args)
    except ProgramNotFound as error:
        click.echo(f"opsd launch: {error}", err=True)
        return exitcodes.NOT_FOUND
    node = options["node_name"] or os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    run = options["run"]
    settings = Settings(
        program=found,
        run=run,
        job=os.environ.get("SLURM_JOB_ID", ""),
        node=node,
        local_size=options["local_size"],
        run_id=options["rdzv_id"] or run,
        role=options["role"],
        max_restarts=options["max_restarts"],
        same_failures=options["same_failures"],
        refill_steps=options["restart_window"],
        standby=not options["no_standby"] and not no_python,
        standby_imports=options["standby_import"],
        stop_timeout_s=options["stop_timeout"],
        shown=shown_ranks(options["local_size"], options["redirects"], options["tee"], options["chosen"]),
    )
    shared = memory_root()
    prune(shared, time.time())
    several = options["count"].most + options["spares"] > 1
    try:
        folders = RunFolders.create(run, folder=options["run_dir"], logs=options["log_dir"], shared=shared)
        targets = [folders.memory / "events.jsonl", *([] if several else [folders.folder / "events.jsonl"])]
        events = EventLog(run, node, targets + ([options["events"]] if options["events"] else []))
    except RunError as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"{error.filename} cannot be written: {error.strerror}") from error
    try:
        fellows = _fellows(options, node, several=several)
        secret = job_secret(folders.folder) if several else b""
    except (FellowsError, SecretError) as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"{error.filename} cannot be read: {error.strerror}") from error
    shape = _shape(options, fellows)
    return _supervise(
        settings,
        folders,
        events,
        _hang_limits(options),
        lambda node: control_of(
            node, fellows, shape, secret, options["node_timeout"], options["master_port"], spare_readiness
        ),
        stacks_suffix=f"-{settings.node}" if several else "",
    )


def _fellows(options: dict[str, Any], node: str, *, several: bool) -> Fellows:
    if several:
        return find_fellows(options["nodes"], node, options["port"], os.environ)
    own = Member(node, options["master_addr"], options["port"] or DEFAULT_PORT)
    return Fellows(own, (own,))


def _shape(options: dict[str, Any], fellows: Fellows) -> Shape:
    count: Count = options["count"]
    have, need = len(fellows.members), count.least + options["spares"]
    if have < need:
        raise click.UsageError(f"the run has {have} nodes, and --nnodes and --spares ask for {need}")
    return Shape(
        count.least,
        count.most,
        tuple(member.name for member in fellows.members),
        join_s=options["join_timeout"],
        wait_s=options["wait_for_node"],
        victim_s=options["node_timeout"] + 1.0,
    )


def _hang_limits(options: dict[str, Any]) -> HangLimits | None:
    """None if hangs are not to be judged."""
    if not options["hang_limit"]:
        return None
    return HangLimits(options["hang_limit"], options["data_hang_limit"], options["startup_limit"])


def _supervise(
    settings: Settings,
    folders: RunFolders,
    events: EventLog,
    limits: HangLimits | None,
    new_control: Callable[[Supervisor], RunControl],
    *,
    stacks_suffix: str = "",
) -> int:
    become_subreaper()
    loop = Loop()
    standby = StandbyPool(
        settings.program,
        lambda local_rank: settings.environment(local_rank, folders.folder),
        size=settings.local_size if settings.standby else 0,
        extra_modules=settings.standby_imports,
        log=folders.logs / "standby.log",
        loop=loop,
    )
    hangs = HangWatch(limits, folders, loop, find_py_spy(), stacks_suffix) if limits is not None else None
    console = Console()
    supervisor = Supervisor(
        settings,
        folders,
        events,
        loop,
        starter=RankStarter(settings, folders, standby),
        standby=standby,
        hangs=hangs,
        console=console,
    )
    control = ControlServer(folders.control, loop, supervisor.answer)
    try:
        return supervisor.run(new_control(supervisor))
    finally:
        control.close()
        standby.close()
        console.close()
        for late in flush_all(FLUSH_S):
            say(f"some {late} are missing: they could not be written in time")
