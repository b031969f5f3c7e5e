"""``opsd slurm``: a run as a Slurm job, and what opsd may do with Slurm on this machine."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import click

from opsd import exitcodes
from opsd.commands.options import Group, Seconds, option
from opsd.commands.slurm_attend import attend
from opsd.commands.slurm_run import run
from opsd.files import read_settings
from opsd.slurm.check import Asked, Fact, Report, facts, of_job, of_script
from opsd.slurm.check import check as find_out
from opsd.slurm.connect import choose
from opsd.slurm.port import Slurm, SlurmError
from opsd.words import reason

MARKS = {True: "ok ", False: "no ", None: "   "}


@click.group(cls=Group)
def slurm() -> None:
    """A run as a Slurm job, and what opsd may do with Slurm on this machine."""


slurm.add_command(run)
slurm.add_command(attend)


@slurm.command()
@option("--node", default=lambda: os.uname().nodename, show_default="host name", help="Its name in Slurm.")
@option("--sbatch", "script", type=click.Path(exists=True, path_type=Path), metavar="FILE",
        help="Say what a job of this batch script can keep of what opsd slurm run promises.")  # fmt: skip
@option("--job", type=click.IntRange(1), metavar="JOB", help="The same of a job that runs or waits.")
@option("--deadline", default=12.0, type=Seconds(min=0.1), help="Seconds for an answer.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def check(ctx: click.Context, node: str, script: Path | None, job: int | None, deadline: float, as_json: bool) -> None:
    """Say which Slurm this is, what this user may do, and which settings make recovery slow.

    Changes nothing. Exits with 1 where opsd can do nothing with Slurm: no commands, no configuration, no answer. With
    --sbatch or --job it exits with 1 if a promise cannot be kept.
    """
    if script is not None and job is not None:
        raise click.UsageError("--sbatch and --job exclude each other")
    if script is not None:
        report = _promises(of_script(_read(script), os.environ))
    elif job is not None:
        report = _of_job(choose(deadline).slurm, job)
    else:
        choice = choose(deadline)
        report = find_out(choice.slurm, node, no_bindings=choice.no_bindings)
    click.echo(json.dumps(asdict(report), indent=1) if as_json else _text(report))
    ctx.exit(exitcodes.OK if report.usable else exitcodes.FAILED)


def _read(script: Path) -> str:
    try:
        return read_settings(script).decode(errors="replace")
    except OSError as error:
        raise click.UsageError(f"{script}: {reason(error)}") from error


def _of_job(slurm: Slurm, job: int) -> Report:
    try:
        details = slurm.details(job)
        return _promises(of_job(details, slurm.script(job) if details.batch else None), job)
    except SlurmError as error:
        return Report(False, (Fact(False, str(error)),))


def _promises(asked: Asked, job: int = 0) -> Report:
    found = facts(asked, job)
    return Report(all(fact.ok is not False for fact in found), found)


def _text(report: Report) -> str:
    lines = [f"{MARKS[fact.ok]} {fact.text}" for fact in report.facts]
    if report.advice:
        lines += ["", "Settings in slurm.conf that make recovery slow:"]
    for advice in report.advice:
        lines += [f"    {advice.recommended}  (now {advice.now})", f"        {advice.why}"]
    return "\n".join(lines)
