"""``opsd diagnose``: why a run on this node hangs or trains slowly, with the numbers."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import click

from opsd import exitcodes
from opsd.agent.diagnosis import AS_BEFORE, Diagnosis, to_rank
from opsd.agent.diagnosis import diagnose as diagnoses_of
from opsd.collectors.base import RankFact
from opsd.collectors.lib.gpu_owners import GpuOwners
from opsd.collectors.lib.nccl.desync import DumpError, evidence, judge, read_dumps
from opsd.collectors.ranks import RanksCollector, RanksSettings
from opsd.commands.agent_client import Agent, NoAgent, Refused, with_agent
from opsd.commands.options import option
from opsd.commands.output import fail, output_console, printable
from opsd.commands.settings import load
from opsd.runbooks.lib.losses import NOTHING
from opsd.stragglers.judge import LEAST_STEPS
from opsd.stragglers.judge import judge as judge_steps
from opsd.stragglers.table import ENOUGH, TableError, read_table
from opsd.words import ranges, reason

_EVEN: dict[str, Any] = {
    "culprits": [],
    "cause": "nothing stands out",
    "slowdown": 1.0,
    "confidence": 0.0,
    "evidence": [],
}
_MARKS = {True: "[red]yes[/red]", False: "[green]no[/green]", None: "[dim]unknown[/dim]"}


@click.command()
@option("--job", default="", help="Only the job with this id, or the run with this name.")
@option(
    "--flight-recorder",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Judge a folder of dumps of PyTorch's flight recorder, of any program: who keeps the others waiting?",
)
@option(
    "--steps",
    "table",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Judge a table of step times, of any job: which rank, stage or input makes it slow, and by how much?",
)
@option(
    "--json", "output", type=click.File("w"), is_flag=False, flag_value="-", help="Print JSON, or write it to FILE."
)
@with_agent
def diagnose(job: str, folder: Path | None, table: Path | None, agent: Agent, output: IO[str] | None) -> int:
    """Diagnose the runs on this node now: do they hang, or do data, network or kernels slow them down?

    Asks the agent, or reads the rank pages of this machine if no agent runs. Ends with 1 if there is no such run.

    With --flight-recorder it asks nobody but judges the dumps in DIR, pickles or JSON, one file a rank with the rank as
    the last number of its name. Ends with 1 if none of them can be used.

    With --steps it judges a table in CSV, JSON or Parquet (which needs pyarrow). Required columns: rank and step. Times
    in seconds are columns (forward, backward, compute, data, transfer, gpu or step_s), or rows with phase and seconds.
    Optional columns: node, gpu_index, microbatches and the coordinates dp, pp, tp and cp. Ends with 1 if it cannot be
    judged.
    """
    if folder is not None:
        return _judge_dumps(folder, output)
    if table is not None:
        return _judge_steps(table, output)
    incidents: Sequence[dict[str, Any]] = ()
    try:
        answer = agent.get("/api/v1/ranks", job=job)
        ranks, now = [to_rank(rank) for rank in answer["ranks"]], answer["at"]
        incidents = agent.get("/api/v1/incidents", state="current")["incidents"]
        node = str(agent.get("/api/v1/status")["node"])
    except Refused as error:
        fail(str(error))
    except NoAgent as error:
        if agent.named:
            fail(str(error))
        settings = load(agent.file)
        ranks, now, node = _local(settings.section(RanksSettings).root, job), time.monotonic(), settings.agent.node
    diagnoses = diagnoses_of(ranks, node, now)
    if not diagnoses:
        fail(f"no run{f' or job {job}' if job else ''} trains on {node}; `opsd status` shows what does")
    if output is not None:
        print(json.dumps([asdict(diagnosis) for diagnosis in diagnoses], indent=1), file=output)
    else:
        console = output_console()
        for diagnosis in diagnoses:
            console.print(*_lines(diagnosis, incidents), sep="\n", soft_wrap=True)
    return exitcodes.OK


def _judge_dumps(folder: Path, output: IO[str] | None) -> int:
    try:
        dumps, unusable = read_dumps(folder)
    except (OSError, DumpError) as error:
        fail(f"{folder} cannot be judged: {reason(error)}")
    if not dumps:
        why = next((f"; {name} is {reason}" for name, reason in unusable.items()), "")
        fail(f"{folder} has no dump of PyTorch's flight recorder with a rank in its name{why}")
    verdict = judge(dumps)
    facts = [*evidence(verdict), *(f"{name} could not be used: {why}" for name, why in unusable.items())]
    culprits = list(verdict.culprits) if verdict else []
    if output is not None:
        cause, sure = (verdict.cause, verdict.confidence) if verdict else ("nothing waits", 0.0)
        found = {"culprits": culprits, "cause": cause, "confidence": sure, "evidence": facts}
        print(json.dumps(found | ({"operation": asdict(verdict)} if verdict else {}), indent=1), file=output)
        return exitcodes.OK
    console = output_console()
    console.print(*(printable(fact) for fact in facts), sep="\n", soft_wrap=True)
    if verdict is not None:
        named = f"look at rank{'s' * (len(culprits) != 1)} {ranges(culprits)}" if culprits else "no rank stands out"
        console.print(f"[bold]{named}[/bold]: {verdict.cause}; confidence {verdict.confidence:.0%}", soft_wrap=True)
    return exitcodes.OK


def _judge_steps(table: Path, output: IO[str] | None) -> int:
    try:
        trace = read_table(table)
    except (OSError, UnicodeDecodeError, csv.Error, TableError) as error:
        fail(f"{table} cannot be judged: {reason(error)}")
    if len(trace.steps) < LEAST_STEPS:
        fail(f"{table} has {len(trace.steps)} steps that all ranks have done; at least {LEAST_STEPS} are needed")
    verdicts = judge_steps(trace)
    if output is not None:
        found = [asdict(verdict) for verdict in verdicts] or [_EVEN]
        print(json.dumps(found[0] | {"others": found[1:], "left_out": list(trace.left_out)}, indent=1), file=output)
        return exitcodes.OK
    console = output_console()
    console.print(f"{len(trace.places)} ranks, {len(trace.steps)} steps", soft_wrap=True)
    if trace.left_out:
        console.print(
            f"left out: rank{'s' * (len(trace.left_out) != 1)} {ranges(trace.left_out)} with less than {ENOUGH:.0%} of "
            "the steps",
            soft_wrap=True,
        )
    for verdict in verdicts:
        console.print(
            f"[bold]{verdict.cause}[/bold]: steps take {verdict.slowdown:.2f} times as long as without; "
            f"confidence {verdict.confidence:.0%}",
            *(f"  {printable(fact)}" for fact in verdict.evidence),
            f"  advice: {verdict.advice}",
            sep="\n",
            soft_wrap=True,
        )
    if not verdicts:
        console.print("[bold]no rank and no stage stands out[/bold]")
    return exitcodes.OK


class _AsSaid(GpuOwners):
    """Takes the job that a page names for its job: here somebody asks for it, and nothing is done on this word."""

    def confirms(self, job: str, user: int) -> bool:
        return True


def _local(root: Path, job: str) -> list[RankFact]:
    """The ranks whose pages lie under ``root``."""
    try:
        facts = RanksCollector(root, gpu_owners=_AsSaid()).collect().facts
    except OSError as error:
        fail(f"{root} cannot be read: {error.strerror}")
    return [fact for fact in facts if isinstance(fact, RankFact) and job in ("", fact.job, fact.run)]


def _lines(diagnosis: Diagnosis, incidents: Sequence[dict[str, Any]]) -> Iterator[str]:
    name = f"{diagnosis.run}, job {diagnosis.job}" if diagnosis.job else diagnosis.run
    yield f"[bold]{printable(name)}[/bold]"
    for finding in diagnosis.findings:
        yield f"  {finding.question} {_MARKS[finding.suspect]}"
        yield from (f"    {printable(fact)}" for fact in finding.facts)
    of_run = [i for i in incidents if i["run"] == diagnosis.run or (diagnosis.job and i["job"] == diagnosis.job)]
    for incident in of_run:
        costs = incident.get("brief", {}).get("cost", "")
        said = f"{incident['summary']}{f': {costs}' if costs else ''}  ({incident['id']})"
        yield f"  incident: {printable(said)}"
    conclusion = diagnosis.conclusion
    if any(incident["cost"]["throughput_ratio"] >= NOTHING for incident in of_run):
        conclusion = conclusion.replace(AS_BEFORE, f"{AS_BEFORE} in its last steps, which the incident slows as well")
    yield f"  [bold]{printable(conclusion)}[/bold]"
