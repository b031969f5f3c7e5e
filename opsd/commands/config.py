"""``opsd config``: check a file, show the settings in force, write a commented file."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

import click

from opsd import config as settings
from opsd.commands.options import config_options
from opsd.commands.settings import BadConfig, load


@click.group()
def config() -> None:
    """Check, show or create the configuration file."""


@config.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
def check(file: Path | None) -> None:
    """Say whether FILE (by default the file in force) is a usable configuration that keeps its secrets."""
    effective, used = load(file), settings.find_file(file)
    if effective.notify.webhook and used and _is_open(used):
        raise BadConfig(
            f"{used}: everybody can read it, and it has notify.webhook; put the URL into a file of its own that others "
            "cannot read, and name that in notify.webhook_file"
        )
    for secret in settings.secret_files(effective):
        if _is_open(secret):
            raise BadConfig(f"{secret}: everybody can read this secret; chmod 0600 {secret}")
    click.echo(f"{used or 'built-in defaults'}: good")


def _is_open(file: Path) -> bool:
    """Whether others can read it, by its own mode; one that is not there cannot be read."""
    with suppress(OSError):
        return bool(file.stat().st_mode & stat.S_IROTH)
    return False


@config.command()
@config_options
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
        # For everybody: commands of users and launchers of jobs read it too. Secrets have files of their own.
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError as error:
        raise BadConfig(f"{file} exists and is left alone; name another file or move it away") from error
    except OSError as error:
        raise BadConfig(f"{file}: cannot be written: {error.strerror}") from error
    with open(descriptor, "w", encoding="utf-8") as stream:
        stream.write(settings.template())
    click.echo(f"{file} written; everything in it is optional")
