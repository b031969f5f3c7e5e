"""``opsd preflight simulate``: how many tests the search for a bad node needs, and how often it is right."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from random import Random

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from opsd import exitcodes
from opsd.commands.options import option
from opsd.commands.output import output_console, written
from opsd.preflight.simulated_cluster import PLANTS, Score, cluster, score, trial


@click.command()
@option("--nodes", type=click.IntRange(4, 100_000), multiple=True, default=(232, 1024))
@option("--per-switch", type=click.IntRange(1), default=16, help="Nodes below a leaf switch.")
@option(
    "--plant",
    "plants",
    type=click.Choice(list(PLANTS)),
    metavar="FAULT",
    multiple=True,
    help=f"Only this fault: {', '.join(PLANTS)}.",
)
@option("--trials", type=click.IntRange(1), default=100, help="Trials of each kind.")
@option("--seed", type=int, metavar="N", default=0, help="Another seed plants other faults.")
@option("--show", is_flag=True, help="Print every trial: what was planted, what was found, tests used.")
@option("--json", "target", type=click.Path(dir_okay=False, path_type=Path), help="Write the scores to FILE.")
def simulate(
    nodes: tuple[int, ...],
    per_switch: int,
    plants: tuple[str, ...],
    trials: int,
    seed: int,
    show: bool,
    target: Path | None,
) -> int:
    """Search simulated clusters with planted faults for what is bad.

    Exits with 1 if fewer than 99 % of the trials of a kind named exactly the planted fault (except the last kind).
    Exits with 1 too if FILE cannot be written.
    """
    console = output_console()
    if show:
        for count in nodes:
            for plant in plants or PLANTS:
                _show(console, plant, count, per_switch, trials, seed)
        return exitcodes.OK
    scores = [score(plant, count, per_switch, trials, seed) for count in nodes for plant in plants or PLANTS]
    console.print(_table(scores))
    text = json.dumps([asdict(entry) for entry in scores], indent=1) + "\n"
    if target is not None and not written(target, text, "the scores"):
        return exitcodes.FAILED
    promised = [entry for entry in scores if entry.plant != "flaky in 30 % of the tests"]
    return exitcodes.OK if all(entry.right >= 0.99 * entry.trials for entry in promised) else exitcodes.FAILED


def _table(scores: list[Score]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("nodes", "planted", "named", "tests, median", "tests, most", "rounds, most"):
        table.add_column(heading, justify="left" if heading == "planted" else "right")
    for entry in scores:
        share = f"{entry.right / entry.trials:.1%}"
        counts = (entry.median_tests, entry.most_tests, entry.most_rounds)
        table.add_row(str(entry.nodes), entry.plant, share, *map(str, counts))
    return table


def _show(console: Console, plant: str, count: int, per_switch: int, trials: int, seed: int) -> None:
    random, switch_of = Random(f"{plant} {count} {seed}"), cluster(count, per_switch)
    for _ in range(trials):
        faults, diagnosis = trial(plant, switch_of, random)
        planted = ", ".join(str(fault.culprit) for fault in faults) or "nothing"
        found = ", ".join(map(str, diagnosis.culprits)) or "nothing"
        console.print(
            f"{count} nodes, {escape(plant)}: planted {planted}; found {found}; "
            f"{diagnosis.tests} tests in {diagnosis.rounds} rounds",
            highlight=False,
            soft_wrap=True,
        )
