"""``opsd stack``: the monitoring stack on one machine, with a fault that is reported to a webhook."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from opsd import exitcodes
from opsd.commands.options import Finite, option
from opsd.simulated.gpus import NoCompilerError, SimulationError
from opsd.stack.node import JOB

if TYPE_CHECKING:
    from opsd.stack.world import Stack

GPU = 3
FIRST_DATA_S, TOLD_S, LEDGER_S = 60.0, 45.0, 30.0
"""Time limits in seconds: first data, the alert after the fault (scrapes every 15 s), the ledger of the job page."""


BROWSERS: Final = ("chromium", "google-chrome")
DEADLINE_S: Final = 60.0
SHOTS: Final = (
    ("node.png", "/", (1100, 1000), "light"),
    ("job.png", f"/job/{JOB}", (1100, 1200), "dark"),
    ("node-phone.png", "/", (360, 740), "dark"),
)
"""File, address, width and height in pixels, preferred colour scheme."""
_SCHEMES: Final = {"dark": 0, "light": 1}


class PictureError(Exception):
    """A picture that cannot be taken; the message says what is missing."""


def take(agent: str, folder: Path) -> list[Path]:
    """Take ``SHOTS`` of the agent at the address ``agent`` into ``folder``. Raises PictureError."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise PictureError("no browser for pictures: install chromium")
    folder.mkdir(parents=True, exist_ok=True)
    taken = []
    with tempfile.TemporaryDirectory(prefix="opsd-browser-") as profile:
        for name, path, size, scheme in SHOTS:
            _take(browser, profile, agent + path, folder / name, size, scheme)
            taken.append(folder / name)
    return taken


def _take(browser: str, profile: str, url: str, file: Path, size: tuple[int, int], scheme: str) -> None:
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
        f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}",
        f"--blink-settings=preferredColorScheme={_SCHEMES[scheme]}", f"--screenshot={file.absolute()}", url,
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        raise PictureError(f"{browser} took no picture of {url} within {DEADLINE_S:.0f} s") from None
    if not file.exists():
        raise PictureError(f"{browser} took no picture of {url}: {done.stderr.strip().rpartition(chr(10))[2]}")


@click.command()
@option("--scrape", default=15.0, type=Finite(1, 60), help="Seconds between scrapes.")
@option("--keep", is_flag=True, help="Leave everything running until Ctrl-C.")
@option(
    "--pictures", type=click.Path(file_okay=False, path_type=Path), help="Take pictures of the pages into this folder."
)
def stack(scrape: float, keep: bool, pictures: Path | None) -> None:
    """Start Prometheus, Alertmanager and an agent with simulated GPUs, overheat one, and wait for the alert.

    Everything listens on loopback ports and is removed afterwards. Exits with 1 if the alert does not arrive in time.
    """
    try:
        from opsd.stack import world
    except ImportError as error:
        raise click.ClickException(f"{error}; install the boards' libraries: pip install 'opsd[dashboards]'") from error
    with tempfile.TemporaryDirectory(prefix="opsd-stack-") as folder:
        try:
            with world.Stack(Path(folder), scrape_s=scrape) as running:
                told = _show(running)
                if pictures is not None:
                    _take_pictures(running, pictures)
                if keep:
                    click.echo("everything keeps running; Ctrl-C ends it")
                    while True:
                        time.sleep(3600)
        except (world.StackError, NoCompilerError, SimulationError, PictureError) as error:
            click.echo(f"opsd: {error}", err=True)
            sys.exit(exitcodes.FAILED)
    sys.exit(exitcodes.OK if told else exitcodes.FAILED)


def _show(running: Stack) -> bool:
    """Report progress; returns whether the alert arrived in time."""
    from opsd.stack.world import eventually

    began = time.monotonic()
    click.echo(
        f"agent         {running.agent}\nPrometheus    {running.prometheus}\nAlertmanager  {running.alertmanager}"
    )
    if not eventually(lambda: len(running.query("instance_gpu:opsd_gpu_throttle:ratio_rate1m")) > 0, FIRST_DATA_S):
        click.echo(f"no data within {FIRST_DATA_S:.0f} s; see {running.folder}", err=True)
        return False
    click.echo(f"first data of boards and rules after {time.monotonic() - began:.0f} s")
    planted = time.monotonic()
    running.node.overheat(GPU)
    click.echo(f"the cooling of GPU {GPU} fails (simulated)")
    if not eventually(lambda: bool(running.inbox.alerts("GpuThrottle")), 2 * TOLD_S):
        click.echo("the alert did not reach the webhook", err=True)
        return False
    at, alert = running.inbox.alerts("GpuThrottle")[0]
    click.echo(f"the alert reached the webhook {at - planted:.0f} s after the fault:")
    for name in ("summary", "node", "gpu", "job", "cost", "next_step", "runbook_url"):
        click.echo(f"  {name:<12}{alert['annotations'].get(name, '')}")
    return at - planted <= TOLD_S


def _take_pictures(running: Stack, folder: Path) -> None:
    """Wait until the job page has its ledger, which is computed at the first request."""
    from opsd.stack.world import eventually

    def has_ledger() -> bool:
        with urllib.request.urlopen(f"{running.agent}/job/{JOB}", timeout=10) as answer:  # noqa: S310  # loopback
            return b"ETTR" in answer.read()

    if not eventually(has_ledger, LEDGER_S):
        raise PictureError(f"the page of job {JOB} has no ledger after {LEDGER_S:.0f} s")
    for file in take(running.agent, folder):
        click.echo(f"wrote {file}")
