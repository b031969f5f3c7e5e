"""``opsd completion``: the shell's completion script, printed."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for SHELL.

    For bash: opsd completion bash > ~/.local/share/bash-completion/completions/opsd
    """
    from opsd.commands.main import cli

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "opsd", "_OPSD_COMPLETE").source())
