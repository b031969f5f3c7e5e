"""``opsd bench``: run one benchmark, print a table for people, write flat JSON for machines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

import click
from rich.table import Table

from opsd import exitcodes
from opsd.bench import BenchError
from opsd.commands.options import Finite, option
from opsd.commands.output import output_console
from opsd.dependents import nothing_left
from opsd.scenarios.model import ScenarioError
from opsd.simulated.gpus import NoCompilerError, SimulationError

BENCHES = {
    "agent": "CPU, memory, series and scrape time of the agent beside nvitop-exporter",
    "checkpoint": "what a checkpoint costs the training, beside torch.save and DCP",
    "client": "cost of a rank-page update",
    "data": "finding a sample at any point of a run, beside Grain, Megatron's index and a growing one",
    "detect": "precision, recall, culprits, latency: material from outside, random timelines, own scenarios",
    "observe": "what the hooks cost a program that reports nothing itself: tiny steps, and nanoGPT's",
    "protocol": "the protocol of up to 10,000 launchers in virtual time, and what it costs the leader",
    "recovery": "fifty kills and SIGTERM: steps lost, and every loss compared with an undisturbed run",
    "restart": "SIGKILL of a rank to the first new step, beside torchrun",
    "simulate": "opsd simulate beside a real Slurm cluster in namespaces, on the same random faults",
    "scrape": "fifty concurrent scrapers of one agent, beside nvitop-exporter",
    "soak": "the agent under attack for an hour: memory, scrapes, and whether anything is lost",
    "stragglers": "what comparing the step times of 4,096 ranks costs the leader",
    "swap": "how long a run stops when it loses a node, on a real Slurm cluster in namespaces",
    "wording": "what other monitors match in the kernel log, and opsd does not",
    "trainer": "tokens/s of the trainer beside torchtitan and transformers' Llama under FSDP2; start of eight ranks",
}
LONG = ("simulate", "soak", "swap", "wording")
"""Left out of ``--names``, and so of ``make bench``: they take long, or fetch."""
OPTIONS = {
    "nodes": ("protocol",), "trials": ("simulate", "swap"),
    "seed": ("detect", "simulate"), "scenario": ("swap",), "hours": ("soak",),
    "outside": ("detect", "wording"),
}  # fmt: skip
"""Options that only some benchmarks have."""


def _print_names(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        click.echo("\n".join(name for name in BENCHES if name not in LONG))
        ctx.exit()


def _rows(results: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every value with its name; nested tables become one row per value."""
    for key, value in results.items():
        if isinstance(value, Mapping):
            yield from ((f"{key} {name}", inner) for name, inner in _rows(value))
        else:
            yield key, value


def _listed(names: Sequence[str]) -> str:
    """``a``, ``a and b``, or ``a, b and c``."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


@click.command(epilog="Benchmarks: " + "; ".join(f"{name} ({text})" for name, text in BENCHES.items()))
@click.argument("name", type=click.Choice(list(BENCHES)), metavar="NAME")
@option(
    "--json",
    "target",
    type=click.File("w", encoding="utf-8", lazy=False),
    help="Write the results to FILE, - for stdout.",
)
@option(
    "--nodes",
    type=click.IntRange(16, 10_000),
    help="Of protocol: how many launchers are simulated; 1,024 unless given.",
)
@option("--trials", type=click.IntRange(1), help="Of simulate (20) and swap (10): how often each is tried.")
@option("--seed", type=click.IntRange(0), help="Of simulate (1) and detect (1000000): the first seed.")
@option(
    "--outside",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Of detect and wording: judge only what was cloned into FOLDER; docs/research/detection.md says what.",
)
@option("--scenario", multiple=True, help="Of swap: only this one; may be given several times.")
@option("--hours", type=Finite(min=0.02), help="Of soak: how long it lasts; 1 unless given.")
@option(
    "--names",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_names,
    help="Print the names of those that take minutes.",
)
def bench(name: str, target: TextIO | None, **given: Any) -> None:
    """Run the benchmark NAME and print what it measured.

    The results are named ours_*, PEER_* and ratio_*; a peer that is not installed is missing from them. Ends with 1 if
    what was measured is wrong, as the verdict of soak says.
    """
    options = {key: value for key, value in given.items() if value not in (None, ())}
    for other in options:
        if name not in OPTIONS[other]:
            raise click.UsageError(f"--{other} goes with the benchmark {_listed(OPTIONS[other])} only")
    try:
        with nothing_left("opsd-bench-"):
            results: dict[str, Any] = import_module(f"opsd.bench.{name}").run(**options)
    except (BenchError, ScenarioError) as error:
        raise click.ClickException(str(error)) from error
    except (NoCompilerError, SimulationError) as error:
        raise click.ClickException(f"the benchmark needs simulated GPUs: {error}") from error
    table = Table(title=f"opsd bench {name}", title_justify="left")
    table.add_column("measure")
    table.add_column("value", justify="right")
    for key, value in _rows(results):
        table.add_row(key, f"{value:.4g}" if isinstance(value, float) else str(value))
    output_console().print(table)
    if target is not None:
        target.write(json.dumps(results, indent=1) + "\n")
    if results.get("verdict", "good") != "good":
        raise click.exceptions.Exit(exitcodes.FAILED)
