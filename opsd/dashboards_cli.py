"""``opsd dashboards``: the Grafana boards as files."""

from __future__ import annotations

import sys
from types import ModuleType

import click

from opsd import exitcodes


@click.group()
def dashboards() -> None:
    """Build the Grafana boards, or check that the JSON is current."""


@dashboards.command()
def build() -> None:
    """Write the boards' JSON beside their builders."""
    builder = _builder()
    changed = builder.write()
    click.echo("\n".join(f"wrote {path}" for path in changed) or "every board is current")


@dashboards.command()
def check() -> None:
    """Exit with 1 if a board's JSON differs from what its builder makes."""
    outdated = _builder().outdated()
    for path in outdated:
        click.echo(f"{path} is not current; run: opsd dashboards build", err=True)
    sys.exit(exitcodes.FAILED if outdated else exitcodes.OK)


def _builder() -> ModuleType:
    try:
        from dashboards import build as builder
    except ImportError as error:
        raise click.ClickException(f"{error}; install the boards' libraries: pip install 'opsd[dashboards]'") from error
    return builder
