"""``opsd data``: pipelines of datatrove with proof of what is done, and what there is to know about their data."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from opsd import exitcodes
from opsd.commands.options import Group, exit_codes, option, options
from opsd.commands.output import fail, output_console, plain_table, warn, written
from opsd.data.pipeline import PipelineError, load
from opsd.data.run import RETRIES, Engine
from opsd.slurm.connect import choose
from opsd.slurm.port import SlurmError, SlurmMissing
from opsd.words import with_remedy

_FILE = click.Path(path_type=Path, dir_okay=False)

run_options = options(
    click.argument("file", type=_FILE),
    option("--dir", "root", type=click.Path(path_type=Path, file_okay=False),
           help="Folder of the run's state; by default FILE without .py. All nodes must see it."),
)  # fmt: skip


@click.group(cls=Group)
def data() -> None:
    """Run datatrove pipelines so that nothing is skipped and nothing is read twice.

    FILE is a Python file that defines `stages`, a list of datatrove's executors. docs/data.md describes it.
    """


@data.command(
    epilog=exit_codes(
        {
            0: "all stages are done",
            1: "a task was given up, or Slurm refused",
            2: "FILE cannot be used, or something has changed or is missing",
            3: "interrupted; the same command goes on",
            74: "the disk or the quota is full",
        }
    )
)  # fmt: skip
@run_options
@option("--local", is_flag=True, help="Run on this machine, not as arrays of Slurm.")
@option("--partition", help="Where arrays run; by default the executor's partition, or Slurm's default.")
@option("--sbatch", "sbatch", multiple=True, metavar="OPTION", help="Another option of sbatch for arrays.")
@option("--tasks-per-job", type=click.IntRange(1), help="Tasks that a job of an array runs, one after the other.")
@option(
    "--workers",
    type=click.IntRange(1),
    help="Tasks at once; by default those of the executor, on this machine at most one for each core.",
)
@option("--retries", type=click.IntRange(0), default=RETRIES, help="How often a task that failed is tried again.")
@option(
    "--redo", is_flag=True, help="Run again what has changed and what depends on it, and tasks whose files are damaged."
)
@option("--allow-copies", is_flag=True, help="Accept inputs that have the same content as another one.")
def run(file: Path, root: Path | None, retries: int, redo: bool, allow_copies: bool, **given: Any) -> int:
    """Run the stages of FILE, one after the other: as arrays of Slurm, or here if there is no Slurm.

    Repeat it to go on. A task is done once its files are on the disk, with the digest of code, arguments, inputs and
    number of tasks. If one of them has changed, the command says what, and runs nothing.
    """
    from opsd.data.run import Run, held

    root = root or file.with_suffix("")
    try:
        stages = load(file)
        with held(root):
            complete = Run(file, root, stages, _engine(root, retries, given), warn, redo, allow_copies).run()
            _show(_status(root))
    except PipelineError as error:
        fail(str(error), exitcodes.USAGE)
    except SlurmError as error:
        fail(f"{error}; the same command goes on")
    except KeyboardInterrupt:
        warn("interrupted; the same command goes on")
        return exitcodes.INTERRUPTED
    except OSError as error:
        fail(with_remedy(error), exitcodes.of_error(error))
    return exitcodes.OK if complete else exitcodes.FAILED


@data.command(epilog=exit_codes({0: "told", 1: "FILE cannot be written", 2: "there is no such run"}))
@run_options
@option("--json", "json_file", type=_FILE, help="Write JSON to FILE, - for stdout.")
def status(file: Path, root: Path | None, json_file: Path | None) -> int:
    """Tasks, documents at each step, time left and cost of the run of FILE."""
    found = _status(root or file.with_suffix(""))
    if json_file is None:
        _show(found)
    elif not written(json_file, json.dumps(found, indent=1) + "\n", "the status"):
        return exitcodes.FAILED
    return exitcodes.OK


@data.command(hidden=True)
@click.argument("root", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("stage", type=int)
@click.argument("array")
def task(root: Path, stage: int, array: str) -> int:
    """Run the tasks of one job of an array."""
    from opsd.data.array import run_job

    try:
        return run_job(root, stage, array, os.environ)
    except PipelineError as error:
        fail(str(error), exitcodes.USAGE)


def _engine(root: Path, retries: int, given: dict[str, Any]) -> Engine:
    """Slurm if it is here and --local is not given."""
    from opsd.data.array import Arrays
    from opsd.data.local import Local

    if not given["local"]:
        slurm = choose().slurm
        try:
            slurm.configuration()
        except SlurmMissing as error:
            warn(f"tasks run on this machine: {error}")
        else:
            return Arrays(
                root, slurm, warn, partition=given["partition"] or "", options=given["sbatch"],
                limit=given["workers"] or 0, per_job=given["tasks_per_job"] or 0, retries=retries,
            )  # fmt: skip
    return Local(root, given["workers"] or 0, retries)


def _status(root: Path) -> dict[str, Any]:
    from opsd.data.status import status as status_of

    try:
        return status_of(root)
    except PipelineError as error:
        fail(str(error), exitcodes.USAGE)


def _show(found: dict[str, Any]) -> None:
    from opsd.data.status import funnel, headline

    for stage in found["stages"]:
        click.echo(headline(stage))
        table = plain_table("step", "documents in", "out", "dropped", "bytes in", "out", "", "why dropped")
        for row in funnel(stage):
            table.add_row(*row)
        output_console().print(table)
    cost = found["cost"]
    click.echo(
        f"cost: {cost['core_hours']:.3f} core-hours, of which {cost['lost_core_hours']:.3f} were lost to retries"
    )
