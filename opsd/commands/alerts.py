"""``opsd alerts``: Prometheus' recording rules and alerts as files."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from opsd import exitcodes
from opsd.commands import checkout
from opsd.commands.dashboards import builder
from opsd.commands.options import Group, option


@click.group(cls=Group)
def alerts() -> None:
    """Build Prometheus' rules, or check that the files are current."""


_FOLDER = option(
    "--out", "folder", type=click.Path(path_type=Path, file_okay=False), help="Folder instead of the checkout's."
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
def build(folder: Path | None, scheme: str, site: str) -> None:
    """Write the rules, one file a group."""
    for path, text in _rendered(folder, scheme, site).items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            except OSError as error:
                raise click.ClickException(
                    f"{path} cannot be written: {error.strerror}; name a folder with --out"
                ) from error
            click.echo(f"wrote {path}")


@alerts.command()
@_FOLDER
@_SCHEME
@_SITE
def check(folder: Path | None, scheme: str, site: str) -> None:
    """Exit with 1 if a file differs from what the code makes."""
    outdated = [
        path
        for path, text in _rendered(folder, scheme, site).items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path in outdated:
        click.echo(f"{path} is not current; run: opsd alerts build", err=True)
    sys.exit(exitcodes.FAILED if outdated else exitcodes.OK)


def _rendered(folder: Path | None, scheme: str, site: str) -> dict[Path, str]:
    target = checkout.folder("deploy/prometheus/rules", folder)
    rendered: dict[Path, str] = builder("opsd.dashboards.alerts.build").rendered(target, scheme, site)
    return rendered
