"""``opsd alerts``: Prometheus' recording rules and alerts as files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import cast

import click

from opsd import exitcodes
from opsd.commands.options import Group, option
from opsd.dashboards.alerts import Scheme, linked


@click.group(cls=Group)
def alerts() -> None:
    """Write Prometheus' rules with links that fit the site, or check that the files are current."""


_FOLDER = option(
    "--out",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder of the rules, such as /etc/prometheus/rules.",
)
_SCHEME = option(
    "--scheme",
    type=click.Choice(["http", "https"]),
    default="http",
    help="Scheme of links to agents: https with agent.web_config.",
)
_SITE = option(
    "--runbooks",
    "site",
    default="",
    metavar="URL",
    help="Where the guides are published, with NAME at URL/NAME. By default links go to a live agent.",
)


@alerts.command()
@_FOLDER
@_SCHEME
@_SITE
def build(folder: Path, scheme: str, site: str) -> None:
    """Write the rules that opsd ships."""
    for path, text in _outdated(folder, scheme, site).items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise click.ClickException(
                f"{path} cannot be written: {error.strerror}; name another folder with --out"
            ) from error
        click.echo(f"wrote {path}")


@alerts.command()
@_FOLDER
@_SCHEME
@_SITE
def check(folder: Path, scheme: str, site: str) -> None:
    """Exit with 1 if a file differs from what `opsd alerts build` would write."""
    outdated = _outdated(folder, scheme, site)
    for path in outdated:
        click.echo(f"{path} is not current; run: opsd alerts build --out {folder}", err=True)
    sys.exit(exitcodes.FAILED if outdated else exitcodes.OK)


def _outdated(folder: Path, scheme: str, site: str) -> dict[Path, str]:
    """Files that are missing or differ, with what should stand there."""
    files = {folder / name: text for name, text in linked(cast(Scheme, scheme), site).items()}
    return {path: text for path, text in files.items() if not path.exists() or path.read_text("utf-8") != text}
