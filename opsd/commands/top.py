"""``opsd top``: a live view of a node's GPUs, ranks and incidents.

The screen shows what fits, in the order in which it matters; the rest is counted.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import click
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from opsd import exitcodes
from opsd.commands.agent_client import Agent, NoAgent, Refused, with_agent
from opsd.commands.gpu_state import gpu_state, heat_style
from opsd.commands.options import Seconds, option
from opsd.commands.output import fail, output_console, plain_table, printable, rank_table
from opsd.words import count, duration

Record = Mapping[str, Any]

VIEWS: Final = ("overview", "GPUs", "ranks", "incidents")
SORTS: Final = ("rank", "slowest step", "longest phase")
HELP: Final = "1 overview  2 GPUs  3 ranks  4 incidents  ↑↓ scroll  s sort  q quit"
_BARS = "▁▂▃▄▅▆▇█"
_POINTS = 240
_SEVERITIES = {"critical": "bold red", "warning": "yellow", "info": "dim"}
_LEAST_ROWS = 3
_MOST_INCIDENTS = 8


@dataclass
class Curves:
    """Loss and tokens/s of each run on this node, by step, from what its rank pages have shown so far."""

    loss: dict[str, deque[float]] = field(default_factory=dict)
    speed: dict[str, deque[float]] = field(default_factory=dict)
    _seen: dict[str, int] = field(default_factory=dict)

    def add(self, ranks: Iterable[Record]) -> None:
        """Take in the ranks of the agent's answer; the loss is that of the first rank that reports one."""
        runs: dict[str, list[Record]] = {}
        for rank in ranks:
            runs.setdefault(rank["run"], []).append(rank)
        for run, members in runs.items():
            first = min(members, key=lambda rank: rank["rank"])
            steps = first["steps"]
            if steps and steps[-1]["step"] < self._seen.get(run, -1):
                self._seen[run] = -1  # it goes on from a checkpoint
            for step in steps:
                if step["step"] <= self._seen.get(run, -1):
                    continue
                self._seen[run] = step["step"]
                tokens = sum(s["tokens"] for m in members for s in m["steps"] if s["step"] == step["step"])
                self._append(self.loss, run, step["loss"])
                self._append(self.speed, run, tokens / step["duration_s"] if tokens and step["duration_s"] else None)

    def _append(self, where: dict[str, deque[float]], run: str, value: float | None) -> None:
        if value is not None and math.isfinite(value):
            where.setdefault(run, deque(maxlen=_POINTS)).append(value)


@dataclass
class View:
    """What is looked at: one of ``VIEWS``, how ranks are sorted, and how far it is scrolled."""

    name: str = VIEWS[0]
    sort: str = SORTS[0]
    offset: int = 0

    def press(self, key: str) -> None:
        """Carry out a key."""
        if key in ("1", "2", "3", "4"):
            self.name, self.offset = VIEWS[int(key) - 1], 0
        elif key == "\t":
            self.name, self.offset = VIEWS[(VIEWS.index(self.name) + 1) % len(VIEWS)], 0
        elif key == "s":
            self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
        elif key in ("down", "j"):
            self.offset += 1
        elif key in ("up", "k"):
            self.offset = max(0, self.offset - 1)


def screen(
    status: Record, incidents: Sequence[Record], wall: float, *,
    view: View | None = None, curves: Curves | None = None, height: int | None = None, width: int = 120,
) -> RenderableType:  # fmt: skip
    """The complete screen, ``height`` lines high, None for all there is. All texts must be safe for the terminal."""
    view, curves = view or View(), curves or Curves()
    left = 10_000 if height is None else height - 3
    parts: list[RenderableType] = [_title(status, view, wall)]
    if view.name == "incidents":
        parts += [Text(), *_incidents_in_full(incidents, wall, view, left)]
    elif view.name == "ranks":
        parts += [Text(), *_cut(rank_table, _sorted(status["ranks"], view.sort), left - 2, view)]
    elif view.name == "GPUs":
        parts += [Text(), *_cut(partial(_gpus, status, incidents), status["gpus"], left - 2, view)]
    else:
        parts += _overview(status, incidents, wall, view, curves, left, width)
    if height is not None:
        parts += [Text(), Text(HELP, style="dim", no_wrap=True, overflow="ellipsis")]
    return Group(*parts)


def _title(status: Record, view: View, wall: float) -> Text:
    age = status["tick_age_s"]
    late = f"  [red]the agent has not ticked for {age:.0f} s[/red]" if age > 5 else ""
    shown = "" if view.name == VIEWS[0] else f"  [bold]{view.name}[/bold]"
    title = f"[bold]{status['node']}[/bold]  opsd {status['version']}, mode {status['mode']}"
    return Text.from_markup(f"{title}, {time.strftime('%H:%M:%S', time.localtime(wall))}{late}{shown}")


def _overview(
    status: Record, incidents: Sequence[Record], wall: float, view: View, curves: Curves, left: int, width: int
) -> Iterator[RenderableType]:
    """As many GPUs and ranks as fit beside the runs and incidents, which come last, where the eye is."""
    runs = list(_runs(status, curves, width))
    left -= (1 + len(runs) if runs else 0) + 3 + min(len(incidents), _MOST_INCIDENTS)
    gpus, ranks = status["gpus"], _sorted(status["ranks"], view.sort)
    if gpus:
        kept = min(len(ranks), _LEAST_ROWS) + 2 if ranks else 0
        rows = max(left - 2 - kept, _LEAST_ROWS)
        yield from (Text(), *_cut(partial(_gpus, status, incidents), gpus, rows, View()))
        left -= 2 + min(len(gpus), rows)
    if ranks:
        yield from (Text(), *_cut(rank_table, ranks, left - 2, view))
    if runs:
        yield from (Text(), *runs)
    yield Text()
    yield from _cut(partial(_incidents, wall), incidents, _MOST_INCIDENTS, View())


def _cut(
    table: Callable[[Sequence[Record]], RenderableType], records: Sequence[Record], rows: int, view: View
) -> Iterator[RenderableType]:
    """A table of those that fit, from the one that is scrolled to; a line says how many there are besides."""
    rows, total = max(rows, _LEAST_ROWS), len(records)
    if total <= rows:
        yield table(records)
        return
    shown = rows - 1
    view.offset = min(view.offset, total - shown)
    yield table(records[view.offset : view.offset + shown])
    above = f", {view.offset} of them above" if view.offset else ""
    yield Text(f"+{total - shown} more{above}", style="dim")


def _sorted(ranks: Sequence[Record], sort: str) -> Sequence[Record]:
    if sort == SORTS[1]:
        return sorted(ranks, key=lambda rank: -(rank["step_s"] or 0.0))
    return sorted(ranks, key=lambda rank: -rank["phase_s"]) if sort == SORTS[2] else ranks


def _runs(status: Record, curves: Curves, width: int) -> Iterator[Text]:
    """A line for each run: its state, its step, and how loss and speed went."""
    room = max(10, (width - 74) // 2)
    for run in status["runs"]:
        name = run["run"]
        line = Text(no_wrap=True, overflow="ellipsis").append(f"run {name}", "bold")
        line.append(f"  {run['state']}", "green" if run["alive"] else "red")
        line.append(_progress(run["run"], status["ranks"]))
        for label, values, form in (("loss", curves.loss, "{:.4g}"), ("tokens/s", curves.speed, "")):
            if known := values.get(name):
                last = form.format(known[-1]) if form else count(known[-1])
                line.append(f"  {label} {last} ").append(sparkline(known, room), "cyan")
        yield line


def _progress(run: str, ranks: Sequence[Record]) -> str:
    """The step of a run, of how many, and the time that is left at the speed of its latest steps."""
    own = [rank for rank in ranks if rank["run"] == run and rank["step"] is not None]
    if not own:
        return ""
    step, planned = max(rank["step"] for rank in own), own[0].get("planned_step")
    if not planned or step >= planned:
        return f"  step {step}"
    return f"  step {step} of {planned}, ETA {duration((planned - step) * max(rank['step_s'] or 0.0 for rank in own))}"


def sparkline(values: Iterable[float], width: int) -> str:
    """The newest values as bars, scaled from lowest to highest."""
    shown = list(values)[-width:]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    span = (high - low) or 1.0
    return "".join(_BARS[min(7, int(8 * (value - low) / span))] for value in shown)


def _gpus(status: Record, incidents: Sequence[Record], gpus: Sequence[Record]) -> Table:
    table = plain_table("GPU", "use", "", "temp", "power", "SM clock", "memory", "state")
    for gpu in gpus:
        use, celsius = gpu["utilization_percent"], gpu["temperature_celsius"]
        said, style = gpu_state(gpu, incidents, status["ranks"], status.get("jobs", ()))
        table.add_row(
            str(gpu["index"]),
            Bar(use),
            _value(use, "%"),
            f"[{heat_style(gpu)}]{_value(celsius, ' °C')}[/]",
            _value(gpu["power_watts"], " W"),
            _value(gpu["sm_clock_mhz"], " MHz"),
            _value(gpu["memory_used_mib"], " MiB"),
            _one_line(f"[{style}]{said}[/]" + " [yellow]simulated[/yellow]" * gpu["simulated"]),
        )
    return table


def _incidents(wall: float, incidents: Sequence[Record]) -> Table | Text:
    if not incidents:
        return Text("no incidents", style="green")
    table = plain_table("incident", "state", "since", "symptoms")
    for incident in incidents:
        table.add_row(
            _one_line(f"[{_SEVERITIES[incident['severity']]}]{incident['summary']}[/]"),
            incident["state"],
            duration(max(0.0, wall - incident["opened_at"])),
            str(len(incident["symptoms"]) or ""),
        )
    return table


def _incidents_in_full(
    incidents: Sequence[Record], wall: float, view: View, left: int
) -> Iterator[RenderableType]:  # fmt: skip
    """The list, and all about the one that is scrolled to."""
    if not incidents:
        yield Text("no incidents", style="green")
        return
    view.offset = min(view.offset, len(incidents) - 1)
    chosen = incidents[view.offset]
    yield from _cut(partial(_incidents, wall), incidents[view.offset :], left // 2, View())
    lines = [
        "",
        f"[bold]{chosen['summary']}[/bold]",
        f"{chosen['kind']}, {chosen['severity']}, {chosen['state']}, id {chosen['id']}",
        *(f"  seen: {evidence['text']} [dim]({evidence['source']})[/dim]" for evidence in chosen["evidence"]),
        *(f"  did: {action['verb']} {action['target']}: {action['outcome']}" for action in chosen["actions"]),
        *(f"  symptom: {symptom['summary']}" for symptom in chosen["symptoms"]),
        f"  opsd runbook show {chosen['kind']}",
    ]
    yield from (Text.from_markup(line) for line in lines[: max(4, left // 2)])


class Bar:
    """A percentage as a bar, which shrinks on narrow terminals."""

    def __init__(self, percent: float | None) -> None:
        self._share = min(max(percent or 0.0, 0.0), 100.0) / 100

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(4, options.max_width), min(20, options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        full = round(options.max_width * self._share)
        yield Text.assemble(("█" * full, "green"), ("░" * (options.max_width - full), "dim"))


def _one_line(markup: str) -> Text:
    """A text that is cut where its column ends: rows of several lines would push others off the screen."""
    text = Text.from_markup(markup, overflow="ellipsis")
    text.no_wrap = True
    return text


def _value(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.0f}{unit}"


MAX_INCIDENTS = 50
QUIT = "quit"
_ARROWS = {b"\x1b[A": "up", b"\x1b[B": "down", b"\x1bOA": "up", b"\x1bOB": "down"}


@click.command()
@with_agent
@option("--interval", type=Seconds(0.2, 60), default=1.0, help="Seconds between looks.")
@option("--once", is_flag=True, help="Print once and exit.")
def top(agent: Agent, interval: float, once: bool) -> int:
    """Watch the GPUs, ranks, runs and incidents of a node live; q or Ctrl-C ends it.

    1 to 4, or Tab, choose overview, GPUs, ranks or incidents. s sorts ranks by number, slowest step or longest phase.
    The arrow keys scroll, and choose the incident that is shown in full.

    Ends with 1 if no agent answers at the start; waits if the agent stops answering later.
    """
    console = output_console()
    watch = Watch(agent, console)
    try:
        watch.look()
    except (NoAgent, Refused) as error:
        fail(str(error))
    if once or not console.is_terminal:
        console.print(watch.screen(whole=True))
        return exitcodes.OK
    with keys() as wait, Live(watch.screen(), console=console, screen=True, auto_refresh=False) as live:
        due, problem = time.monotonic() + interval, ""
        while (key := wait(max(0.0, due - time.monotonic()))) != QUIT:
            watch.view.press(key)
            if time.monotonic() >= due:
                due, problem = time.monotonic() + interval, ""
                try:
                    watch.look()
                except (NoAgent, Refused) as error:
                    problem = str(error)
            shown = watch.screen()
            live.update(Group(Text(problem, style="red"), shown) if problem else shown, refresh=True)
    return exitcodes.OK


@dataclass
class Watch:
    """What is shown, and what has been seen so far."""

    agent: Agent
    console: Console
    view: View = field(default_factory=View)
    curves: Curves = field(default_factory=Curves)
    last: tuple[Mapping[str, Any], list[Mapping[str, Any]]] | None = None

    def look(self) -> None:
        """Ask the agent. Raises NoAgent and Refused."""
        status = self.agent.get("/api/v1/status")
        found = self.agent.get("/api/v1/incidents", state="current", limit=MAX_INCIDENTS)["incidents"]
        self.curves.add(self.agent.get("/api/v1/ranks")["ranks"])
        self.last = printable(status), [printable(incident) for incident in found]

    def screen(self, *, whole: bool = False) -> RenderableType:
        """The newest state of the node, cut to the terminal unless it is to be printed ``whole``."""
        assert self.last is not None
        height = None if whole else self.console.height
        return screen(
            *self.last, time.time(), view=self.view, curves=self.curves, height=height, width=self.console.width
        )


@contextlib.contextmanager
def keys() -> Iterator[Callable[[float], str]]:
    """A function that waits for at most some seconds and returns the key that was pressed, "" for none.

    ``QUIT`` is q and Ctrl-C, which interrupts nothing else inside the block, so that the screen is always restored. The
    terminal delivers keys immediately and without echo; its settings are restored afterwards.
    """
    interrupted, tell = os.pipe()
    handler = signal.signal(signal.SIGINT, lambda *_: os.write(tell, b"q"))
    try:
        if not sys.stdin.isatty():
            yield lambda seconds: _pressed([interrupted], seconds)
            return
        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
        try:
            tty.setcbreak(terminal)
            yield lambda seconds: _pressed([interrupted, terminal], seconds)
        finally:
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)
    finally:
        signal.signal(signal.SIGINT, handler)
        os.close(interrupted)
        os.close(tell)


def _pressed(descriptors: list[int], seconds: float) -> str:
    for ready in select.select(descriptors, [], [], seconds)[0]:
        data = os.read(ready, 8)  # an arrow key is three bytes
        return _ARROWS.get(data) or (QUIT if data[:1] in (b"q", b"Q", b"") else data[:1].decode("ascii", "ignore"))
    return ""
