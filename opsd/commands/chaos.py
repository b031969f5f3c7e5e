"""``opsd chaos``: deliberate faults, confirmed, limited in time, and undone."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import Any

import click

from opsd import exitcodes
from opsd.chaos import faults, guard, target
from opsd.chaos.faults import InjectedFault
from opsd.chaos.guard import FaultReporter, perform
from opsd.chaos.undo import ChaosError
from opsd.checkpoints.manifest import CheckpointError
from opsd.commands.options import Group, exit_codes, option, options
from opsd.rundir import memory_root

MAX_S = 600.0
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0}
_SIZES = {"M": 1 << 20, "G": 1 << 30}


def _seconds(_ctx: click.Context, _param: click.Parameter, value: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|min)?", value)
    seconds = float(match[1]) * _UNITS[match[2] or "s"] if match else 0.0
    if not 0 < seconds <= MAX_S:
        raise click.BadParameter(f"{value!r} is not a time like 30s or 2m, at most {MAX_S / 60:.0f}m")
    return seconds


def _bytes(_ctx: click.Context, _param: click.Parameter, value: str) -> int:
    match = re.fullmatch(r"(\d+)([MG])B?", value)
    if not match:
        raise click.BadParameter(f"{value!r} is not a size like 500M or 2G")
    return int(match[1]) * _SIZES[match[2]]


def _like(pattern: re.Pattern[str], example: str) -> Callable[[click.Context, click.Parameter, str], str]:
    def check(_ctx: click.Context, _param: click.Parameter, value: str) -> str:
        if value and not pattern.fullmatch(value):
            raise click.BadParameter(f"{value!r} is not of the form {example}")
        return value

    return check


_of_run = option("--run", "run_name", metavar="RUN", help="The run; not needed if only one is active.")
_of_rank = option("--rank", type=click.IntRange(0), help="The rank; by default the lowest on this node.")
_any_node = option("--force", is_flag=True, help="Also on a node without an active run.")
_confirmed = options(
    option("--yes", is_flag=True, help="Do not ask."),
    option("--json", "as_json", is_flag=True, help="Report events as JSON lines."),
)
_for = option("--for", "for_s", callback=_seconds, default="30s", help="How long; at most 10m.")


def _momentary(command: Callable[..., InjectedFault]) -> Callable[..., int]:
    """Cause the fault that ``command`` returns, once it is confirmed; adds --yes and --json."""

    @wraps(command)
    def run(yes: bool, as_json: bool, for_s: float = 0.0, **rest: Any) -> int:
        fault = command(**rest)
        _confirm(fault, for_s, yes=yes)
        return perform(fault, for_s, guard.folder_of(memory_root(), os.geteuid()), FaultReporter(as_json))

    return _confirmed(run)


def _lasting(command: Callable[..., InjectedFault]) -> Callable[..., int]:
    """The same for a fault that is undone after --for."""
    return _for(_momentary(command))


class _Group(Group):
    """Turns ChaosError into one sentence and exit code 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (ChaosError, CheckpointError) as error:
            raise click.UsageError(str(error)) from error
        except BrokenPipeError:
            raise
        except OSError as error:
            raise click.UsageError(f"{error.filename or 'this node'}: {error.strerror}") from error


@click.group(
    cls=_Group,
    epilog=exit_codes(
        {
            0: "the fault was caused and undone",
            1: "it could not be caused or undone",
            2: "the command line is wrong, no such run, or not confirmed",
            3: "interrupted, and undone",
        }
    ),
)
def chaos() -> None:
    """Cause one fault on this node, and undo it.

    For game days and tests. Each command finds the run in shared memory, says what it will do and asks for
    confirmation. Lasting faults are undone after --for, at Ctrl-C, and even if this command is killed.
    """


@chaos.command("kill-rank")
@_of_run
@_of_rank
@_momentary
def kill_rank(run_name: str | None, rank: int | None) -> InjectedFault:
    """Kill one rank (SIGKILL)."""
    return faults.kill_rank(_owned_run(run_name), rank)


@chaos.command("stop-rank")
@_of_run
@_of_rank
@_lasting
def stop_rank(run_name: str | None, rank: int | None) -> InjectedFault:
    """Stop one rank (SIGSTOP) in any phase, then continue it."""
    return faults.stop_rank(_owned_run(run_name), rank)


@chaos.command("hang-collective")
@_of_run
@_of_rank
@option("--within", "within_s", callback=_seconds, default="30s", help="Limit of the wait for a collective.")
@_lasting
def hang_collective(run_name: str | None, rank: int | None, within_s: float) -> InjectedFault:
    """Stop one rank while it is in a collective, so that all others wait for it there."""
    return faults.hang_collective(_owned_run(run_name), rank, within_s)


@chaos.command("kill-node")
@_of_run
@option(
    "--method",
    type=click.Choice(["processes", "sysrq"]),
    default="processes",
    help="Kill all processes of the run on this node, or reboot the node.",
)
@option("--node", help="The name of this node; --method sysrq requires it as confirmation.")
@_momentary
def kill_node(run_name: str | None, method: str, node: str | None) -> InjectedFault:
    """Lose this node: kill all its processes of the run, or reboot it without warning."""
    run = target.find(memory_root(), run_name)
    if method == "processes":
        target.become_owner(run)
        return faults.kill_node(run)
    _need_root("a reboot")
    here = os.uname().nodename
    if node is None and not click.get_current_context().params["yes"]:
        _need_terminal()
        node = click.prompt(f"This reboots {here}, with every job on it. Type its name", err=True)
    if node != here:
        raise click.UsageError(f"this node is {here}, not {node}: use --node {here} to reboot it")
    return faults.reboot_node(here)


@chaos.command("corrupt-checkpoint")
@_of_run
@option("--step", type=click.IntRange(0), help="Step of the checkpoint; by default the newest.")
@option("--forget-memory", is_flag=True, help="Also remove the copies of it in shared memory.")
@option("--leave", is_flag=True, help="Do not undo it.")
@_lasting
def corrupt_checkpoint(run_name: str | None, step: int | None, forget_memory: bool, leave: bool) -> InjectedFault:
    """Flip one bit in the largest file of a checkpoint, and flip it back."""
    return faults.corrupt_checkpoint(_owned_run(run_name), step, forget_memory=forget_memory, leave=leave)


@chaos.command("fill-disk")
@click.argument("mount", type=click.Path(exists=True, file_okay=False, path_type=Path))
@option("--leave", callback=_bytes, default="100M", help="How much stays free (500M, 2G).")
@_any_node
@_lasting
def fill_disk(mount: Path, leave: int, force: bool) -> InjectedFault:
    """Fill the file system of the folder MOUNT. The space is freed even if every process of opsd is killed."""
    _need_run(force)
    return faults.fill_disk(mount.absolute(), leave)


@chaos.command("partition")
@option("--peer", "peers", multiple=True, required=True, metavar="HOST", help="Name or address; may be repeated.")
@_any_node
@_lasting
def partition(peers: tuple[str, ...], force: bool) -> InjectedFault:
    """Cut this node off from others: it stops sending to them. Needs root."""
    _need_root("a route")
    _need_run(force)
    return faults.partition(peers)


@chaos.command("slow-node")
@option("--interface", help="The interface; by default that of the default route.")
@option("--rate", callback=_like(faults.RATE, "100mbit"), default="", help="At most so much (100mbit).")
@option("--delay", callback=_like(faults.DELAY, "50ms"), default="", help="So much later (50ms).")
@option("--loss", callback=_like(faults.LOSS, "1%"), default="", help="Lose so many packets (1%).")
@_any_node
@_lasting
def slow_node(interface: str | None, rate: str, delay: str, loss: str, force: bool) -> InjectedFault:
    """Make this node slow: shape what it sends. Needs root."""
    _need_root("traffic control")
    _need_run(force)
    if not (rate or delay or loss):
        raise click.UsageError("say how slow: --rate, --delay or --loss")
    return faults.slow_node(interface or faults.default_interface(), rate=rate, delay=delay, loss=loss)


@chaos.command("list")
@option("--json", "as_json", is_flag=True, help="Print JSON lines.")
def list_command(as_json: bool) -> int:
    """List the faults that are in effect on this node or were left over."""
    found = list(guard.find(memory_root()))
    for uid, record in found:
        if as_json:
            click.echo(json.dumps({**asdict(record), "uid": uid, "state": record.state}))
        else:
            click.echo(f"{record.id}: {record.text} – {record.state}")
    if not found and not as_json:
        click.echo("no fault of opsd chaos is in effect here")
    return exitcodes.OK


@chaos.command("undo")
@click.argument("ids", nargs=-1, metavar="[ID]...")
def undo(ids: tuple[str, ...]) -> int:
    """Undo faults now: those named ID, or all of this user."""
    found = list(guard.find(memory_root()))
    if unknown := {*ids} - {record.id for _, record in found}:
        raise click.UsageError(f"no fault {', '.join(sorted(unknown))} is in effect here: see opsd chaos list")
    code = exitcodes.OK
    for uid, record in found:
        if ids and record.id not in ids:
            continue
        try:
            if uid != os.geteuid():
                raise ChaosError(f"it belongs to user {uid}, who must undo it")
            click.echo(f"{record.id}: {guard.end(guard.folder_of(memory_root(), uid), record)}")
        except (ChaosError, OSError) as error:
            click.echo(f"{record.id}: NOT UNDONE: {error}", err=True)
            code = exitcodes.FAILED
    return code


def _confirm(fault: InjectedFault, for_s: float, *, yes: bool) -> None:
    """Ask for confirmation. Raises click.UsageError without a terminal, and if the answer is no."""
    lasts = "" if fault.undo is None else f" for {for_s:g} s"
    click.echo(f"opsd chaos {fault.name} {fault.text}{lasts}.", err=True)
    for note in fault.notes:
        click.echo(f"  - {note}", err=True)
    if yes:
        return
    _need_terminal()
    if not click.confirm("Do it?", err=True):
        raise click.UsageError("not confirmed; nothing was done")


def _need_terminal() -> None:
    """Raise click.UsageError if nobody can be asked."""
    if not sys.stdin.isatty():
        raise click.UsageError("there is no terminal to confirm this at: use --yes")


def _owned_run(name: str | None) -> target.Run:
    run = target.find(memory_root(), name)
    target.become_owner(run)
    return run


def _need_root(what: str) -> None:
    if os.geteuid() != 0:
        raise click.UsageError(f"{what} needs root: use sudo")


def _need_run(force: bool) -> None:
    if not force and not target.runs(memory_root()):
        raise click.UsageError("no run of opsd launch is active on this node: use --force to do it anyway")
