"""``opsd compare``: two runs beside each other."""

from __future__ import annotations

import json
from pathlib import Path

import click

from opsd import exitcodes
from opsd.commands.options import option
from opsd.commands.output import written
from opsd.commands.report import find_run, price_of
from opsd.report.page import compare_page, compare_text, losses_part


@click.command()
@click.argument("first")
@click.argument("second")
@option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write a page with both in the same charts.")
@option("--json", "as_json", is_flag=True, help="Print the numbers of both as JSON.")
@option("--config", "file", type=click.Path(path_type=Path), metavar="FILE", help="Take cost.gpu_hour from FILE.")
def compare(first: str, second: str, out: Path | None, as_json: bool, file: Path | None) -> int:
    """Compare the runs FIRST and SECOND: state, speed, restarts, cost, and the step from which losses differ.

    Each is the folder of a run or the name of one of this user's.
    """
    runs, price = (find_run(first), find_run(second)), price_of(file)
    if as_json:
        click.echo(json.dumps({"runs": [run.as_dict() for run in runs], "losses": losses_part(*runs)}, indent=1))
    else:
        click.echo("\n".join(compare_text(*runs, price)))
    if out is not None and not written(out, compare_page(*runs, price), "the page"):
        return exitcodes.FAILED
    return exitcodes.OK
