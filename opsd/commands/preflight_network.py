"""``opsd preflight network``: the same command on every node, for instance under srun."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console

from opsd import __version__, exitcodes
from opsd.commands.options import Seconds, exit_codes, option, report_options, report_targets
from opsd.commands.output import warn
from opsd.commands.settings import BadConfig
from opsd.config import Settings
from opsd.dependents import Dependents
from opsd.preflight import drill, view
from opsd.preflight.base import Context, CouldNotRunError, Interrupted, Verdict
from opsd.preflight.command import HISTORY, keep, yardsticks
from opsd.preflight.drill import Drill
from opsd.preflight.history import History
from opsd.preflight.judge import judge
from opsd.preflight.network.member import Participant, leading, take_part
from opsd.preflight.network.plan import Scope, effort, label_of, run_check, slowest_rate
from opsd.preflight.network.rendezvous import Place, RendezvousError, place, read_switches, resolve, use_interface
from opsd.preflight.report import Report, Result
from opsd.preflight.training import config_of, devices_of
from opsd.slurm import leaf_paths
from opsd.slurm.connect import choose
from opsd.slurm.port import SlurmError

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command(
    epilog=exit_codes(
        {
            0: "the network is fine",
            1: "it is not",
            2: "the command line is wrong",
            3: "interrupted",
        }
    )
)
@option("--hosts", default="", metavar="HOSTLIST", help="All nodes, e.g. n[01-04]; by default those of the job.")
@option("--node", type=click.IntRange(0), help="Which of them this is, from 0 on; by default SLURM_NODEID.")
@option("--rendezvous", default="", metavar="HOST[:PORT]", help="Where they meet; by default the first node.")
@option("--profile", type=click.Choice(["quick", "standard"]), default="quick")
@option("--topology", type=_FILE, help="Which node is on which switch: a topology.conf; by default the cluster's.")
@option("--search", "only_search", is_flag=True, help="Only search for bad nodes and links.")
@option("--note", is_flag=True, help="Two nodes: keep in their Slurm comments how the way between their leaves is.")
@option("--join-timeout", type=Seconds(0), default=120.0, help="How long to wait for nodes.")
@report_options
@click.pass_obj
def network(
    settings: Settings,
    /,
    hosts: str,
    node: int | None,
    rendezvous: str,
    profile: str,
    topology: Path | None,
    only_search: bool,
    note: bool,
    join_timeout: float,
    **files: Path | None,
) -> int:
    """Measure the network between nodes and search it for what is bad.

    Run it on every node at once; the first one shows the report:

        srun --ntasks-per-node=1 opsd preflight network
    """
    # Waiting for an order wakes up once a second, which torch's store would tell of each time, and of an error it tells
    # with the stack of its own functions.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    try:
        here, switch_of = place(hosts, node, rendezvous), read_switches(topology, warn)
    except RendezvousError as error:
        raise BadConfig(str(error)) from error
    pair = _pair(here, switch_of) if note else None
    try:
        _resolve(here)
        gpus = _gpus()
    except BadConfig:
        if pair is not None and here.node == 0:
            _note(pair, switch_of, time.time(), Console(stderr=True), passed=None)
        raise
    use_interface(here.host)
    participant = Participant(here, max(1, gpus), "nccl" if gpus else "gloo", join_timeout)
    scope = Scope(profile, effort(profile, gpus=gpus > 0), switch_of, only_search)
    try:
        if here.node != 0:
            take_part(participant)
            return exitcodes.OK
        return _lead(participant, scope, settings, report_targets(files), pair)
    except RuntimeError as error:
        click.echo(f"opsd: {here.host}:{here.port}: {str(error).partition(chr(10))[0]}", err=True)
        return exitcodes.FAILED


def _resolve(here: Place) -> None:
    try:
        resolve(here)
    except RendezvousError as error:
        raise BadConfig(str(error)) from error


def _gpus() -> int:
    try:
        import torch
    except ImportError:
        raise BadConfig(
            f"torch is not installed in {sys.executable}: install it with `deploy/install --train`, or start this with "
            "the Python of the training: PYTHON -m opsd preflight network"
        ) from None
    return torch.cuda.device_count()


def _pair(here: Place, switch_of: Mapping[str, str]) -> tuple[str, str]:
    """The two nodes, below different leaf switches. Raises BadConfig."""
    if len({switch_of.get(name, "") for name in here.names} - {""}) != len(here.names) or len(here.names) != 2:
        raise BadConfig(
            "--note needs two nodes below two leaf switches of the topology; `opsd nodes due --pairs` names some"
        )
    one, other = here.names
    return one, other


def _lead(
    participant: Participant,
    scope: Scope,
    settings: Settings,
    targets: dict[str, Path],
    pair: tuple[str, str] | None,
) -> int:
    console = Console(stderr=any(str(path) == "-" for path in targets.values()))
    history = History(settings.agent.state_dir / HISTORY)
    label = label_of(participant)
    stop: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _frame: stop.append(received))

    with leading(participant, scope.effort.deadline_s) as coordinator, console.status("") as status:

        def say(what: str) -> None:
            if stop:
                raise Interrupted
            status.update(what)

        report = run_check(
            participant,
            coordinator,
            scope,
            lambda c: yardsticks(c, label, settings.preflight, history, None, console),
            say,
        )
    view.show(report, console)
    keep(report, targets, history, console)
    if pair is not None and not report.interrupted:
        _note(pair, scope.switch_of, report.started, console, passed=report.passed, rate=slowest_rate(report))
    return exit_code(report)


def _note(
    pair: tuple[str, str],
    switch_of: Mapping[str, str],
    at: float,
    console: Console,
    *,
    passed: bool | None,
    rate: float = 0.0,
) -> None:
    try:
        leaf_paths.note(choose().slurm, pair, switch_of, at, passed=passed, rate=rate)
    except SlurmError as error:
        console.print(f"opsd: Slurm: {error}; the measurement is not in the nodes' comments", soft_wrap=True)


def exit_code(report: Report) -> int:
    """The documented exit code of a report."""
    if report.interrupted:
        return exitcodes.INTERRUPTED
    return exitcodes.OK if report.passed else exitcodes.FAILED


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
        here.names[here.node], "drill", 0.0, settings=settings.preflight, overrides=train_set,
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
            drill.take_part(this, timeout, lambda: bool(stop))
            return exitcodes.INTERRUPTED if stop else exitcodes.OK
        targets = report_targets(files)
        code = _lead_drill(this, settings, targets, timeout, stop)
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
    if any((folder / name).exists() for name in (drill.VICTIM, *((drill.METRICS,) if first else ()))):
        raise BadConfig(f"{folder} holds an earlier drill; remove it, or name another one with --folder")
    return folder


def _lead_drill(this: Drill, settings: Settings, targets: dict[str, Path], within_s: float, stop: list[int]) -> int:
    console = Console(stderr=any(str(path) == "-" for path in targets.values()))
    history, label = History(settings.agent.state_dir / HISTORY), f"drill of {this.active} nodes"
    began, clock = time.time(), time.monotonic()
    empty = Result(drill.CHECK.name, drill.CHECK.title, Verdict.COULD_NOT_RUN, reason="interrupted before it was done")
    try:
        with console.status("") as status:
            outcome = drill.lead(this, within_s, lambda: bool(stop), status.update)
    except Interrupted:
        result = empty
    else:
        took = time.monotonic() - clock
        known = yardsticks(drill.CHECK, label, settings.preflight, history, None, console)
        result = replace(judge(drill.CHECK, outcome, began, known), seconds=took)
    report = Report(label, "drill", __version__, began, time.time(), (result,), result is empty)
    view.show(report, console)
    keep(report, targets, history, console)
    return exit_code(report)
