"""``opsd launch``: the command line, with torchrun's flags."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from opsd import exitcodes
from opsd.launch.environment import gpu_count
from opsd.launch.events import EventLog
from opsd.launch.loop import Loop
from opsd.launch.membership import SingleNode
from opsd.launch.process import become_subreaper
from opsd.launch.program import Program, ProgramNotFound
from opsd.launch.rundir import RUN_NAME, RunError, RunFolders, memory_root, new_run_name, prune
from opsd.launch.settings import Settings
from opsd.launch.supervisor import Supervisor

_FILE = click.Path(path_type=Path)


def _local_size(context: click.Context, parameter: click.Parameter, value: str) -> int:
    """Ranks on this node: a number, or cpu, gpu, auto."""
    gpus = gpu_count(os.environ)
    cpus = len(os.sched_getaffinity(0))
    counts = {"cpu": cpus, "gpu": gpus, "auto": gpus or cpus}
    if value == "gpu" and gpus == 0:
        raise click.BadParameter("this node has no GPU that may be used; give a number, or cpu")
    if value in counts:
        return counts[value]
    if not value.isdigit() or not 0 < int(value) <= 1024:
        raise click.BadParameter(f"{value!r} is not a number of ranks from 1 to 1024, nor cpu, gpu or auto")
    return int(value)


def _one_node(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if value not in ("1", "1:1"):
        raise click.BadParameter(f"{value!r}: this opsd launches on one node only; use --nnodes 1")
    return value


def _run_name(context: click.Context, parameter: click.Parameter, value: str | None) -> str:
    name = value or new_run_name()
    if not RUN_NAME.fullmatch(name):
        raise click.BadParameter(f"{name!r} may have letters, digits, dot, dash and underscore only, 63 at most")
    return name


@click.command(
    context_settings={
        "allow_interspersed_args": False,
        "token_normalize_func": lambda token: token.replace("_", "-"),
        "max_content_width": 110,
    },
)
@click.option("--nproc-per-node", "local_size", default="1", callback=_local_size, envvar="PET_NPROC_PER_NODE")
@click.option("--nnodes", default="1", callback=_one_node, envvar="PET_NNODES", help="1")
@click.option("--standalone", is_flag=True, help="Accepted; one node always meets by itself.")
@click.option("--max-restarts", type=click.IntRange(0), default=8, show_default=True, envvar="PET_MAX_RESTARTS")
@click.option("--master-addr", default="127.0.0.1", show_default=True, envvar="PET_MASTER_ADDR")
@click.option("--master-port", type=click.IntRange(1, 65535), envvar="PET_MASTER_PORT", help="Default: a fresh one.")
@click.option("--rdzv-id", envvar="PET_RDZV_ID", help="The ranks' TORCHELASTIC_RUN_ID; default: the run's name.")
@click.option("--role", default="default", envvar="PET_ROLE", help="The ranks' ROLE_NAME.")
@click.option("--log-dir", type=_FILE, envvar="PET_LOG_DIR", help="Where logs go; default: RUN_DIR/logs.")
@click.option("-m", "--module", is_flag=True, help="PROGRAM is a module, as in python -m.")
@click.option("--no-python", is_flag=True, help="PROGRAM is any executable.")
@click.option("--run-id", "run", callback=_run_name, help="Name of the run.")
@click.option("--run-dir", type=_FILE, help="Folder kept for the run; default: ~/.local/state/opsd/runs/RUN.")
@click.option("--events", type=_FILE, help="Also write the events to FILE, one JSON object a line.")
@click.argument("program")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def launch(
    local_size: int,
    nnodes: str,
    standalone: bool,
    max_restarts: int,
    master_addr: str,
    master_port: int | None,
    rdzv_id: str | None,
    role: str,
    log_dir: Path | None,
    module: bool,
    no_python: bool,
    run: str,
    run_dir: Path | None,
    events: Path | None,
    program: str,
    args: tuple[str, ...],
) -> int:
    """Start and supervise the ranks of a job, where torchrun is used today."""
    if module and no_python:
        raise click.UsageError("--module and --no-python exclude each other; leave one out.")
    try:
        found = Program.find("module" if module else "executable" if no_python else "script", program, args)
    except ProgramNotFound as error:
        click.echo(f"opsd launch: {error}", err=True)
        return exitcodes.NOT_FOUND
    prune(memory_root(), time.time())
    try:
        folders = RunFolders.create(run, run_dir, log_dir)
        targets = [folders.memory / "events.jsonl", folders.folder / "events.jsonl"]
        log = EventLog(run, _node(), targets + ([events] if events else []))
    except RunError as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"{error.filename} cannot be written: {error.strerror}") from error
    settings = Settings(
        program=found,
        run=run,
        job=os.environ.get("SLURM_JOB_ID", ""),
        node=_node(),
        local_size=local_size,
        run_id=rdzv_id or run,
        role=role,
        max_restarts=max_restarts,
    )
    become_subreaper()
    return Supervisor(settings, folders, log, SingleNode(local_size, master_addr, master_port), Loop()).run()


def _node() -> str:
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename
