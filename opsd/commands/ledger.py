"""``opsd ledger``."""

from __future__ import annotations

import json

import click
from rich.table import Table

from opsd import exitcodes
from opsd.commands.options import option
from opsd.commands.output import fail, output_console
from opsd.commands.report import find_folder
from opsd.ledger.ledger import Ledger, LedgerError, read_ledger
from opsd.report.text import LEAST_S
from opsd.words import plural


@click.command()
@click.argument("run", required=False)
@option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
def ledger(run: str | None, as_json: bool) -> int:
    """Where the wall-clock time of RUN went, and its ETTR.

    RUN is the folder of a run or the name of one of this user's; by default the newest of those.
    """
    try:
        result = read_ledger(find_folder(run))
    except LedgerError as error:
        fail(str(error), exitcodes.USAGE)
    if as_json:
        click.echo(json.dumps(result.as_dict(), indent=1))
    else:
        output_console().print(ledger_table(result))
        for note in result.notes:
            click.echo(f"note: {note}")
    return exitcodes.OK


def ledger_table(ledger: Ledger) -> Table:
    """The ledger for people: one row for each bucket that time was spent in, and the sum."""
    table = Table(
        title=f"ledger of {plural(ledger.generations, 'generation')}, {plural(ledger.steps, 'step')}",
        title_justify="left",
    )
    table.add_column("bucket")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for name, seconds in ledger.buckets.items():
        if seconds >= LEAST_S:
            table.add_row(name.replace("_", " "), f"{seconds:.2f}", f"{seconds / ledger.wall_s:.1%}")
    table.add_section()
    table.add_row("wall clock", f"{ledger.wall_s:.2f}", f"ETTR {ledger.ettr:.1%}")
    return table
