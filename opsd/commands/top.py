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
from dataclasses import dataclass, field
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from opsd import exitcodes
from opsd.commands.agent_client import Agent, NoAgent, Refused, with_agent
from opsd.commands.options import Seconds, option
from opsd.commands.output import fail, output_console, printable
from opsd.commands.top_screen import Curves, View, screen

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
