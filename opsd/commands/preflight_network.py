"""``opsd preflight network``: the same command on every node, for instance under srun."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import click
from rich.console import Console

from opsd import exitcodes
from opsd.commands.options import Seconds, exit_codes, option, report_options, report_targets
from opsd.commands.output import warn
from opsd.commands.settings import BadConfig
from opsd.config import Settings
from opsd.preflight import view
from opsd.preflight.command import HISTORY, keep, yardsticks
from opsd.preflight.history import History
from opsd.preflight.network.check import Interrupted, Scope, label_of, run_check, slowest_rate
from opsd.preflight.network.member import Participant, leading, take_part
from opsd.preflight.network.plan import effort
from opsd.preflight.network.rendezvous import Place, RendezvousError, place, read_switches, resolve, use_interface
from opsd.preflight.report import Report
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
