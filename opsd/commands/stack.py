"""``opsd stack``: the monitoring stack on one machine, with a fault that is reported to a webhook."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from opsd import exitcodes, pip_install
from opsd.commands.options import Seconds, option
from opsd.simulated.gpus import NoCompilerError, SimulationError

if TYPE_CHECKING:
    from opsd.stack.world import Stack

GPU = 3
FIRST_DATA_S, TOLD_S = 60.0, 45.0
"""Time limits in seconds: first data, the alert after the fault (scrapes every 15 s)."""


@click.command()
@option("--scrape", default=15.0, type=Seconds(1, 60), help="Seconds between scrapes.")
@option("--keep", is_flag=True, help="Leave everything running until Ctrl-C.")
def stack(scrape: float, keep: bool) -> None:
    """Start Prometheus, Alertmanager and an agent with simulated GPUs, overheat one, and wait for the alert.

    Everything listens on loopback ports and is removed afterwards. Exits with 1 if the alert does not arrive in time.
    """
    try:
        from opsd.stack import world
    except ImportError as error:
        raise click.ClickException(f"{error}; install the boards' libraries: {pip_install('dashboards')}") from error
    with tempfile.TemporaryDirectory(prefix="opsd-stack-") as folder:
        try:
            with world.Stack(Path(folder), scrape_s=scrape, temporary=True) as running:
                told = _show(running)
                if keep:
                    click.echo("everything keeps running; Ctrl-C ends it")
                    while True:
                        time.sleep(3600)
        except (world.StackError, NoCompilerError, SimulationError) as error:
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
