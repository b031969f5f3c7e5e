"""``opsd ledger``."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.table import Table

from opsd import exitcodes
from opsd.commands.options import option
from opsd.commands.output import output_console
from opsd.ledger.ledger import Ledger, LedgerError, read_ledger


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
def ledger(run_dir: Path, as_json: bool) -> int:
    """Where the wall-clock time of the run in RUN_DIR went, and its ETTR."""
    try:
        result = read_ledger(run_dir)
    except LedgerError as error:
        click.echo(f"opsd: {error}", err=True)
        return exitcodes.USAGE
    if as_json:
        click.echo(json.dumps(result.as_dict(), indent=1))
    else:
        output_console().print(ledger_table(result))
        for note in result.notes:
            click.echo(f"note: {note}")
    return exitcodes.OK


def ledger_table(ledger: Ledger) -> Table:
    """The ledger for people: one row per bucket that has any time, and the sum."""
    table = Table(title=f"ledger of {ledger.generations} generations, {ledger.steps} steps", title_justify="left")
    table.add_column("bucket")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for name, seconds in ledger.buckets.items():
        if seconds:
            table.add_row(name.replace("_", " "), f"{seconds:.2f}", f"{seconds / ledger.wall_s:.1%}")
    table.add_section()
    table.add_row("wall clock", f"{ledger.wall_s:.2f}", f"ETTR {ledger.ettr:.1%}")
    return table
