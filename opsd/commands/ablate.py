"""``opsd ablate``: studies of arms and seeds, their verdicts and their cost."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.markup import escape

from opsd import exitcodes
from opsd.ablate import run as running
from opsd.ablate.cells import (
    CELLS,
    ORIGIN,
    Cell,
    Found,
    cell_dict,
    cells_of,
    cost_of_all,
    look,
    others_in,
    tell_main_run,
)
from opsd.ablate.study import BASELINE, Study, StudyError, cost_line, read_study
from opsd.collectors.lib.processes import start_time
from opsd.commands.options import Finite, Group, exit_codes, option, options
from opsd.commands.output import fail, output_console, plain_table, warn, written
from opsd.commands.plan import Known, figures_of
from opsd.commands.settings import load
from opsd.launch.ranks.settings import gpu_count
from opsd.plan.hardware import GPUS
from opsd.slurm.connect import choose
from opsd.slurm.port import Job, SlurmError, SlurmMissing
from opsd.words import plural, with_remedy

if TYPE_CHECKING:
    from opsd.ablate.report import Report
    from opsd.ablate.tasks import Task

T = TypeVar("T")

LIMIT = 8
"""Jobs of a study that run at once."""
_FILE = click.Path(path_type=Path, dir_okay=False)
_STYLES = {
    "better": "green",
    "worse": "red",
    "equivalent": "cyan",
    "undecided": "yellow",
    "failed": "red",
    "refused": "red",
    "done": "green",
}


study_options = options(
    click.argument("file", type=_FILE),
    option("--dir", "root", type=click.Path(path_type=Path, file_okay=False),
           help="Folder of the runs; by default FILE without .toml. All nodes must see it."),
)  # fmt: skip
job_options = options(
    option("--local", is_flag=True, help="Run one after the other on this machine, not as jobs of Slurm."),
    option("--nproc-per-node", "ranks", type=click.IntRange(1),
           help="Ranks of each run. By default 1 in a job, and here one for each GPU, or 1 without GPUs."),
    option("--limit", type=click.IntRange(1), default=LIMIT, help="How many jobs of the study run at once."),
    option("--partition", help="Where the jobs run; by default the lowest partition whose jobs give way to others."),
    option("--sbatch", "sbatch", multiple=True, metavar="OPTION",
           help="Another option of sbatch, for instance --sbatch=--gpus-per-node=8."),
)  # fmt: skip


power_options = options(
    option("--effect", type=Finite(0, min_open=True), required=True,
           help="The smallest effect to be seen, in the metric's unit."),
    option("--spread", type=Finite(0, min_open=True),
           help="The standard deviation of a paired difference, if it is known without runs of the baseline."),
    option("--gpu", "kind", type=click.Choice(GPUS, case_sensitive=False),
           help="Take the cost from `opsd plan` for this kind of GPU, not from runs of the baseline."),
    option("--gpus", type=click.IntRange(1), default=1, help="GPUs of a run, for --gpu."),
)  # fmt: skip


@click.group(cls=Group)
def ablate() -> None:
    """Experiments beside a main run: arms and seeds on idle nodes, and verdicts that hold.

    FILE is a study, described in docs/ablations.md. All state is the folders of its runs.
    """


@ablate.command(
    epilog=exit_codes(
        {
            0: "all cells are done, or submitted",
            1: "a cell failed, the budget is too small, or Slurm refused",
            2: "FILE cannot be used, or the code or a library has changed",
            3: "interrupted; the cell has saved its state",
        }
    )
)  # fmt: skip
@study_options
@job_options
def run(file: Path, root: Path | None, **given: Any) -> int:
    """Run the cells of FILE that are not done: each arm with each seed.

    Repeat it to go on: a finished cell never runs again, and one that was cut off resumes from its checkpoint. A cell
    that failed runs again. Jobs have a low priority, are requeued when they are preempted, and are submitted at once.
    """
    study, cells = _study(file, root)
    return _run(study, cells, _root(file, root), given)


@ablate.command(epilog=exit_codes({0: "told", 1: "Slurm does not tell", 2: "FILE cannot be used"}))
@study_options
@option("--json", "json_file", type=_FILE, help="Write JSON to FILE, - for stdout.")
def status(file: Path, root: Path | None, json_file: Path | None) -> int:
    """The state, step, loss and job of each cell of FILE.

    A cell whose job waits or runs has the state that Slurm names.
    """
    study, cells = _study(file, root)
    found = _look(cells)
    _tell_main_run(study, found)
    jobs: dict[str, Job] = _asked(lambda: running.jobs_of(cells, choose().slurm), {})
    _refuse_to_overwrite(json_file, file, _root(file, root))
    if json_file is not None:
        told = {"cells": [_status_dict(each, jobs.get(each.cell.name)) for each in found]}
        if not written(json_file, json.dumps(told, indent=1) + "\n", "the status"):
            return exitcodes.FAILED
    if str(json_file) != "-":
        _show_status(found, jobs)
    _tell_of_folder(_root(file, root), found)
    return exitcodes.OK


def _state_of(found: Found, job: Job | None) -> str:
    return job.state if job is not None and found.state != "done" else found.state


def _status_dict(found: Found, job: Job | None) -> dict[str, Any]:
    return cell_dict(found) | {"state": _state_of(found, job), "job": None if job is None else job.id}


def _show_status(found: Sequence[Found], jobs: Mapping[str, Job]) -> None:
    table = plain_table("cell", "arm", "seed", "state", "step", "loss", "job")
    for each in found:
        cell, job = each.cell, jobs.get(each.cell.name)
        state = _state_of(each, job)
        loss = "-" if each.loss is None else f"{each.loss:.4f}"
        table.add_row(
            cell.name, escape(cell.arm.name), str(cell.seed), f"[{_STYLES.get(state, 'default')}]{state}[/]",
            f"{each.step}/{cell.steps}", loss, str(job.id) if job is not None else "-",
        )  # fmt: skip
    output_console().print(table)
    for each in found:
        if each.reason and each.cell.name not in jobs:
            warn(f"cell {each.cell.name} {each.state}: {each.reason}")
    done = sum(each.state == "done" for each in found)
    click.echo(f"{done} of {plural(len(found), 'cell')} done, {cost_of_all(found).gpu_hours:.2f} GPU-hours")


@ablate.command(
    epilog=exit_codes({0: "no job of the study is left", 1: "Slurm cannot do it", 2: "FILE cannot be used"})
)
@study_options
def stop(file: Path, root: Path | None) -> int:
    """Cancel the jobs of FILE, and no others. `opsd ablate run` goes on later."""
    _, cells = _study(file, root)
    try:
        stopped = running.stop(cells, choose().slurm)
    except SlurmError as error:
        fail(f"{error}; what runs on this machine ends with Ctrl-C")
    click.echo(f"{plural(len(stopped), 'job')} cancelled{': ' if stopped else ''}{', '.join(map(str, stopped))}")
    return exitcodes.OK


@ablate.command(
    epilog=exit_codes({0: "told, whatever the verdicts are", 1: "it could not be written", 2: "FILE cannot be used"})
)
@study_options
@option("--json", "json_file", type=_FILE, help="Write JSON to FILE, - for stdout.")
@option("--html", "page_file", type=_FILE, help="Write a page with charts to FILE, - for stdout.")
@option("--look", type=click.IntRange(1), default=1, help="Which of the planned looks at the study this is.")
@option("--beside", type=click.Path(path_type=Path, file_okay=False), metavar="RUN",
        help="Compare the cost with the plan in the folder of the main run (`opsd plan --run`), and note it there. "
        "By default main_run of FILE.")  # fmt: skip
def report(
    file: Path, root: Path | None, json_file: Path | None, page_file: Path | None, look: int, beside: Path | None
) -> int:
    """The verdict on each arm of FILE, with its effect and the interval of that, and the cost.

    Arms are compared with the baseline in pairs of the same seed. The level alpha is for all arms and looks together.
    """
    if str(json_file) == str(page_file) == "-":
        raise click.UsageError("--json and --html cannot both be -: give one of them a file")
    if json_file is not None and page_file is not None and json_file.resolve() == page_file.resolve():
        raise click.UsageError("--json and --html name the same file: give each its own")
    for out in (json_file, page_file):
        _refuse_to_overwrite(out, file, _root(file, root))
    made = _report(file, root, look, beside)
    _tell_main_run(made.study, made.found, beside)
    from opsd.ablate.report import as_dict

    if json_file is not None and not written(json_file, json.dumps(as_dict(made), indent=1) + "\n", "the report"):
        return exitcodes.FAILED
    if page_file is not None:
        from opsd.report.study import study_page

        if not written(page_file, study_page(made), "the page"):
            return exitcodes.FAILED
    if "-" not in (str(json_file), str(page_file)):
        _show(made)
    _tell_of_folder(_root(file, root), made.found)
    return exitcodes.OK


@ablate.command(epilog=exit_codes({0: "told", 2: "FILE cannot be used, or no cell has an evaluation"}))
@study_options
@option("--json", "json_file", type=_FILE, help="Write JSON to FILE, - for stdout.")
@option("--early", type=Finite(0, 1, min_open=True), default=0.1,
        help="Share of the tokens at which the order of the arms is compared with that at the end.")  # fmt: skip
def probes(file: Path, root: Path | None, json_file: Path | None, early: float) -> int:
    """Whether the evaluations of FILE are good early signals, from those of all checkpoints.

    A good one is monotonic over the baseline's checkpoints, above the noise between seeds, above chance, and keeps the
    order of the arms. The last column tells whether the early order was that at the end.
    """
    _, cells = _study(file, root)
    try:
        from opsd.ablate.tasks import task_dict, tasks_of

        tasks = tasks_of(_look(cells), early=early)
    except (StudyError, ImportError) as error:
        fail(str(error), exitcodes.USAGE)
    if json_file is not None:
        text = json.dumps({"tasks": [task_dict(task) for task in tasks]}, indent=1) + "\n"
        if not written(json_file, text, "the probes"):
            return exitcodes.FAILED
    if str(json_file) != "-":
        _show_probes(tasks)
    return exitcodes.OK


@ablate.command(
    epilog=exit_codes({0: "the budget is enough", 1: "it is not, or no number of seeds is", 2: "FILE cannot be used"})
)
@study_options
@power_options
def power(file: Path, root: Path | None, **given: Any) -> int:
    """How many seeds FILE needs to see an effect, and what they cost, from the runs of its baseline so far.

    With that many seeds, four of five studies see the effect. The upper bound of the baseline's spread counts.
    """
    study, cells = _study(file, root)
    return _power(study, cells, given)


@ablate.command(
    epilog=exit_codes(
        {0: "the budget is enough", 1: "it is not, or a cell failed", 2: "FILE cannot be used", 3: "interrupted"}
    )
)
@study_options
@job_options
@power_options
def pilot(file: Path, root: Path | None, **given: Any) -> int:
    """Run the baseline of FILE alone, then say what opsd ablate power says. The study uses these runs too."""
    study, cells = _study(file, root)
    own = [cell for cell in cells if cell.arm.name == BASELINE]
    if code := _run(study, own, _root(file, root), given):
        return code
    if any(each.state != "done" for each in _look(own)):
        click.echo("repeat this command when these jobs have ended")
        return exitcodes.OK
    return _power(study, cells, given)


@ablate.command(epilog=exit_codes({0: "written", 1: "it could not be written", 2: "FILE or ARM cannot be used"}))
@study_options
@click.argument("arm")
@option("--out", type=_FILE, metavar="TOML", help="The new baseline; by default FILE-ARM.toml beside FILE.")
@option("--reason", default="", help="Why an arm is promoted that is not proved better.")
@option("--look", type=click.IntRange(1), default=1, help="As of opsd ablate report.")
def promote(file: Path, root: Path | None, arm: str, out: Path | None, reason: str, look: int) -> int:
    """Write a new baseline: that of FILE with the change of ARM, and the evidence.

    Comparisons with the old baseline, in studies beside FILE, are stale from then on and say so.
    """
    made = _report(file, root, look)
    from opsd.ablate import report as reporting

    target = out or file.with_name(f"{file.stem}-{arm}.toml")
    try:
        reporting.promote(made, arm, target, reason)
    except StudyError as error:
        fail(str(error), exitcodes.USAGE)
    except OSError as error:
        fail(with_remedy(error))
    click.echo(target)
    return exitcodes.OK


@ablate.command(
    hidden=True,
    context_settings={"ignore_unknown_options": True},
    epilog=exit_codes({0: "the cell is done", 2: "it may not run here"}),
)
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def cell(folder: Path, command: tuple[str, ...]) -> int:
    """Run the COMMAND of the cell in FOLDER in the job of it that this is in, with the exit code of COMMAND."""
    try:
        return running.run_in_job(folder, command, _job_start())
    except StudyError as error:
        fail(str(error), exitcodes.USAGE)
    except OSError as error:
        fail(with_remedy(error), exitcodes.of_error(error))


def _job_start() -> float:
    """The epoch second at which the job began, as Slurm says from 23.02 on; before that the start of its script.

    The kernel tells that in ticks since the boot, and the time of the boot in whole seconds, which is too coarse.
    """
    told = os.environ.get("SLURM_JOB_START_TIME", "")
    if told.isdecimal():
        return float(told)
    ticks = start_time(os.getpid())
    assert ticks is not None  # of the own process
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def _study(file: Path, root: Path | None) -> tuple[Study, list[Cell]]:
    try:
        study = read_study(file)
        return study, cells_of(study, _root(file, root))
    except StudyError as error:
        fail(str(error), exitcodes.USAGE)


def _root(file: Path, root: Path | None) -> Path:
    return root or file.with_suffix("")


def _tell_of_folder(root: Path, found: Sequence[Found]) -> None:
    """Say what is odd about the folder of the study."""
    if not root.exists():
        warn(f"{root} does not exist: nothing has run there")
    if others := others_in(root, [each.cell for each in found]):
        warn(f"{plural(others, 'cell')} in {root}, of other seeds or settings than those of the file, are left out")


def _refuse_to_overwrite(out: Path | None, file: Path, root: Path) -> None:
    """End the command if ``out`` is the study's file or would be among its state."""
    if out is None or str(out) == "-":
        return
    from opsd.ablate.report import PROMOTIONS

    target, state = out.resolve(), root.resolve()
    study, _ = _study(file, root)
    own = (file.resolve(), study.source.resolve(), file.resolve().with_name(PROMOTIONS), state / ORIGIN, state / CELLS)
    if target in own or target.is_relative_to(state / CELLS):
        fail(f"{out} belongs to the study; name another file", exitcodes.USAGE)


def _look(cells: Sequence[Cell]) -> list[Found]:
    try:
        return [look(cell) for cell in cells]
    except StudyError as error:
        fail(str(error), exitcodes.USAGE)
    except OSError as error:
        fail(with_remedy(error))


def _tell_main_run(study: Study, found: Sequence[Found], beside: Path | None = None) -> None:
    """Note the cost in the folder of the main run; a folder that cannot be written is said."""
    if (folder := beside or study.main_run) is not None:
        try:
            tell_main_run(study, found, folder)
        except StudyError as error:
            warn(str(error))


def _asked(ask: Callable[[], T], without: T) -> T:
    """What Slurm answers, ``without`` where there is none."""
    try:
        return ask()
    except SlurmMissing:
        return without
    except SlurmError as error:
        fail(str(error))


def _run(study: Study, cells: Sequence[Cell], root: Path, given: Mapping[str, Any]) -> int:
    _demand_budget(study, cells)
    ranks = given["ranks"]
    try:
        if not given["local"]:
            try:
                return _submit(cells, root, given)
            except SlurmMissing as error:
                if given["partition"] or given["sbatch"]:
                    fail(f"{error}; or run on this machine with --local")
                warn(f"the cells run on this machine, one after the other: {error}")
        failed = running.run_local(root, cells, ranks or gpu_count(os.environ) or 1, click.echo)
    except KeyboardInterrupt:
        warn("interrupted; the same command goes on")
        return exitcodes.INTERRUPTED
    except StudyError as error:
        fail(str(error), exitcodes.USAGE)
    except SlurmError as error:
        fail(f"{error}; the same command goes on")
    except OSError as error:
        fail(with_remedy(error), exitcodes.of_error(error))
    found = _look(cells)
    _tell_main_run(study, found)
    done = sum(each.state == "done" for each in found)
    click.echo(f"{done} of {plural(len(cells), 'cell')} done; `opsd ablate report` compares them")
    for each in failed:
        warn(f"cell {each.cell.name} failed with exit code {each.code}; its log is {each.log}")
    refused = [each for each in found if each.state == "refused" and each.code == exitcodes.OK]
    for cell in refused:
        warn(f"cell {cell.cell.name} does not count: {cell.reason}")
    return exitcodes.FAILED if failed or refused else exitcodes.OK


def _submit(cells: Sequence[Cell], root: Path, given: Mapping[str, Any]) -> int:
    """Raises StudyError, SlurmError, OSError."""
    slurm = choose().slurm
    partition = given["partition"] or running.spare_partition(slurm.partitions())
    jobs = running.submit(
        root, cells, slurm, partition=partition, limit=given["limit"], ranks=given["ranks"] or 1,
        options=given["sbatch"], opsd=running.opsd_command(),
    )  # fmt: skip
    how = f"to {partition}, {given['limit']} at once; `opsd ablate status` shows them"
    click.echo(f"{plural(len(jobs), 'job')} submitted {how}")
    return exitcodes.OK


def _demand_budget(study: Study, cells: Sequence[Cell]) -> None:
    """End the command if the cells that are left would cost more than is left of the budget."""
    budget = study.settings.budget_gpu_hours
    found = _look(cells)
    done = [each for each in found if each.state == "done"]
    if budget is None or not done or len(done) == len(found):
        return
    each = cost_of_all(done).gpu_hours / len(done)
    wanted = cost_of_all(found).gpu_hours + each * (len(found) - len(done))
    if wanted > budget:
        over = f"about {wanted:,.2f} GPU-hours, more than budget_gpu_hours {budget:g}"
        fail(f"all cells take {over}: take fewer seeds or arms")


def _power(study: Study, cells: Sequence[Cell], given: Mapping[str, Any]) -> int:
    effect, spread, kind, gpus = (given[name] for name in ("effect", "spread", "kind", "gpus"))
    try:
        from opsd.ablate.report import over_budget, power_of

        hours = None if kind is None else _planned_seed_hours(study, kind, gpus)
        found = power_of(study, _look(cells), effect, spread=spread, seed_hours=hours)
    except (StudyError, ImportError) as error:
        fail(str(error), exitcodes.USAGE)
    told = f"{plural(found.runs, 'run')} of the baseline: " if found.runs else ""
    click.echo(f"{told}the spread of a difference is at most {found.spread:.4g}")
    how = f"opsd plan on {plural(gpus, 'GPU')} of {kind}" if kind else "the runs of the baseline"
    cost = "unknown; --gpu takes it from opsd plan"
    if found.seeds is None:
        cost = "more than can be told"
    elif found.gpu_hours is not None:
        cost = f"{found.gpu_hours:,.2f} GPU-hours by {how}"
    runs = "" if found.seeds is None else f" in {plural(len(study.arms), 'arm')} with the baseline"
    click.echo(f"effect {effect:g}: {found.seeds or 'more than 1,000'} seeds{runs}; cost: {cost}")
    if problem := over_budget(study, found):
        fail(problem)
    return exitcodes.OK


def _planned_seed_hours(study: Study, kind: str, gpus: int) -> float:
    """The GPU-hours that `opsd plan` predicts for one seed of all arms. Raises StudyError."""
    from opsd.plan.plan import plan_as_is
    from opsd.plan.search import CannotPlan
    from opsd.plan.source import tokens_of

    figures = figures_of(kind, study.baseline.config.model.dtype, Known((), (), load(None)))
    hours = 0.0
    for arm in study.arms:
        try:
            hours += plan_as_is(arm.config, kind, gpus, tokens_of(arm.config), *figures).gpu_hours
        except CannotPlan as error:
            raise StudyError(f"arm {arm.name} cannot be planned on {plural(gpus, 'GPU')}: {error}") from error
    return hours


def _report(file: Path, root: Path | None, look: int, beside: Path | None = None) -> Report:
    study, cells = _study(file, root)
    try:
        from opsd.ablate.report import make_report

        return make_report(study, _look(cells), _root(file, root), look, beside)
    except (StudyError, ImportError) as error:
        fail(str(error), exitcodes.USAGE)


def _show_probes(tasks: Sequence[Task]) -> None:
    """The probes for people."""
    table = plain_table("task", "monotonic", "signal/noise", "above chance", "order", "early order")
    for task in tasks:
        found, predicted = task.probe, task.predicted
        chance = "-"
        if found is not None and task.chance is not None:
            chance = f"{found.above_chance:+.3g} ({_range(found.low, found.high)})"
        early = "-"
        if predicted is not None and task.early is not None:
            early = f"{predicted[0]:+.2f} ({_range(*predicted[1:])}) at {task.early:.0%}"
        shown = (found.monotonic, found.signal_to_noise) if found is not None else (None, None)
        table.add_row(escape(task.name), *map(_number, shown), chance, _number(task.order), early)
    output_console().print(table)
    for task in tasks:
        for reason in task.reasons:
            click.echo(f"{task.name}: {reason}")


def _number(value: float | None) -> str:
    return f"{value:+.2f}" if value is not None and math.isfinite(value) else "-"


def _range(low: float, high: float) -> str:
    return f"{low:+.2g} to {high:+.2g}" if math.isfinite(low) and math.isfinite(high) else "no interval"


def _show(report: Report) -> None:
    """The verdicts for people."""
    settings = report.study.settings
    table = plain_table("arm", "verdict", "effect", "interval", "pairs", "p")
    for arm in report.arms:
        found = arm.verdict
        p = "-" if found.adjusted_p is None else f"{found.adjusted_p:.2g}"
        effect = f"{found.effect:+.4g}" if math.isfinite(found.effect) else "-"
        interval = f"{found.low:+.4g} to {found.high:+.4g}" if math.isfinite(found.low) else "-"
        word = f"[{_STYLES[found.verdict]}]{found.verdict}[/]"
        table.add_row(escape(found.name), word, effect, interval, str(found.pairs), p)
    output_console().print(table)
    direction = "higher" if report.study.higher_is_better else "lower"
    click.echo(
        f"\n{settings.metric} in {report.unit}, {direction} is better; alpha {settings.alpha:g} "
        f"over {plural(len(report.arms), 'arm')}, look {report.look} of {settings.looks}"
    )
    for arm in report.arms:
        told = f"tokens x {arm.tokens:.3g}, FLOPs x {arm.flops:.3g}, compared at equal {arm.equal}"
        change = ", ".join(arm.changed) or "nothing (A/A)"
        permitted = f"; permitted to differ: {', '.join(arm.differ)}" if arm.differ else ""
        click.echo(f"{arm.verdict.name}: changes {change}; {told}{permitted}. {arm.verdict.reason}")
    left = sum(each.state != "done" for each in report.found)
    click.echo(f"cost: {cost_line(report.cost)}")
    if hours := report.planned_gpu_hours:
        click.echo(f"main run: {hours:,.0f} GPU-hours planned, of which this is {report.cost.gpu_hours / hours:.1%}")
    for sentence in (*([f"{plural(left, 'cell')} not done"] if left else []), *report.doubts):
        warn(sentence)
