"""``opsd simulate``: what failures will cost a run."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from opsd import exitcodes
from opsd.commands.options import Finite, option, options
from opsd.commands.output import written
from opsd.simulate import history, rates
from opsd.simulate.faults import DAY_S, FaultsError, FaultSource, spares_needed
from opsd.simulate.job import KEEP, NAMES, Policy, Times, policy
from opsd.simulate.play import Setup
from opsd.simulate.study import (
    Draws,
    Study,
    best_interval_s,
    compare_chart,
    compare_lines,
    knee,
    needed_line,
    study_lines,
    sweep,
    sweep_chart,
    sweep_lines,
)
from opsd.slurm.topology import Topology, TopologyError
from opsd.slurm.topology_source import read

MOST_NODES = 20_000
_MOST_DAYS = 3650
_FILE = click.Path(dir_okay=False, path_type=Path)


@dataclass(frozen=True, slots=True)
class _Range:
    """``--sweep``: numbers of spares."""

    first: int
    last: int

    @classmethod
    def parse(cls, _context: click.Context, _param: click.Parameter, text: str | None) -> _Range | None:
        """Raises click.BadParameter."""
        if text is None:
            return None
        match = re.fullmatch(r"spares=(\d{1,5})\.\.(\d{1,5})", text)
        if match is None or not int(match[1]) <= int(match[2]) <= MOST_NODES:
            raise click.BadParameter(f"{text!r} should be spares=FIRST..LAST, for instance spares=0..16")
        return cls(int(match[1]), int(match[2]))


_faults_options = options(
    option(
        "--trace", "trace_file", type=click.Path(path_type=Path),
        help="Faults from a trace in the form of InfiniteHBD (JSON), Slurm's events, or journals of agents.",
    ),
    option("--trace-nodes", type=click.IntRange(1, MOST_NODES), help="Nodes of the traced cluster, healthy ones too."),
    option(
        "--rates", "rates_name", metavar="NAME|FILE",
        help=f"Faults by rates: {', '.join(rates.PUBLISHED)}, or a TOML file; stepfun by default.",
    ),
    option("--draws", type=click.IntRange(1, 1000), default=10, help="Shifts of the trace, or random faults."),
    option("--seed", type=click.IntRange(0), default=0, help="Of the first draw."),
)  # fmt: skip
_run_options = options(
    option("--nodes", type=click.IntRange(1, MOST_NODES), required=True, help="Nodes that train."),
    option("--spares", type=click.IntRange(0, MOST_NODES), default=8, help="Nodes of the cluster beside them."),
    option("--per-switch", type=click.IntRange(1), help="Nodes below a leaf switch; swaps are told in hops then."),
    option(
        "--topology",
        type=click.Path(exists=True, path_type=Path),
        metavar="FILE",
        help="The cluster's topology.conf in place of made-up switches; its first nodes train.",
    ),
    option("--days", type=Finite(0.01, _MOST_DAYS), default=30.0, help="Length of the run."),
    option("--gpus", type=click.IntRange(1, 64), default=8, help="GPUs of a node."),
    option("--policy", "name", type=click.Choice(NAMES), default="pool", help="What is done about faults."),
    option("--inside", type=click.IntRange(0, MOST_NODES), help="Policy hot: spares in the job; half by default."),
    option("--least", type=click.IntRange(1, MOST_NODES), help="Policy shrink: nodes to go on with; 90 % by default."),
    option(
        "--interval-s",
        type=Finite(1, _MOST_DAYS * DAY_S),
        help="Seconds between checkpoints; Daly's optimum by default.",
    ),
    option("--stall-s", type=Finite(0.001, 3600), default=0.22, help="Seconds that a checkpoint stops the ranks."),
    option("--keep", type=click.IntRange(1, 10_000), default=KEEP, help="Checkpoints that are kept."),
    option("--program-s", type=Finite(0, 86_400), default=0.0, help="Seconds from a start of ranks to the first step."),
)


@click.command()
@_run_options
@_faults_options
@option("--compare", is_flag=True, help="Play all policies on the same faults.")
@option("--sweep", "range_", callback=_Range.parse, metavar="spares=A..B", help="Play each number of spares.")
@option("--advise", is_flag=True, help="Also say how many spares keep all nodes up 99 % of the time.")
@option("--chart", type=_FILE, help="With --sweep or --compare: write a chart as SVG to FILE.")
@option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path, allow_dash=True),
        help="Write the result as JSON to FILE, - for stdout.")  # fmt: skip
def simulate(compare: bool, range_: _Range | None, json_file: Path | None, chart: Path | None, **told: Any) -> int:
    """Play a run of many nodes and days in virtual time, with the code that decides in production.

    The leader, its planner, the health of nodes, the budget and the rules of drains, and the restart policy are those
    of a real run. Slurm, nodes, faults and durations are modelled (docs/simulate.md).
    """
    if compare and range_ is not None:
        raise click.UsageError("--compare and --sweep exclude each other; give one of them")
    if chart is not None and range_ is None and not compare:
        raise click.UsageError("--chart needs --sweep or --compare")
    began = time.monotonic()
    source = _source(told)
    spares = range(range_.first, range_.last + 1) if range_ is not None else [told["spares"]]
    setup = _setup(told, source, spares[-1])
    size = setup.nodes + spares[-1]
    draws = Draws(source, size, setup.seconds, range(told["seed"], told["seed"] + told["draws"]))
    if range_ is not None:
        studies = sweep(draws, [_policy(told["name"], told, count) for count in spares], setup, spares)
        result: dict[str, Any] = {"sweep": [study.as_dict() for study in studies], "knee": knee(studies)}
        lines = sweep_lines(studies, source.name)
    else:
        names = NAMES if compare else [told["name"]]
        studies = [draws.play(_policy(name, told, setup.spares), setup) for name in names]
        lines = compare_lines(studies, source.name) if compare else study_lines(studies[0], source.name)
        result = {"policies": _compared(studies)} if compare else studies[0].as_dict()
    if told["advise"]:
        needed = spares_needed(source, setup.nodes, seconds=setup.seconds, draws=told["draws"])
        result["spares_needed"] = {"mean": needed.mean, "p95": needed.p95}
        lines.append(needed_line(needed, setup.nodes))
    return _write({**result, "elapsed_s": time.monotonic() - began}, lines, json_file, chart, studies)


def _compared(studies: list[Study]) -> list[dict[str, Any]]:
    """With what each policy gains over the first."""
    gains = [study.gain_over(studies[0]) for study in studies]
    names = ("gain", "gain_low", "gain_high")
    return [study.as_dict() | dict(zip(names, gain, strict=True)) for study, gain in zip(studies, gains, strict=True)]


def _write(
    result: dict[str, Any], lines: list[str], json_file: Path | None, chart: Path | None, studies: list[Study]
) -> int:
    text = json.dumps(result, indent=1)
    click.echo(text if json_file == Path("-") else "\n".join(lines))
    fine = json_file in (None, Path("-")) or written(json_file, text + "\n", "the result")
    if chart is not None:
        drawn = compare_chart(studies) if "policies" in result else sweep_chart(studies)
        fine = written(chart, drawn, "the chart") and fine
    return exitcodes.OK if fine else exitcodes.FAILED


def _source(told: dict[str, Any]) -> FaultSource:
    try:
        if told["trace_file"] is not None:
            if told["rates_name"] is not None:
                raise click.UsageError("--trace and --rates exclude each other; give one of them")
            return history.load(told["trace_file"], told["trace_nodes"])
        if told["trace_nodes"] is not None:
            raise click.UsageError("--trace-nodes needs --trace")
        name = told["rates_name"] or "stepfun"
        return rates.published(name) if name in rates.PUBLISHED else rates.load(Path(name))
    except FaultsError as error:
        raise click.UsageError(str(error)) from error


def _setup(told: dict[str, Any], source: FaultSource, most_spares: int) -> Setup:
    nodes = told["nodes"]
    if told["least"] is not None and told["least"] > nodes:
        raise click.UsageError(f"--least {told['least']} is more than --nodes {nodes}")
    if told["inside"] is not None and told["inside"] > told["spares"]:
        raise click.UsageError(f"--inside {told['inside']} is more than --spares {told['spares']}")
    interval_s = told["interval_s"] or best_interval_s(source, nodes, told["stall_s"])
    times = Times(program_s=told["program_s"])
    return Setup(nodes, told["spares"], told["days"] * DAY_S, interval_s, told["stall_s"], told["gpus"], times,
                 per_switch=told["per_switch"] or 0, topology=_topology(told, nodes + most_spares),
                 keep=told["keep"])  # fmt: skip


def _topology(told: dict[str, Any], size: int) -> Topology:
    if told["topology"] is None:
        return Topology()
    if told["per_switch"]:
        raise click.UsageError("--topology and --per-switch exclude each other; give one of them")
    try:
        topology = read(told["topology"])
    except TopologyError as error:
        raise click.UsageError(str(error)) from error
    if len(topology.leaf) < size:
        raise click.UsageError(
            f"{told['topology']} has {len(topology.leaf)} nodes, and --nodes and spares ask for {size}; give fewer"
        )
    return topology


def _policy(name: str, told: dict[str, Any], spares: int) -> Policy:
    inside = min(told["inside"], spares) if told["inside"] is not None else (spares + 1) // 2
    return policy(name, told["nodes"], inside=inside, least=told["least"] or max(1, told["nodes"] * 9 // 10))
