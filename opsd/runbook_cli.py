"""``opsd runbook``: read the runbooks in the terminal."""

from __future__ import annotations

import difflib

import click
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from opsd.config_cli import BadConfig
from runbooks import RUNBOOKS
from runbooks.base import SECTIONS, Runbook


@click.group()
def runbook() -> None:
    """List the runbooks or show one."""


@runbook.command("list")
def list_runbooks() -> None:
    """Every kind of incident that opsd knows."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in ("name", "title", "needs"):
        table.add_column(column)
    for book in RUNBOOKS:
        table.add_row(book.kind, book.page.title, ", ".join(book.needs))
    Console().print(table, highlight=False)


@runbook.command()
@click.argument("name")
@click.option("--markdown", is_flag=True, help="Print the page as Markdown.")
def show(name: str, markdown: bool) -> None:
    """The page of the runbook NAME: meaning, impact, diagnosis, mitigation, and what opsd does by itself."""
    kinds = {book.kind: book for book in RUNBOOKS}
    if name not in kinds:
        nearest = difflib.get_close_matches(name, kinds, n=1)
        said = f"did you mean {nearest[0]}?" if nearest else "see `opsd runbook list`"
        raise BadConfig(f"no runbook is named {name}; {said}")
    text = to_markdown(kinds[name])
    if markdown:
        click.echo(text, nl=False)
    else:
        Console().print(Markdown(text))


def to_markdown(book: Runbook) -> str:
    """The page of ``book`` as Markdown."""
    page = book.page
    texts = (page.meaning, page.impact, page.diagnosis, page.mitigation, page.automatic)
    sections = zip(SECTIONS, texts, strict=True)
    return f"# {page.title}\n" + "".join(f"\n## {head}\n\n{text}\n" for head, text in sections)
