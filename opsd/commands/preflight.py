"""``opsd preflight``: check this node, look back at its history, compare nodes."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from opsd import exitcodes
from opsd.collectors.infiniband import InfinibandSettings
from opsd.collectors.kmsg import KmsgSettings
from opsd.collectors.nvml import NvmlSettings
from opsd.collectors.repairs import FOLDER, gpus_renewed_at
from opsd.commands.options import (
    Finite,
    SectionedGroup,
    config_options,
    exit_codes,
    option,
    report_options,
    report_targets,
)
from opsd.commands.output import output_console, written
from opsd.commands.preflight_network import exit_code, network, node_drill
from opsd.commands.settings import BadConfig, load
from opsd.config import Settings
from opsd.preflight import burnin
from opsd.preflight.base import PROFILES, Context, Demand
from opsd.preflight.checks import CHECKS, run_alerts
from opsd.preflight.command import BURN_IN_H, HISTORY, Request, quarantine, say
from opsd.preflight.command import preflight as run_preflight
from opsd.preflight.engine import SelectionError
from opsd.preflight.fleet import Deviation, FleetError, deviations, facts_of, fleet_of, newest_by_node
from opsd.preflight.history import History, HistoryError, render
from opsd.preflight.report import Report, ReportError
from opsd.repair.after_preflight import order_for_refused_job, ordering
from opsd.repair.case_file import CaseError
from opsd.slurm.connect import choose
from opsd.slurm.hostlist import compress
from opsd.slurm.port import SlurmError
from opsd.spares import pool, readiness
from opsd.words import clock

_FILE = click.Path(dir_okay=False, path_type=Path)


def _demand_settings(train: str) -> None:
    """Raises BadConfig if ``train`` names no settings; whether they are good is for the checks."""
    from opsd.trainer.config import ConfigError, locate

    try:
        locate(train)
    except ConfigError as error:
        raise BadConfig(f"--train: {error}") from error


def _split(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> list[str]:
    return [name for value in values for name in value.split(",") if name]


def _script(_ctx: click.Context, _param: click.Parameter, value: str) -> str:
    try:
        shlex.split(value)
    except ValueError as error:
        raise click.BadParameter(f"{value!r:.80} cannot be split into words: {error}") from error
    return value


_SECTIONS = {
    "What is checked": ("profile", "only", "skip", "hours"),
    "The run that is about to start": ("train", "train_set", "script", "nodes", "sbatch"),
    "Results": ("json_file", "junit_file", "markdown_file", "textfile_file", "word_file", "quiet"),
    "What follows": ("acting", "fire_alerts"),
}


@click.group(
    cls=SectionedGroup,
    sections=_SECTIONS,
    invoke_without_command=True,
    epilog=exit_codes(
        {
            0: "the node is fit",
            1: "a check failed or could not run",
            2: "wrong command line or configuration, or checks need torch and there is none (preflight.python)",
            3: "interrupted",
        }
    ),
)
@option("--profile", type=click.Choice(PROFILES), default="quick", help="How thorough.")
@option("--only", multiple=True, callback=_split, metavar="CHECK,…", help="Only these checks.")
@option("--skip", multiple=True, callback=_split, metavar="CHECK,…", help="Without these checks.")
@option(
    "--hours",
    type=Finite(0, burnin.LONGEST_H, min_open=True),
    help=f"How long a burn-in goes on, {BURN_IN_H:g} by default. One that was cut off is resumed.",
)
@report_options
@config_options
@option("--train", default="", metavar="CONFIG", help="Check the run that is about to start as well.")
@option("--train-set", multiple=True, metavar="SECTION.KEY=VALUE", help="Override one setting of that run.")
@option(
    "--run",
    "script",
    default="",
    callback=_script,
    metavar="'SCRIPT [ARGUMENTS]'",
    help="Audit the first batches of a post-training script of transformers or TRL, with the words that follow opsd "
    "launch.",
)
@option("--nodes", type=click.IntRange(1), default=1, help="Nodes of that run.")
@option("--sbatch", type=_FILE, help="Batch script of that run.")
@option("--alerts", "fire_alerts", is_flag=True, help="Fire each alert once, marked as a test. Pages people.")
@option(
    "--act",
    "acting",
    is_flag=True,
    help="Drain this node in Slurm if it failed, give it back if it passed, mark a spare.",
)
@option("--quiet", is_flag=True, help="Print nothing; the exit code and the files tell.")
@option("--verdict", "word_file", type=_FILE, help="Write fit, unfit or unknown to FILE once all checks have ended.")
@click.pass_context
def preflight(
    ctx: click.Context,
    /,
    profile: str,
    only: list[str],
    skip: list[str],
    file: Path | None,
    overrides: tuple[str, ...],
    train: str,
    train_set: tuple[str, ...],
    script: str,
    nodes: int,
    sbatch: Path | None,
    hours: float | None,
    fire_alerts: bool,
    acting: bool,
    quiet: bool,
    word_file: Path | None,
    **files: Path | None,
) -> int | None:
    """Check that this node is fit for a run.

    --verdict prints one word for scripts: fit, unfit (a check failed) or unknown (a required check could not run).
    Slurm's prolog drains an unfit node. With policy.drain and policy.repair = act it also orders a repair, if all
    failed checks are of GPUs or of processes left on them.
    """
    settings = ctx.obj = load(file, overrides)
    if ctx.invoked_subcommand is not None:
        return None
    if hours is not None and profile != burnin.PROFILE:
        raise BadConfig(f"--hours belongs to --profile {burnin.PROFILE}; the others end by themselves")
    if fire_alerts and profile not in run_alerts.CHECK.seconds:
        raise BadConfig(f"--alerts belongs to --profile {' and '.join(run_alerts.CHECK.seconds)}")
    if train:
        _demand_settings(train)
    targets = report_targets(files)
    own = settings.preflight
    context = Context(
        node=settings.agent.node,
        profile=profile,
        seconds=0.0,
        settings=own,
        demand=Demand(
            own.tokens_per_s,
            checkpoint_bytes=own.checkpoint_bytes,
            checkpoint_interval_s=own.checkpoint_interval_s,
        ),
        train=str(Path(train).absolute()) if train.endswith(".toml") else train,
        overrides=train_set,
        script=script,
        nodes=nodes,
        sbatch=str(sbatch.absolute()) if sbatch else "",
        fire_alerts=fire_alerts,
        nvml_library=settings.section(NvmlSettings).library,
        services=settings.repair.services,
        ports_expected=settings.section(InfinibandSettings).expect,
        ports_left_out=settings.section(InfinibandSettings).leave_out,
        ignored_xids=settings.section(KmsgSettings).ignored_xids,
        gpus_renewed_at=gpus_renewed_at(settings.agent.state_dir / FOLDER),
    )
    request = Request(context, only, skip, settings.agent.state_dir, targets, hours)
    to_stdout = any(str(path) == "-" for path in targets.values())
    console = Console(stderr=to_stdout, quiet=quiet)
    try:
        report = run_preflight(request, CHECKS, console)
    except (SelectionError, FleetError) as error:
        raise BadConfig(str(error)) from error
    if acting:
        quarantine(report, settings, targets.get("json"), console, partial(ordering, report, settings))
        if profile == readiness.PROFILE and not report.interrupted:
            _as_spare(report, settings, console)
    if word_file is not None and not acting:
        try:
            order_for_refused_job(report, settings)
        except CaseError as error:
            say(console, f"the repair of {report.node} was not ordered: {error}")
    if word_file is not None and not written(word_file, f"{report.word}\n", "the verdict"):
        return exitcodes.BROKEN
    return exit_code(report)


def _as_spare(report: Report, settings: Settings, console: Console) -> None:
    """Mark this node as a spare that is ready, or with what it lacks, and say so; that changes no verdict."""
    known = pool.read(settings.agent.state_dir) or pool.SpareState()
    try:
        found = readiness.assess(settings, known, "", time.time(), [report])
        readiness.publish(settings, found, lambda: choose().slurm)
    except (HistoryError, ReportError) as error:
        say(console, f"whether it is a ready spare is not known: {error}")
        return
    except OSError as error:
        say(console, f"the agent was not told whether it is a ready spare: {error.strerror or error}")
        return
    except SlurmError as error:
        say(console, f"Slurm was not told whether it is a ready spare: {error}")
    lacks = found.why_not_ready(found.checked_at)
    said = f"not a ready spare; {lacks}" if lacks else f"a ready spare until {clock(found.expires_at)}"
    console.print(f"{report.node} is {said}", highlight=False, markup=False, soft_wrap=True)


@preflight.command(name="list")
@option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_checks(as_json: bool) -> None:
    """List the checks, their profiles and what they need."""
    if as_json:
        listed = [
            {"name": check.name, "title": check.title, "needs": sorted(check.needs), "profiles": list(check.seconds)}
            for check in CHECKS
        ]
        click.echo(json.dumps(listed, indent=1))
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("check", "what", "needs", "profiles"):
        table.add_column(heading)
    for check in CHECKS:
        table.add_row(check.name, check.title, ", ".join(sorted(check.needs)), ", ".join(check.seconds))
    output_console().print(table)


@preflight.command()
@click.argument("node", required=False)
@option("--runs", type=click.IntRange(1), default=20, help="Look at this many runs.")
@option("--check", "check_name", help="Only the measures of this check.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def history(settings: Settings, node: str | None, runs: int, check_name: str | None, as_json: bool) -> int:
    """Show the last preflights of NODE (by default this one) and the trend of everything measured."""
    book = History(settings.agent.state_dir / HISTORY)
    node = node or settings.agent.node
    try:
        past, known = book.runs(node, runs), book.nodes()
        trends = [trend for trend in book.trends(node, runs) if check_name in (None, trend.check)]
    except HistoryError as error:
        click.echo(f"opsd: {error}", err=True)
        return exitcodes.FAILED
    if not past:
        hint = f"there are runs of {', '.join(known[:8])}" if known else "no preflight has been run here yet"
        click.echo(f"opsd: {book.path} has no run of {node}; {hint}", err=True)
        return exitcodes.FAILED
    if as_json:
        found = {"node": node, "runs": [*map(asdict, past)], "trends": [*map(asdict, trends)]}
        click.echo(json.dumps(found, indent=1))
        return exitcodes.OK
    console = output_console()
    for run in past:
        when = datetime.fromtimestamp(run.started).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        console.print(f"{when}  {run.profile:9} {'[green]passed[/]' if run.passed else '[bold red]FAILED[/]'}")
    console.print(render(trends))
    return exitcodes.OK


@preflight.command()
@click.argument("reports", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@option("--fleet", "fleet_file", type=_FILE, help="Write the medians to FILE, for preflight.fleet.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def merge(reports: tuple[Path, ...], fleet_file: Path | None, as_json: bool) -> int:
    """Compare the JSON reports of many nodes: who failed, and whose versions differ from the majority.

    Exits with 1 if a node failed, versions differ, or FILE cannot be written.
    """
    loaded = [*_read_all(reports)]
    nodes, differing = newest_by_node(loaded), deviations(facts_of(loaded))
    passed = sorted(node for node, report in nodes.items() if report.passed)
    failed = sorted((r for r in nodes.values() if not r.passed), key=lambda report: report.node)
    if as_json:
        click.echo(json.dumps(_merged(passed, failed, differing), indent=1))
    else:
        _show_merged(passed, failed, differing)
    if fleet_file is not None and not written(fleet_file, fleet_of(loaded).to_json(), "the medians"):
        return exitcodes.FAILED
    return exitcodes.FAILED if differing or failed else exitcodes.OK


def _merged(passed: Sequence[str], failed: Sequence[Report], differing: Sequence[Deviation]) -> dict[str, object]:
    found = {
        report.node: {result.check: result.sentences for result in report.results if result.failed} for report in failed
    }
    return {"passed": passed, "failed": found, "deviations": [*map(asdict, differing)]}


def _show_merged(passed: Sequence[str], failed: Sequence[Report], differing: Sequence[Deviation]) -> None:
    console = Console()
    if passed:
        count = f"{len(passed)} node{'s' if len(passed) > 1 else ''} passed"
        console.print(f"[green]{count}: {escape(compress(passed))}[/]", highlight=False, soft_wrap=True)
    for report in failed:
        console.print(f"[bold red]{escape(report.summary)}[/]", highlight=False, soft_wrap=True)
        for result in report.results:
            for sentence in result.sentences if result.failed else ():
                console.print(f"  {escape(sentence)}", highlight=False, soft_wrap=True)
    for deviation in differing:
        console.print(f"[yellow]{escape(str(deviation))}[/]", highlight=False, soft_wrap=True)


def _read_all(paths: Iterable[Path]) -> Iterable[Report]:
    for path in paths:
        try:
            yield Report.from_json(path.read_bytes())
        except (ReportError, OSError) as error:
            raise BadConfig(f"{path}: {error}") from error


preflight.add_command(network)
preflight.add_command(node_drill, "drill")
