"""``opsd slurm``: a run as a Slurm job, and what opsd may do with Slurm on this machine."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

import click

from opsd import exitcodes
from opsd.commands.options import Group, Seconds, option
from opsd.commands.slurm_attend import attend
from opsd.commands.slurm_run import run
from opsd.slurm.check import Report
from opsd.slurm.check import check as find_out
from opsd.slurm.connect import choose

MARKS = {True: "ok ", False: "no ", None: "   "}


@click.group(cls=Group)
def slurm() -> None:
    """A run as a Slurm job, and what opsd may do with Slurm on this machine."""


slurm.add_command(run)
slurm.add_command(attend)


@slurm.command()
@option("--node", default=lambda: os.uname().nodename, show_default="host name", help="Its name in Slurm.")
@option("--deadline", default=12.0, type=Seconds(min=0.1), help="Seconds for an answer.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def check(ctx: click.Context, node: str, deadline: float, as_json: bool) -> None:
    """Say which Slurm this is, what this user may do, and which settings make recovery slow.

    Changes nothing. Exits with 1 where opsd can do nothing with Slurm: no commands, no configuration, no answer.
    """
    choice = choose(deadline)
    report = find_out(choice.slurm, node, no_bindings=choice.no_bindings)
    click.echo(json.dumps(asdict(report), indent=1) if as_json else _text(report))
    ctx.exit(exitcodes.OK if report.usable else exitcodes.FAILED)


def _text(report: Report) -> str:
    lines = [f"{MARKS[fact.ok]} {fact.text}" for fact in report.facts]
    if report.advice:
        lines += ["", "Settings in slurm.conf that make recovery slow:"]
    for advice in report.advice:
        lines += [f"    {advice.recommended}  (now {advice.now})", f"        {advice.why}"]
    return "\n".join(lines)
