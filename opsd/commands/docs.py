"""``opsd docs``: the reference pages as files."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from opsd import exitcodes
from opsd.commands import checkout, reference


@click.group()
def docs() -> None:
    """Write the reference pages under docs/, or check that they are current."""


_FOLDER = click.option(
    "--out",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    callback=lambda _context, _parameter, chosen: checkout.folder("docs", chosen),
    help="Folder instead of the checkout's docs.",
)


@docs.command()
@_FOLDER
def build(folder: Path) -> None:
    """Write every page, and remove those of what is gone."""
    for path, text in _outdated(folder).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        click.echo(f"wrote {path}")
    for path in reference.leftovers(folder):
        path.unlink()
        click.echo(f"removed {path}")


@docs.command()
@_FOLDER
def check(folder: Path) -> None:
    """Exit with 1 if a page differs from what the code makes."""
    wrong = [*_outdated(folder), *reference.leftovers(folder)]
    for path in wrong:
        click.echo(f"{path} is not current; run: opsd docs build", err=True)
    sys.exit(exitcodes.FAILED if wrong else exitcodes.OK)


def _outdated(folder: Path) -> dict[Path, str]:
    """Pages that are missing or differ, with what should stand there."""
    return {
        path: text
        for path, text in reference.rendered(folder).items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }
