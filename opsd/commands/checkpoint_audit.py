"""``opsd checkpoint audit``: does a checkpoint, of any trainer, hold shards that are copies of each other?

A separate process, ``opsd.trainer.duplicate_shards``, reads the tensors, because this command must not load torch.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from opsd import exitcodes, pip_install
from opsd.commands.output import output_console

NAMED = 5
"""Shards that a row of the table names."""


def audit(path: Path, *, as_json: bool) -> int:
    """Examine the checkpoint at ``path``, print what is found and return the exit code."""
    if importlib.util.find_spec("torch") is None:
        raise click.UsageError(f"reading tensors needs torch: {pip_install('train')}")
    findings, examined = [], 0
    for line in _examine(path):
        if "error" in line:
            raise click.UsageError(line["error"])
        if "tensor" in line:
            findings.append(line)
        examined = line.get("tensors", examined)
    if as_json:
        click.echo(json.dumps({"tensors": examined, "copies": findings}, indent=1))
    elif findings:
        _print(findings, examined)
    else:
        click.echo(f"{examined} tensors: no shards are copies of each other")
    return exitcodes.FAILED if findings else exitcodes.OK


def _examine(path: Path) -> Iterator[dict[str, Any]]:
    command = [sys.executable, "-P", "-m", "opsd.trainer.duplicate_shards", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        raise click.ClickException(f"{path} could not be examined; the reason is above")


def _print(findings: list[dict[str, Any]], examined: int) -> None:
    table = Table("tensor", "split along", "shards", "copies of each other", "correlation", box=None)
    for finding in findings:
        copies = finding["copies"]
        more = f" and {len(copies) - NAMED} more" if len(copies) > NAMED else ""
        named = ", ".join(map(str, copies[:NAMED])) + more
        whole = "all" if len(copies) == finding["shards"] else named
        table.add_row(
            finding["tensor"], f"dimension {finding['dimension']}", str(finding["shards"]), whole,
            f"{finding['correlation']:.6g}",
        )  # fmt: skip
    output_console().print(table)
    click.echo(f"{len(findings)} of {examined} tensors hold copies; opsd runbook show tp_seed")
