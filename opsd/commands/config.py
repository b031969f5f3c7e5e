"""``opsd config``: check a file, show the settings in force, write a commented file, reload."""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import click

from opsd import config as settings
from opsd import durable, exitcodes
from opsd.commands.agent_client import Agent, with_agent
from opsd.commands.options import Group, config_options, option
from opsd.commands.output import fail
from opsd.commands.settings import BadConfig, load
from opsd.files import SYSTEM_FILE
from opsd.notify.receiver import NotifyError, read_receivers
from opsd.words import of_file, reason

RELOAD_S = 15.0


@click.group(cls=Group)
def config() -> None:
    """Check, show, create or reload the configuration."""


@config.command()
@click.argument("named", type=click.Path(path_type=Path), metavar="[FILE]", required=False)
@option(
    "--config", "file", type=click.Path(path_type=Path), metavar="FILE", help="The same, as other commands take it."
)
def check(named: Path | None, file: Path | None) -> None:
    """Say whether FILE (by default the file in force) is a usable configuration that keeps its secrets."""
    if named is not None and file is not None:
        raise click.UsageError(f"two files are named: {named} and {file}")
    file = named or file
    effective, used = load(file), settings.find_file(file)
    if effective.notify.webhook and used and _is_open(used):
        raise BadConfig(
            f"{used}: everybody can read it, and it has notify.webhook; put the URL into a file of its own that others "
            "cannot read, and name that in notify.webhook_file"
        )
    for secret in settings.secret_files(effective):
        if _is_open(secret):
            raise BadConfig(f"{secret}: everybody can read this secret; chmod 0600 {secret}")
    _check_receivers(effective)
    click.echo(f"{used or 'built-in defaults'}: good")


def _check_receivers(effective: settings.Settings) -> None:
    """Raises BadConfig for a receiver of notifications to which nothing can be sent, as far as this user may look."""
    where = effective.notify.receiver
    if where is None or (isinstance(where, Path) and not os.access(where, os.R_OK)):
        return
    name = "notify.webhook" if isinstance(where, str) else str(where)
    try:
        receivers = read_receivers(str(where))
    except NotifyError as error:
        raise BadConfig(f"{name}: the value must be a URL" if isinstance(where, str) else str(error)) from error
    for receiver in receivers:
        try:
            receiver.check()
        except NotifyError as error:
            raise BadConfig(f"{name}: {receiver.name}: {error}") from error


def _is_open(file: Path) -> bool:
    """Whether others can read it, by its own mode; one that is not there cannot be read."""
    with suppress(OSError):
        return bool(file.stat().st_mode & stat.S_IROTH)
    return False


def _fails_on_bad_config(command: Callable[..., int]) -> Callable[..., int]:
    """A file that is wrong is what this command finds out, and no mistake in its use."""

    @wraps(command)
    def run(*args: Any, **given: Any) -> int:
        try:
            return command(*args, **given)
        except BadConfig as error:
            fail(f"refused, the agent was not told: {error.message}")

    return run


@config.command()
@_fails_on_bad_config
@with_agent
def reload(agent: Agent) -> int:
    """Have the agent of this node read its configuration again, and say what came of it.

    A file that is wrong is refused and the agent goes on with what it has. `systemctl reload opsd` does the same. Exits
    with 1 if the configuration was refused, or no agent could be asked.
    """
    before = agent.ask("/api/v1/status").get("config", {})
    try:
        os.kill(pid_of_agent(load(agent.file).agent.state_dir), signal.SIGHUP)
    except (LookupError, OSError) as error:
        fail(f"the agent cannot be told: {reason(error)}; `systemctl reload opsd` as root does it")
    deadline = time.monotonic() + RELOAD_S
    while (after := agent.ask("/api/v1/status").get("config", {})).get("reloads") == before.get("reloads"):
        if time.monotonic() > deadline:
            fail(f"the agent has not read its configuration within {RELOAD_S:g} s; its log may say why")
        time.sleep(0.1)
    if after["problem"]:
        fail(f"refused, the old configuration stays: {after['problem']}")
    waiting = ", ".join(after["needs_restart"])
    click.echo(f"reloaded; at the next start of the agent: {waiting}" if waiting else "reloaded")
    return exitcodes.OK


def pid_of_agent(state: Path, locks: Path = Path("/proc/locks")) -> int:
    """The process that holds the journal in ``state``, by what the kernel says. Raises LookupError, OSError."""
    held = (state / "journal.lock").stat()
    device = f"{os.major(held.st_dev):02x}:{os.minor(held.st_dev):02x}:{held.st_ino}"
    for line in locks.read_text().splitlines():
        _, kind, _, _, pid, file, *_ = line.replace("-> ", "").split()
        if (kind, file) == ("FLOCK", device):
            return int(pid)
    raise LookupError(f"no agent has its journal in {state}")


@config.command()
@config_options
def show(file: Path | None, overrides: tuple[str, ...]) -> None:
    """Print the settings in force as TOML; secrets are masked."""
    effective = load(file, overrides)
    click.echo(f"# from {settings.find_file(file) or 'built-in defaults'} and the environment\n")
    click.echo(settings.to_toml(effective), nl=False)


@config.command()
@click.argument("file", type=click.Path(path_type=Path), default=SYSTEM_FILE)
def init(file: Path) -> int:
    """Write a commented configuration to FILE (by default /etc/opsd/opsd.toml), - for stdout.

    An existing file is left alone.
    """
    if str(file) == "-":
        click.echo(settings.template(), nl=False)
        return exitcodes.OK
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # For everybody: commands of users and launchers of jobs read it too. Secrets have files of their own.
        created = durable.create(file, settings.template().encode())
    except durable.Unproved as error:
        click.echo(f"opsd: {of_file(error)}", err=True)
        return exitcodes.FAILED
    except OSError as error:
        if exitcodes.of_error(error) == exitcodes.NO_SPACE:
            raise
        raise BadConfig(f"{file}: cannot be written: {error.strerror}") from error
    if not created:
        raise BadConfig(f"{file} exists and is left alone; name another file or move it away")
    click.echo(f"{file} written; everything in it is optional")
    return exitcodes.OK
