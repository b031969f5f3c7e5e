"""``opsd dashboards``: the Grafana boards as files."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import click

from opsd import exitcodes, pip_install
from opsd.commands import checkout
from opsd.commands.options import Group, option
from opsd.commands.settings import BadConfig


@click.group(cls=Group)
def dashboards() -> None:
    """Build the Grafana boards, check that the JSON is current, or write them into a Grafana."""


@dashboards.command()
@option("--out", "folder", type=click.Path(path_type=Path, file_okay=False), help="Folder instead of the checkout's.")
def build(folder: Path | None) -> None:
    """Write the boards' JSON, one file a board, for Grafana's provisioning."""
    target = checkout.folder("dashboards", folder)
    try:
        changed = builder().write(target)
    except OSError as error:
        raise click.ClickException(f"{target} cannot be written: {error.strerror}; name a folder with --out") from error
    click.echo("\n".join(f"wrote {path}" for path in changed) or "every board is current")


@dashboards.command()
def check() -> None:
    """Exit with 1 if a board's JSON differs from what its builder makes."""
    outdated = builder().outdated()
    for path in outdated:
        click.echo(f"{path} is not current; run: opsd dashboards build", err=True)
    sys.exit(exitcodes.FAILED if outdated else exitcodes.OK)


@dashboards.command()
@option("--url", required=True, help="Address of Grafana, for instance https://grafana.example.com.")
@option("--token-file", type=click.Path(path_type=Path), help="File with the token; $GRAFANA_TOKEN by default.")
@option("--dry-run", is_flag=True, help="Only show what would change.")
def push(url: str, token_file: Path | None, dry_run: bool) -> None:
    """Write the boards that differ into Grafana's folder opsd.

    The token is one of a service account with the role Editor. Exits with 1 if Grafana does not take them.
    """
    token = _token(token_file)
    builder()
    from opsd.dashboards.push import Grafana, PushError

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


def builder(module: str = "opsd.dashboards.build") -> ModuleType:
    """The module that builds boards, or rules. Raises click.ClickException if their libraries are not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise click.ClickException(f"{error}; install the boards' libraries: {pip_install('dashboards')}") from error
