"""Asking the agent of a node, and putting what it answers on a terminal: what its commands have in common."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
from rich.markup import escape
from rich.table import Table

from opsd import exitcodes
from opsd.config_cli import load

Command = TypeVar("Command", bound=Callable[..., Any])


def agent_options(command: Command) -> Command:
    """Add --url, --config and --json to ``command``."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print the agent's answer as it is."),
        click.option("--config", "file", type=click.Path(path_type=Path), help="Take the address from FILE."),
        click.option("--url", help="Where the agent listens, for instance http://node-17:9477."),
    ):
        command = option(command)
    return command


class NoAgent(Exception):
    """No agent answers; the message says where and what to do."""


class Refused(Exception):
    """The agent answers that this cannot be had; the message is its sentence."""


class Agent:
    """The API of one agent, at ``url`` or where the configuration in ``file`` lets it listen."""

    def __init__(self, url: str | None, file: Path | None) -> None:
        self.base = (url or f"http://{load(file).agent.listen}").rstrip("/")

    def get(self, path: str, **query: str | int | Sequence[str]) -> Any:
        """What the agent answers. Raises NoAgent and Refused."""
        import httpx

        try:
            answer = httpx.get(self.base + path, params=query, timeout=5.0, trust_env=False)
            body = answer.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise NoAgent(
                f"no agent answers at {self.base} ({error}); start one with `opsd agent`, or name one with --url"
            ) from error
        if answer.is_error:
            raise Refused(str(body.get("error", answer.status_code)))
        return body


def get(url: str | None, file: Path | None, path: str, **query: str | int | Sequence[str]) -> Any:
    """What the agent answers; ends the command with one sentence if there is none."""
    try:
        return Agent(url, file).get(path, **query)
    except (NoAgent, Refused) as error:
        fail(str(error))


def fail(sentence: str) -> NoReturn:
    """End the command with ``sentence``."""
    click.echo(f"opsd: {sentence}", err=True)
    raise click.exceptions.Exit(exitcodes.FAILED)


def printable(value: Any) -> Any:
    """``value`` with every text in it fit for the terminal: what users and drivers write has no effect there."""
    if isinstance(value, str):
        return escape("".join(c if c.isprintable() else " " for c in value))
    if isinstance(value, dict):
        return {key: printable(item) for key, item in value.items()}
    return [printable(item) for item in value] if isinstance(value, list) else value


def plain_table(*columns: str) -> Table:
    """A table without lines whose columns fold."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def clock_time(at: float) -> str:
    """The epoch second ``at`` in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
