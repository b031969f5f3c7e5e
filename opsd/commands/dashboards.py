"""``opsd dashboards``: the Grafana boards as files."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from opsd import exitcodes, pip_install
from opsd.commands.options import Group, option
from opsd.commands.settings import BadConfig
from opsd.dashboards.boards import NAMES, text_of

_FOLDER = option(
    "--out",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder from which Grafana's provisioning reads boards.",
)


@click.group(cls=Group)
def dashboards() -> None:
    """Write the Grafana boards into a folder, check that they are current, or write them into a Grafana."""


@dashboards.command()
@_FOLDER
def build(folder: Path) -> None:
    """Write the boards' JSON, one file a board, for Grafana's provisioning."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in (outdated := _outdated(folder)).items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{folder} cannot be written: {error.strerror}; name another with --out") from error
    click.echo("\n".join(f"wrote {path}" for path in outdated) or "every board is current")


@dashboards.command()
@_FOLDER
def check(folder: Path) -> None:
    """Exit with 1 if a file differs from what `opsd dashboards build` would write."""
    outdated = _outdated(folder)
    for path in outdated:
        click.echo(f"{path} is not current; run: opsd dashboards build --out {folder}", err=True)
    sys.exit(exitcodes.FAILED if outdated else exitcodes.OK)


def _outdated(folder: Path) -> dict[Path, str]:
    """Files that are missing or differ, with what should stand there."""
    files = {folder / f"{name}.json": text_of(name) for name in NAMES}
    return {path: text for path, text in files.items() if not path.exists() or path.read_text("utf-8") != text}


@dashboards.command()
@option("--url", required=True, help="Address of Grafana, for instance https://grafana.example.com.")
@option("--token-file", type=click.Path(path_type=Path), help="File with the token; $GRAFANA_TOKEN by default.")
@option("--dry-run", is_flag=True, help="Only show what would change.")
def push(url: str, token_file: Path | None, dry_run: bool) -> None:
    """Write the boards that differ into Grafana's folder opsd.

    The token is one of a service account with the role Editor. Exits with 1 if Grafana does not take them.
    """
    token = _token(token_file)
    try:
        from opsd.dashboards.push import Grafana, PushError
    except ImportError as error:
        raise click.ClickException(f"{error}; install Grafana's client: {pip_install('dashboards')}") from error
    try:
        for pushed in Grafana(url, token).push(dry_run=dry_run):
            click.echo(f"{pushed.uid}: {pushed.change}")
            if dry_run and pushed.diff:
                click.echo(pushed.diff)
    except PushError as error:
        click.echo(f"opsd: {error}", err=True)
        sys.exit(exitcodes.FAILED)


def _token(file: Path | None) -> str:
    """The token without surrounding whitespace; it never appears in a message."""
    try:
        token = (os.environ.get("GRAFANA_TOKEN", "") if file is None else file.read_text(encoding="utf-8")).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(f"{file}: the token cannot be read: {getattr(error, 'strerror', None) or 'no text'}") from error
    if not token or not token.isascii() or not token.isprintable():
        raise BadConfig(f"{file or 'GRAFANA_TOKEN'} holds no token; name a file with --token-file or set GRAFANA_TOKEN")
    return token
