"""``opsd preflight drill``: the same command on every node, for instance under srun."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import time
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console

from opsd import __version__, exitcodes
from opsd.commands.options import Seconds, exit_codes, option, report_options, report_targets
from opsd.commands.preflight_network import exit_code
from opsd.commands.settings import BadConfig
from opsd.config import Settings
from opsd.dependents import Dependents
from opsd.preflight import view
from opsd.preflight.base import Context, CouldNotRunError, Verdict
from opsd.preflight.command import HISTORY, keep, yardsticks
from opsd.preflight.drill import CHECK, METRICS, VICTIM, Drill, Interrupted, lead, take_part
from opsd.preflight.history import History
from opsd.preflight.judge import judge
from opsd.preflight.network.rendezvous import RendezvousError, place, use_interface
from opsd.preflight.report import Report, Result
from opsd.preflight.training import config_of, devices_of

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command(
    epilog=exit_codes(
        {
            0: "training went on",
            1: "it did not",
            2: "the command line is wrong",
            3: "interrupted",
        }
    )
)
@option("--train", required=True, metavar="CONFIG", help="The run.")
@option("--train-set", multiple=True, metavar="SECTION.KEY=VALUE", help="Override one setting of that run.")
@option("--folder", type=click.Path(path_type=Path), help="A new folder that all nodes see.")
@option("--spares", type=click.IntRange(0), help="Nodes that stand by; by default 1 of three and more.")
@option("--nproc-per-node", "ranks", type=click.IntRange(1), help="Ranks on each node; by default one per GPU.")
@option("--hosts", default="", metavar="HOSTLIST", help="All nodes, e.g. n[01-04]; by default those of the job.")
@option("--node", type=click.IntRange(0), help="Which of them this is, from 0 on; by default SLURM_NODEID.")
@option("--timeout", type=Seconds(0), default=900.0, help="For all of it.")
@report_options
@click.pass_obj
def node_drill(
    settings: Settings,
    /,
    train: str,
    train_set: tuple[str, ...],
    folder: Path | None,
    spares: int | None,
    ranks: int | None,
    hosts: str,
    node: int | None,
    timeout: float,
    **files: Path | None,
) -> int:
    """Train on several nodes, kill one, and demand that training goes on by itself.

    Run it on every node at once; the first one shows the report. --no-kill keeps Slurm from ending the rest:

        srun --no-kill --ntasks-per-node=1 opsd preflight drill --train run.toml
    """
    try:
        here = place(hosts, node, "")
    except RendezvousError as error:
        raise BadConfig(str(error)) from error
    use_interface(here.names[0] if here.node else here.names[-1])
    if spares is None:
        spares = 1 if len(here.names) > 2 else 0
    if len(here.names) - spares < 2:
        raise BadConfig(f"a node can be lost only where two train; there are {len(here.names)}, and {spares} spares")
    context = Context(
        here.names[here.node], "drill", 0.0, gpus=settings.preflight.gpus, overrides=train_set,
        train=str(Path(train).absolute()) if train.endswith(".toml") else train,
    )  # fmt: skip
    try:
        config = config_of(context)
    except CouldNotRunError as error:
        raise BadConfig(str(error)) from error
    stop: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _frame: stop.append(received))
    shared = _folder(folder, settings, first=here.node == 0)
    with Dependents() as mine:
        mine.claim_descendants()
        memory = mine.temporary("opsd-drill-", Path("/dev/shm"))  # noqa: S108 (mkdtemp makes the folder in it)
        this = Drill(
            context,
            config,
            here.names,
            here.node,
            spares,
            ranks or devices_of(context),
            shared,
            memory,
            here.port,
        )
        if here.node != 0:
            take_part(this, timeout, lambda: bool(stop))
            return exitcodes.INTERRUPTED if stop else exitcodes.OK
        targets = report_targets(files)
        code = _lead(this, settings, targets, timeout, stop)
    if folder is None and code == exitcodes.OK:
        shutil.rmtree(shared, ignore_errors=True)
    return code


def _folder(given: Path | None, settings: Settings, *, first: bool) -> Path:
    """The drill's folder; below the shared one of the settings, and removed if all went well, if none was named.

    The first node refuses a folder in which a run has trained: its checkpoints and events would count as the drill's.
    """
    if given is None and not settings.preflight.shared_dir:
        raise BadConfig("name a folder that all nodes see with --folder, or set preflight.shared_dir")
    step = "-".join(os.environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    folder = (given or Path(settings.preflight.shared_dir, f"opsd-drill-{step}")).absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = folder.lstat()
    except OSError as error:
        raise BadConfig(f"{folder} cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(made.st_mode) or made.st_uid != os.geteuid():
        raise BadConfig(f"{folder} was made by somebody else; name another one with --folder")
    if any((folder / name).exists() for name in (VICTIM, *((METRICS,) if first else ()))):
        raise BadConfig(f"{folder} holds an earlier drill; remove it, or name another one with --folder")
    return folder


def _lead(this: Drill, settings: Settings, targets: dict[str, Path], within_s: float, stop: list[int]) -> int:
    console = Console(stderr=any(str(path) == "-" for path in targets.values()))
    history, label = History(settings.agent.state_dir / HISTORY), f"drill of {this.active} nodes"
    began, clock = time.time(), time.monotonic()
    empty = Result(CHECK.name, CHECK.title, Verdict.COULD_NOT_RUN, reason="interrupted before it was done")
    try:
        with console.status("") as status:
            outcome = lead(this, within_s, lambda: bool(stop), status.update)
    except Interrupted:
        result = empty
    else:
        took = time.monotonic() - clock
        known = yardsticks(CHECK, label, settings.preflight, history, None, console)
        result = replace(judge(CHECK, outcome, began, known), seconds=took)
    report = Report(label, "drill", __version__, began, time.time(), (result,), result is empty)
    view.show(report, console)
    keep(report, targets, history, console)
    return exit_code(report)
