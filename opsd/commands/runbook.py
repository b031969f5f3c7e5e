"""``opsd runbook``: read the runbooks in the terminal."""

from __future__ import annotations

import difflib

import click
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from opsd.commands.settings import BadConfig
from opsd.runbooks import RUNBOOKS
from opsd.runbooks.alert_pages import PAGES
from opsd.runbooks.base import SECTIONS, Page


@click.group()
def runbook() -> None:
    """List the runbooks or show one."""


@runbook.command("list")
def list_runbooks() -> None:
    """Every kind of incident that opsd knows, and the alerts that only Prometheus can raise."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in ("name", "title", "needs"):
        table.add_column(column)
    for book in RUNBOOKS:
        table.add_row(book.kind, book.page.title, ", ".join(book.needs))
    for name, page in PAGES.items():
        table.add_row(name, page.title, "Prometheus")
    Console().print(table, highlight=False)


@runbook.command()
@click.argument("name")
@click.option("--markdown", is_flag=True, help="Print the page as Markdown.")
def show(name: str, markdown: bool) -> None:
    """The page of the runbook NAME: meaning, impact, diagnosis, mitigation, and what opsd does by itself."""
    pages = all_pages()
    if name not in pages:
        nearest = difflib.get_close_matches(name, pages, n=1)
        said = f"did you mean {nearest[0]}?" if nearest else "see `opsd runbook list`"
        raise BadConfig(f"no runbook is named {name}; {said}")
    text = to_markdown(pages[name])
    if markdown:
        click.echo(text, nl=False)
    else:
        Console().print(Markdown(text))


def all_pages() -> dict[str, Page]:
    """Every page by its name: those of the runbooks, then those of alerts without one."""
    return {**{book.kind: book.page for book in RUNBOOKS}, **PAGES}


def to_markdown(page: Page) -> str:
    """``page`` as Markdown."""
    texts = (page.meaning, page.impact, page.diagnosis, page.mitigation, page.automatic)
    sections = zip(SECTIONS, texts, strict=True)
    return f"# {page.title}\n" + "".join(f"\n## {head}\n\n{text}\n" for head, text in sections)
