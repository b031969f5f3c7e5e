"""``opsd diagnose``: why a run on this node hangs or trains slowly, with the numbers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from opsd import exitcodes
from opsd.agent.diagnosis import Diagnosis, to_rank
from opsd.agent.diagnosis import diagnose as diagnoses_of
from opsd.collectors.base import NoData, RankFact
from opsd.collectors.ranks import RanksCollector, RanksSettings
from opsd.commands.agent_client import Agent, NoAgent, Refused, agent_options
from opsd.commands.options import option
from opsd.commands.output import fail, printable
from opsd.commands.settings import load

_MARKS = {True: "[red]yes[/red]", False: "[green]no[/green]", None: "[dim]unknown[/dim]"}


@click.command()
@option("--job", default="", help="Only the job with this id, or the run with this name.")
@agent_options
def diagnose(job: str, agent: Agent, as_json: bool) -> int:
    """Diagnose the runs on this node now: do they hang, or do data, network or kernels slow them down?

    Asks the agent, or reads the rank pages of this machine if no agent runs. Ends with 1 if there is no such run.
    """
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
    if as_json:
        click.echo(json.dumps([asdict(diagnosis) for diagnosis in diagnoses], indent=1))
    else:
        console = Console(highlight=False)
        for diagnosis in diagnoses:
            console.print(*_lines(diagnosis, incidents), sep="\n", soft_wrap=True)
    return exitcodes.OK


def _local(root: Path, job: str) -> list[RankFact]:
    """The ranks whose pages lie under ``root``."""
    try:
        reading = RanksCollector(root).collect()
    except OSError as error:
        fail(f"{root} cannot be read: {error.strerror}")
    facts = () if isinstance(reading, NoData) else reading.facts
    return [fact for fact in facts if isinstance(fact, RankFact) and job in ("", fact.job, fact.run)]


def _lines(diagnosis: Diagnosis, incidents: Sequence[dict[str, Any]]) -> Iterator[str]:
    name = f"{diagnosis.run}, job {diagnosis.job}" if diagnosis.job else diagnosis.run
    yield f"[bold]{printable(name)}[/bold]"
    for finding in diagnosis.findings:
        yield f"  {finding.question} {_MARKS[finding.suspect]}"
        yield from (f"    {printable(fact)}" for fact in finding.facts)
    for incident in incidents:
        if diagnosis.job and incident["job"] == diagnosis.job:
            yield f"  incident: {printable(incident['summary'])}  ({printable(incident['id'])})"
    yield f"  [bold]{printable(diagnosis.conclusion)}[/bold]"
