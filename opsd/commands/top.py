"""``opsd top``: a live view of a node's GPUs, ranks and incidents."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from opsd import exitcodes
from opsd.commands.agent_client import Agent, NoAgent, Refused, with_agent
from opsd.commands.options import Finite, option
from opsd.commands.output import fail, plain_table, printable, rank_table

_SEVERITIES = {"critical": "bold red", "warning": "yellow", "info": "dim"}
MAX_INCIDENTS = 8


@click.command()
@with_agent
@option("--interval", type=Finite(0.2, 60), default=1.0, help="Seconds between looks.")
@option("--once", is_flag=True, help="Print once and exit.")
def top(agent: Agent, interval: float, once: bool) -> int:
    """Watch the GPUs, ranks and incidents of a node live; q or Ctrl-C ends it.

    Ends with 1 if no agent answers at the start; waits if the agent stops answering later.
    """
    console = Console(highlight=False)
    try:
        view = look(agent)
    except (NoAgent, Refused) as error:
        fail(str(error))
    if once or not console.is_terminal:
        console.print(view)
        return exitcodes.OK
    with (
        keys() as quit_within,
        Live(view, console=console, screen=True, auto_refresh=False) as live,
    ):
        while not quit_within(interval):
            try:
                view = look(agent)
                live.update(view, refresh=True)
            except (NoAgent, Refused) as error:
                live.update(Group(Text(str(error), style="red"), view), refresh=True)
    return exitcodes.OK


def look(agent: Agent) -> RenderableType:
    """The current state of the node. Raises NoAgent and Refused."""
    status = agent.get("/api/v1/status")
    incidents = agent.get("/api/v1/incidents", state="current", limit=MAX_INCIDENTS)["incidents"]
    return screen(printable(status), [printable(incident) for incident in incidents], time.time())


def screen(status: Mapping[str, Any], incidents: list[Mapping[str, Any]], wall: float) -> RenderableType:
    """The complete screen. All texts in ``status`` and ``incidents`` must be safe for the terminal."""
    title = f"[bold]{status['node']}[/bold]  opsd {status['version']}, mode {status['mode']}"
    age = status["tick_age_s"]
    late = f"  [red]the agent has not ticked for {age:.0f} s[/red]" if age > 5 else ""
    parts: list[RenderableType] = [
        Text.from_markup(f"{title}, {time.strftime('%H:%M:%S', time.localtime(wall))}{late}")
    ]
    for table in (_gpus(status), rank_table(status["ranks"])):
        if table.row_count:
            parts += [Text(), table]
    return Group(*parts, Text(), _incidents(incidents, wall))


def _gpus(status: Mapping[str, Any]) -> Table:
    table = plain_table("GPU", "use", "", "temp", "power", "SM clock", "memory", "")
    for gpu in status["gpus"]:
        use = gpu["utilization_percent"]
        table.add_row(
            str(gpu["index"]),
            _Bar(use),
            _value(use, "%"),
            _value(gpu["temperature_celsius"], " °C"),
            _value(gpu["power_watts"], " W"),
            _value(gpu["sm_clock_mhz"], " MHz"),
            _value(gpu["memory_used_mib"], " MiB"),
            f"[red]lost: {gpu['lost']}[/red]" if gpu["lost"] else "[yellow]simulated[/yellow]" * gpu["simulated"],
        )
    return table


def _incidents(incidents: list[Mapping[str, Any]], wall: float) -> RenderableType:
    if not incidents:
        return Text("no incidents", style="green")
    table = plain_table("incident", "state", "since", "symptoms")
    for incident in incidents:
        table.add_row(
            f"[{_SEVERITIES[incident['severity']]}]{incident['summary']}[/]",
            incident["state"],
            f"{max(0.0, wall - incident['opened_at']):.0f} s",
            str(len(incident["symptoms"]) or ""),
        )
    return table


class _Bar:
    """A percentage as a bar, which shrinks on narrow terminals."""

    def __init__(self, percent: float | None) -> None:
        self._share = min(max(percent or 0.0, 0.0), 100.0) / 100

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(4, options.max_width), min(20, options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        full = round(options.max_width * self._share)
        yield Text.assemble(("█" * full, "green"), ("░" * (options.max_width - full), "dim"))


def _value(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.0f}{unit}"


@contextlib.contextmanager
def keys() -> Iterator[Callable[[float], bool]]:
    """A function that waits for some seconds and returns whether q or Ctrl-C was pressed meanwhile.

    Ctrl-C interrupts nothing else inside the block, so that the screen is always restored. The terminal delivers keys
    immediately and without echo; its settings are restored afterwards.
    """
    interrupted, tell = os.pipe()
    handler = signal.signal(signal.SIGINT, lambda *_: os.write(tell, b"q"))
    try:
        if not sys.stdin.isatty():
            yield lambda seconds: _quit_pressed([interrupted], seconds)
            return
        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
        try:
            tty.setcbreak(terminal)
            yield lambda seconds: _quit_pressed([interrupted, terminal], seconds)
        finally:
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)
    finally:
        signal.signal(signal.SIGINT, handler)
        os.close(interrupted)
        os.close(tell)


def _quit_pressed(descriptors: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        for ready in select.select(descriptors, [], [], left)[0]:
            if os.read(ready, 1) in (b"q", b"Q", b""):
                return True
    return False
