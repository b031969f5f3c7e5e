"""``opsd config``: check a file, show the settings in force, write a commented file."""

from __future__ import annotations

import os
from pathlib import Path

import click

from opsd import config as settings


class BadConfig(click.ClickException):
    """A configuration error, shown as one sentence; ``opsd`` exits with ``exitcodes.USAGE``."""

    def show(self, file: object = None) -> None:
        """Print the sentence without click's usage text."""
        click.echo(f"opsd: {self.message}", err=True)


def load(path: Path | None, overrides: tuple[str, ...] = ()) -> settings.Settings:
    """Settings for a command. Raises BadConfig."""
    try:
        return settings.load(path, overrides)
    except settings.ConfigError as error:
        raise BadConfig(str(error)) from error


@click.group()
def config() -> None:
    """Check, show or create the configuration file."""


@config.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
def check(file: Path | None) -> None:
    """Say whether FILE (by default the file in force) is a usable configuration."""
    load(file)
    click.echo(f"{settings.find_file(file) or 'built-in defaults'}: good")


@config.command()
@click.option("--config", "file", type=click.Path(path_type=Path), help="Use FILE.")
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Change one setting.")
def show(file: Path | None, overrides: tuple[str, ...]) -> None:
    """Print the settings in force as TOML; secrets are masked."""
    effective = load(file, overrides)
    click.echo(f"# from {settings.find_file(file) or 'built-in defaults'} and the environment\n")
    click.echo(settings.to_toml(effective), nl=False)


@config.command()
@click.argument("file", type=click.Path(path_type=Path), default=settings.SYSTEM_FILE)
def init(file: Path) -> None:
    """Write a commented configuration to FILE (by default /etc/opsd/opsd.toml); an existing file is left alone."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # 0600: the file may come to hold the address of a webhook, which is a secret.
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise BadConfig(f"{file} exists and is left alone; name another file or move it away") from error
    except OSError as error:
        raise BadConfig(f"{file}: cannot be written: {error.strerror}") from error
    with open(descriptor, "w", encoding="utf-8") as stream:
        stream.write(settings.template())
    click.echo(f"{file} written; everything in it is optional")
