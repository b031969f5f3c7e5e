"""``opsd bench``: run one benchmark, print a table for people, write flat JSON for machines."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

BENCHES = {
    "agent": "CPU, memory, series and scrape time of the agent beside nvitop-exporter",
    "client": "cost of a rank-page update",
    "restart": "SIGKILL of a rank to the first new step, beside torchrun",
}


def _print_names(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        click.echo("\n".join(BENCHES))
        ctx.exit()


@click.command(epilog="Benchmarks: " + "; ".join(f"{name} ({text})" for name, text in BENCHES.items()))
@click.argument("name", type=click.Choice(list(BENCHES)))
@click.option("--json", "target", type=click.Path(dir_okay=False, path_type=Path), help="Write the results to FILE.")
@click.option(
    "--names", is_flag=True, is_eager=True, expose_value=False, callback=_print_names, help="Print the names."
)
def bench(name: str, target: Path | None) -> None:
    """Run the benchmark NAME.

    Each module opsd.bench.NAME has ``run() -> dict``: flat, ``ours_*``, ``PEER_*``, ``ratio_*``; a peer that is
    not installed is missing from the result.
    """
    results: dict[str, float | int | str] = import_module(f"opsd.bench.{name}").run()
    table = Table(title=f"opsd bench {name}", title_justify="left")
    table.add_column("measure")
    table.add_column("value", justify="right")
    for key, value in results.items():
        table.add_row(key, f"{value:.4g}" if isinstance(value, float) else str(value))
    Console().print(table)
    if target is not None:
        target.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
