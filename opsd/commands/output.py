"""Putting things on a terminal: what commands have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from opsd import exitcodes
from opsd.files import write_text
from opsd.words import duration

PIPE_WIDTH = 4096
_PHASES = {
    "data": "yellow",
    "forward": "green",
    "backward": "green",
    "optimizer": "green",
    "collective": "cyan",
    "checkpoint": "magenta",
    "evaluation": "blue",
}


def output_console() -> Console:
    """Stdout for tables: as wide as the terminal, and into a file or a pipe each record on one line."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def fail(sentence: str, code: int = exitcodes.FAILED) -> NoReturn:
    """End the command with ``sentence``."""
    click.echo(f"opsd: {sentence}", err=True)
    raise click.exceptions.Exit(code)


def warn(sentence: str) -> None:
    """Say ``sentence`` beside the result."""
    click.echo(f"opsd: {sentence}", err=True)


def printable(value: Any) -> Any:
    """``value`` with every text in it fit for the terminal: what users and drivers write has no effect there."""
    if isinstance(value, str):
        return escape("".join(c if c.isprintable() else " " for c in value))
    if isinstance(value, dict):
        return {key: printable(item) for key, item in value.items()}
    return [printable(item) for item in value] if isinstance(value, list) else value


def plain_table(*columns: str) -> Table:
    """A table without lines whose columns fold."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def rank_table(ranks: Iterable[Mapping[str, Any]]) -> Table:
    """The ranks of the agent's status, whose texts must be printable."""
    table = plain_table("rank", "run", "GPU", "phase", "for", "step", "step time", "")
    for rank in ranks:
        table.add_row(
            str(rank["rank"]),
            rank["run"],
            "-" if rank["gpu"] is None else str(rank["gpu"]),
            f"[{_PHASES.get(rank['phase'], 'default')}]{rank['phase']}[/]",
            duration(rank["phase_s"]),
            "-" if rank["step"] is None else str(rank["step"]),
            "-" if rank["step_s"] is None else f"{rank['step_s']:.3f} s",
            "" if rank["live"] else "[red]not running[/red]",
        )
    return table


def written(path: Path, text: str, what: str, *, in_place: bool = True) -> bool:
    """Write ``text`` as write_text does, or say that ``what`` could not be."""
    try:
        write_text(path, text, in_place=in_place)
    except OSError as error:
        click.echo(f"opsd: {what} could not be written to {path}: {error.strerror or error}", err=True)
        return False
    return True
