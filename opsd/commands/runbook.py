"""``opsd runbook``: read the runbooks in the terminal."""

from __future__ import annotations

import difflib
import json

import click
from rich.console import Console
from rich.markdown import Markdown

from opsd.commands.options import Group, option
from opsd.commands.output import output_console, plain_table
from opsd.commands.settings import BadConfig
from opsd.runbooks import RUNBOOKS
from opsd.runbooks.lib.guides import guides, markdown


@click.group(cls=Group)
def runbook() -> None:
    """List the runbooks or show one."""


@runbook.command("list")
@option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_runbooks(as_json: bool) -> None:
    """Every kind of incident that opsd knows, and the alerts that only Prometheus can raise."""
    needs_of = {book.kind: list(book.needs) for book in RUNBOOKS}
    books = [(name, guide.title, needs_of.get(name, ["Prometheus"])) for name, guide in guides().items()]
    if as_json:
        click.echo(
            json.dumps([{"name": name, "title": title, "needs": needs} for name, title, needs in books], indent=1)
        )
        return
    table = plain_table("name", "title", "needs")
    for name, title, needs in books:
        table.add_row(name, title, ", ".join(needs))
    output_console().print(table, highlight=False)


@runbook.command()
@click.argument("name")
@option("--markdown", "as_markdown", is_flag=True, help="Print it as Markdown.")
def show(name: str, as_markdown: bool) -> None:
    """The runbook NAME: meaning, impact, diagnosis, mitigation, and what opsd does by itself."""
    if name not in guides():
        nearest = difflib.get_close_matches(name, guides(), n=1)
        said = f"did you mean {nearest[0]}?" if nearest else "see `opsd runbook list`"
        raise BadConfig(f"no runbook is named {name}; {said}")
    text = markdown(name)
    if as_markdown:
        click.echo(text, nl=False)
    else:
        Console().print(Markdown(text))
