"""``opsd report``: what became of a run."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

import click

from opsd import exitcodes
from opsd.commands.options import option
from opsd.commands.output import fail, written
from opsd.commands.settings import load
from opsd.ledger.ledger import EVENTS
from opsd.report.page import report_page
from opsd.report.run import PAGE, NoReport, Price, RunReport, read_run
from opsd.report.text import text_report
from opsd.rundir import default_root


@click.command()
@click.argument("run", required=False)
@option("--text", "as_text", is_flag=True, help="Print the report instead of making the page.")
@option("--json", "as_json", is_flag=True, help="Print its numbers as JSON.")
@option("--out", type=click.Path(path_type=Path, dir_okay=False), help="File of the page; - for stdout.")
@option("--config", "file", type=click.Path(path_type=Path), metavar="FILE", help="Take cost.gpu_hour from FILE.")
def report(run: str | None, as_text: bool, as_json: bool, out: Path | None, file: Path | None) -> int:
    """The steps, losses, restarts, time and cost of RUN, as one HTML file.

    RUN is the folder of a run or the name of one of this user's; by default the newest of those. The page goes to
    report.html in that folder. `opsd launch` makes it at the end of each run. cost.gpu_hour gives the price.
    """
    found, price = find_run(run), price_of(file)
    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=1))
    elif as_text:
        click.echo("\n".join(text_report(found, price)))
    else:
        target = out or found.folder / PAGE
        if not written(target, report_page(found, price), "the report", in_place=out is not None):
            return exitcodes.FAILED
        if str(target) != "-":
            click.echo(target)
    return exitcodes.OK


def find_folder(name: str | None) -> Path:
    """The folder of the run that a user means; ends the command with a sentence if there is none."""
    root = default_root()
    if name is None:
        folders = sorted(root.glob(f"*/{EVENTS}"), key=lambda path: path.stat().st_mtime)
        if not folders:
            fail(f"there is no run in {root}: name the folder of one", exitcodes.USAGE)
        return folders[-1].parent
    folder = Path(name) if Path(name).is_dir() else root / name
    if not folder.is_dir():
        near = difflib.get_close_matches(name, [path.name for path in root.glob("*")], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        fail(f"there is no run {name}: neither a folder of that name nor one in {root}{hint}", exitcodes.USAGE)
    return folder


def find_run(name: str | None) -> RunReport:
    """The report of the run that a user means; ends the command with a sentence if there is none."""
    try:
        return read_run(find_folder(name))
    except NoReport as error:
        fail(str(error), exitcodes.USAGE)


def price_of(file: Path | None) -> Price:
    """The price in the configuration."""
    cost = load(file).cost
    return Price(cost.gpu_hour, cost.currency)
