"""The configuration as commands take it: what is wrong with it ends them with one sentence."""

from __future__ import annotations

from pathlib import Path

import click

from opsd import config


class BadConfig(click.ClickException):
    """A configuration error, shown as one sentence; ``opsd`` exits with ``exitcodes.USAGE``."""

    def show(self, file: object = None) -> None:
        """Print the sentence without click's usage text."""
        click.echo(f"opsd: {self.message}", err=True)


def load(path: Path | None, overrides: tuple[str, ...] = ()) -> config.Settings:
    """Settings for a command. Raises BadConfig."""
    try:
        return config.load(path, overrides)
    except config.ConfigError as error:
        raise BadConfig(str(error)) from error
