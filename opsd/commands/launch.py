"""``opsd launch``: the command line, with torchrun's flags."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from opsd import exitcodes
from opsd.checkpoints.claims import ClaimError
from opsd.commands.launch_options import NOTIFY, full_name, own_options, torchrun_options
from opsd.commands.launch_settings import (
    besides_of,
    default_name,
    hang_limits_of,
    is_several,
    keep_plan,
    program_kind,
    refuse_launchers,
    settings_of,
    settle_rendezvous,
    shape_of,
)
from opsd.commands.options import SectionedCommand, exit_codes
from opsd.launch.hangs.capture import find_py_spy
from opsd.launch.hangs.gpus import find_gpu_probe
from opsd.launch.hangs.limits import HangLimits
from opsd.launch.hangs.watch import HangWatch
from opsd.launch.io.console import Console
from opsd.launch.io.control import ControlServer
from opsd.launch.io.handshake import SecretError, job_secret
from opsd.launch.io.loop import Loop
from opsd.launch.io.protocol import Member
from opsd.launch.io.reporting import EventLog, flush_all, print_message
from opsd.launch.ranks.process import become_subreaper, has_own_proc
from opsd.launch.ranks.settings import Program, ProgramNotFound, Settings, too_few_gpus
from opsd.launch.ranks.workers import RankStarter
from opsd.launch.run.announcer import LAST_S, Closing, Notices, Sender, print_closing_block, summarize_job
from opsd.launch.run.assembly import assemble_run
from opsd.launch.run.companions import Beside, Companions
from opsd.launch.run.launchers import (
    DEFAULT_PORT,
    Launchers,
    RendezvousError,
    RendezvousOptions,
    default_port,
    find_launchers,
    join_rendezvous,
    slurm_nodes,
    start_of,
    too_many_here,
)
from opsd.launch.run.nvlink_domain import imex_problem, own_domain
from opsd.launch.run.readiness import spare_readiness
from opsd.launch.run.run_control import RunControl
from opsd.launch.run.supervisor import Supervisor
from opsd.rundir import RunError, RunFolders, RunTakenError, memory_root, prune
from opsd.slurm.connect import known_jobs
from opsd.slurm.run_owner import REPLACES, RunOwnedError, replaceable

LOOPBACK = "127.0.0.1"
TRIM_S = 1.0
FLUSH_S = 5.0
"""Seconds that files and readers have to take the last events and messages when the launcher ends."""


_SECTIONS = {
    "Program and ranks": (
        "local_size", "module", "no_python", "virtual_local_rank", "role", "audit", "evaluation",
        "evaluation_queue",
    ),
    "Several nodes": (
        "count", "spares", "nodes", "node_name", "join_timeout", "last_call", "node_timeout", "wait_for_node",
        "grow_after", "segment", "port",
    ),
    "Several nodes outside Slurm, as with torchrun": (
        "standalone", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "master_addr", "master_port", "local_addr",
    ),
    "Restarts": (
        "max_restarts", "restart_window", "max_same_failures", "no_standby", "standby_import", "stop_timeout",
    ),
    "Hangs": (
        "hang_limit", "data_hang_limit", "startup_limit", "unannounced_hang_limit", "idle_limit", "no_observe",
    ),
    "Companions": ("beside", "beside_health", "beside_gpus", "beside_public"),
    "Name, files and messages": (
        "run", "run_dir", "log_dir", "log_size", "redirects", "tee", "chosen", "take_over", "give_way", "events",
        "notify",
    ),
}  # fmt: skip


@click.command(
    cls=SectionedCommand,
    sections=_SECTIONS,
    context_settings={
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda token: full_name(token, _own_options()),
        "max_content_width": 110,
    },
    epilog=exit_codes(
        {
            0: "all ranks finished",
            1: "failed, restarts used up",
            2: "the command line is wrong",
            3: "interrupted",
            70: "the same failure came back",
            75: "stopped in good order, or too few nodes are left: run the job again",
            76: "another copy of the run has begun",
            127: "the program does not exist",
        }
    ),
)
@torchrun_options
@own_options
@click.argument("program")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def launch(program: str, args: tuple[str, ...], **options: Any) -> int:
    """Start and supervise the ranks of a job, where torchrun is used today.

    The flags and the environment of the ranks are torchrun's. All output of a rank goes to one log file and to the
    console. On several nodes start it once on each, with the same arguments; the folder of the run must be one that all
    of them see.

        opsd launch --nproc-per-node 8 train.py --lr 3e-4

        srun -N 4 opsd launch --nnodes 4 --nproc-per-node 8 train.py
    """
    _keep_standard_descriptors()
    os.environ.pop(NOTIFY, None)  # it is a secret that no rank needs
    kind = program_kind(options)
    try:
        found = Program.find(kind, program, args)
    except ProgramNotFound as error:
        click.echo(f"opsd: {error}", err=True)
        return exitcodes.NOT_FOUND
    refuse_launchers(found, options)
    settle_rendezvous(options)
    node = options["node_name"] or os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    shared = memory_root()
    prune(shared, time.time())
    several, named = is_several(options), options["run"]
    run = named or default_name(found, options)
    try:
        folders = RunFolders.create(
            run,
            folder=options["run_dir"],
            logs=options["log_dir"],
            shared=shared,
            alone=not (named or several or options["run_dir"]),
        )
        targets = [folders.memory / "events.jsonl", *([] if several else [folders.folder / "events.jsonl"])]
        events = EventLog(folders.run, node, targets + ([options["events"]] if options["events"] else []))
    except RunTakenError as error:
        raise click.ClickException(f"{error}{too_many_here(os.environ)}") from error
    except RunError as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        if exitcodes.is_full(error.errno):
            raise
        raise click.ClickException(f"{error.filename} cannot be written: {error.strerror}") from error
    settings = settings_of(found, folders.run, node, options)
    return _begin(settings, folders, events, options)


def _keep_standard_descriptors() -> None:
    """Put /dev/null where stdin, stdout or stderr is closed, before another file gets its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _own_options() -> list[str]:
    options = [parameter for parameter in launch.params if isinstance(parameter, click.Option)]
    return [name.lstrip("-") for option in options for name in option.opts]


def _begin(settings: Settings, folders: RunFolders, events: EventLog, options: dict[str, Any]) -> int:
    several = is_several(options)
    try:
        launchers = _find_launchers(options, settings, folders.folder, several=several)
        secret = job_secret(folders.folder) if several else b""
        replaces = _replaces(settings, folders, launchers, take_over=options["take_over"])
    except ClaimError as error:
        click.echo(f"opsd: {error.strerror}", err=True)
        return exitcodes.FAILED
    except RunOwnedError as error:
        click.echo(f"opsd: {error}", err=True)
        return exitcodes.FENCED
    except (RendezvousError, SecretError) as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"{error.filename} cannot be read: {error.strerror}") from error
    shape = shape_of(settings, options, launchers)
    if shape.segment > 1:
        launchers = replace(launchers, own=replace(launchers.own, domain=own_domain()))
    if several and (problem := imex_problem(launchers.own.domain)):
        print_message(problem)
    if problem := too_few_gpus(settings.local_size, os.environ):
        print_message(problem)
    if launchers.members[0] == launchers.own:
        keep_plan(settings.program, folders.folder, shape.most * settings.local_size)
    return _supervise(
        settings,
        folders,
        events,
        hang_limits_of(options),
        lambda node, notices: assemble_run(
            node,
            launchers,
            shape,
            secret,
            options["node_timeout"],
            options["master_port"],
            spare_readiness,
            notices,
            replaces=replaces,
        ),
        Sender(options["notify"]),
        stacks_suffix=f"-{settings.node}" if several else "",
        log_bytes=options["log_size"] << 20,
        besides=besides_of(options),
        startup_s=options["startup_limit"],
    )


def _replaces(settings: Settings, folders: RunFolders, launchers: Launchers, *, take_over: bool) -> int:
    """The newest claim that this launcher may replace: as the batch script has found, or as it finds itself."""
    found = os.environ.pop(REPLACES, "")
    if found.isdecimal():
        return int(found)
    start = start_of(settings.run, os.environ, launchers, settings.node)
    dead = f"{settings.node}-{folders.predecessor}"
    return replaceable(folders.folder, start, known_jobs, take_over=take_over, dead=dead)


def _find_launchers(options: dict[str, Any], settings: Settings, folder: Path, *, several: bool) -> Launchers:
    """The launchers of the run: as named, as Slurm says, or who comes to the run's folder. Raises RendezvousError."""
    place: RendezvousOptions | None = options["rendezvous"]
    if several and (place is None or options["nodes"] or slurm_nodes(os.environ)):
        port = options["port"] or default_port(settings.run, os.environ)
        return find_launchers(options["nodes"], settings.node, port, os.environ)
    if several and place is not None:
        start = f"{settings.run}, at {place.host}:{place.port}"
        limits_s = options["join_timeout"], options["last_call"]
        return join_rendezvous(place, folder, settings.node, options["port"], *limits_s, start=start)
    own = Member(settings.node, options["master_addr"] or LOOPBACK, options["port"] or DEFAULT_PORT)
    return Launchers(own, (own,))


def _supervise(
    settings: Settings,
    folders: RunFolders,
    events: EventLog,
    limits: HangLimits | None,
    new_control: Callable[[Supervisor, Notices], RunControl],
    sender: Sender,
    *,
    stacks_suffix: str = "",
    log_bytes: int,
    besides: Sequence[Beside] = (),
    startup_s: float = 1800.0,
) -> int:
    become_subreaper()
    if not has_own_proc():
        print_message(
            "/proc is that of another PID namespace, so processes cannot be told apart here, and the agent takes this "
            "run for dead: mount one of its own in the container (unshare --mount-proc, bwrap --proc /proc)"
        )
    loop = Loop()
    console = Console(log_bytes=log_bytes)
    starter = RankStarter(settings, folders, loop, console)
    hangs = None
    if limits is not None:
        hangs = HangWatch(limits, folders, loop, find_py_spy(), stacks_suffix, find_gpu_probe())
    loop.every(TRIM_S, console.trim)
    companions = Companions(besides, folders, loop, events, settings, startup_s=startup_s)
    supervisor = Supervisor(
        settings,
        folders,
        events,
        loop,
        starter=starter,
        hangs=hangs,
        console=console,
        others=sender.children,
        companions=companions,
    )
    notices = Notices(settings.run, settings.job, sender)
    server, control = ControlServer(folders.control, loop, supervisor.answer), new_control(supervisor, notices)
    try:
        code = supervisor.run(control)
        loop.ignore_signals()
    finally:
        server.close()
        starter.standby.close()
        console.close()
        for late in flush_all(FLUSH_S):
            print_message(f"some {late} are missing: they could not be written in time")
    if control.led and code != exitcodes.FENCED:
        end = Closing(f"ended with {code}: {supervisor.reason}")
        if code != exitcodes.REQUEUE or not settings.gives_way:
            end = print_closing_block(folders.folder, code, supervisor.reason, settings.resume)
            summarize_job(end.summary)
        notices.finished(code, supervisor.reason, end.summary, end.report)
        sender.flush(LAST_S)
    control.last_look()
    return code
