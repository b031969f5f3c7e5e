"""``opsd plan``: what a run takes, before it starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from opsd import exitcodes
from opsd.commands.options import Finite, option
from opsd.commands.output import fail, written
from opsd.commands.report import price_of
from opsd.files import write_text
from opsd.plan.hardware import GPUS

if TYPE_CHECKING:
    from opsd.plan.hardware import Hardware
    from opsd.plan.plan import Plan
    from opsd.plan.reliability import Habits

_DAYS = 30.0
"""Deadline if neither GPUs nor days are given."""


@click.command()
@click.argument("config")
@option("--gpus", type=click.IntRange(1), help="Plan for so many GPUs.")
@option("--days", type=Finite(0, min_open=True), help="Find the fewest nodes that are done in so many days (30).")
@option("--gpu", "kind", type=click.Choice(GPUS), default="h100", help="Kind of the GPUs.")
@option("--tokens", type=Finite(1), help="Train on so many tokens instead of run.steps; 11e12 is 11 trillion.")
@option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override one setting of the run.")
@option("--assume", multiple=True, metavar="NAME=VALUE", help="A figure of this cluster instead of the default.")
@option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write a page with charts.")
@option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write JSON; - for stdout.")
@option("--write", is_flag=True, help="Put the fastest layout into CONFIG, a TOML file.")
@option("--config", "file", type=click.Path(path_type=Path), metavar="FILE", help="Take cost.gpu_hour from FILE.")
def plan(
    config: str,
    gpus: int | None,
    days: float | None,
    kind: str,
    tokens: float | None,
    overrides: tuple[str, ...],
    assume: tuple[str, ...],
    html: Path | None,
    json_file: Path | None,
    write: bool,
    file: Path | None,
) -> int:
    """Say what the run CONFIG takes: layout, memory, days, GPUs, checkpoints, spares, cost.

    CONFIG is the TOML file of a run, the name of a preset (smollm3-3b), or a config.json of Hugging Face with --tokens.
    All numbers are predictions; --json names the source of each figure behind them, and --assume replaces one. Exits
    with 1 if there is no such plan, 2 if CONFIG or the command line is wrong.
    """
    from opsd.plan.search import CannotPlan
    from opsd.trainer.config import ConfigError

    if gpus is not None and days is not None:
        raise click.UsageError("--gpus and --days exclude each other: give one of them")
    if write and not config.endswith(".toml"):
        raise click.UsageError(f"--write changes the TOML file of a run, and {config} is none: copy the run into one")
    try:
        made = _plan(config, gpus, days, kind, tokens, overrides, assume)
        made = _priced(made, file)
        if write:
            _write(config, made)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    except CannotPlan as error:
        fail(str(error))
    return _show(made, Path(config).stem, html, json_file)


def _plan(
    source: str,
    gpus: int | None,
    days: float | None,
    kind: str,
    tokens: float | None,
    overrides: Sequence[str],
    assume: Sequence[str],
) -> Plan:
    """Raises CannotPlan, ConfigError and click.UsageError."""
    from opsd.plan.plan import plan_for_days, plan_for_gpus
    from opsd.plan.source import read, tokens_of

    run = read(source, overrides, tokens, gpus)
    hardware, habits = _figures(kind, run.model.dtype, assume)
    wanted = tokens or float(tokens_of(run))
    if gpus is not None:
        return plan_for_gpus(run, kind, gpus, wanted, hardware, habits)
    return plan_for_days(run, kind, days or _DAYS, wanted, hardware, habits)


def _figures(kind: str, dtype: str, assume: Sequence[str]) -> tuple[Hardware, Habits]:
    """The defaults of this kind of GPU, with what the user knows better."""
    from opsd.plan.hardware import hardware_of
    from opsd.plan.reliability import HABITS

    hardware, habits = hardware_of(kind, dtype), HABITS
    for text in assume:
        name, equals, number = text.partition("=")
        try:
            value = float(number)
        except ValueError:
            equals = ""
            value = 0.0
        known = hardware.figures() | habits.figures()
        if not equals or name not in known or not 0 <= value < float("inf"):
            raise click.UsageError(f"--assume {text}: expected NAME=VALUE, a number and one of {', '.join(known)}")
        if name in hardware.figures():
            hardware = hardware.given({name: value}, "given with --assume", measured=True)
        else:
            habits = habits.given({name: value}, "given with --assume", measured=True)
    return hardware, habits


def _priced(made: Plan, file: Path | None) -> Plan:
    price = price_of(file)
    return replace(made, price=price.gpu_hour, currency=price.currency)


def _write(source: str, made: Plan) -> None:
    """Raises CannotPlan if the file cannot be changed."""
    from opsd.plan.search import CannotPlan
    from opsd.plan.write import with_settings

    path = Path(source)
    try:
        changed = with_settings(path.read_text(encoding="utf-8"), made.best.layout.settings())
        write_text(path, changed)
    except OSError as error:
        raise CannotPlan(f"{path} cannot be written: {error.strerror}") from error
    except ValueError as error:
        raise CannotPlan(f"{path} was not changed: {error}") from error


def _show(made: Plan, name: str, html: Path | None, json_file: Path | None) -> int:
    from opsd.plan.plan import as_dict
    from opsd.plan.text import plan_text
    from opsd.report.plan_page import plan_page

    if html is not None and not written(html, plan_page(made, name), "the page"):
        return exitcodes.FAILED
    if json_file is not None and not written(json_file, json.dumps(as_dict(made), indent=1) + "\n", "the plan"):
        return exitcodes.FAILED
    if json_file is None or str(json_file) != "-":
        click.echo("\n".join(plan_text(made)))
    return exitcodes.OK
