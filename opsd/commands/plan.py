"""``opsd plan``: what a run takes, before it starts."""

from __future__ import annotations

import json
import math
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from opsd import exitcodes
from opsd.commands.options import Finite, exit_codes, option
from opsd.commands.output import fail, written
from opsd.commands.settings import load
from opsd.config import Settings
from opsd.files import write_text
from opsd.ledger.ledger import PLAN
from opsd.plan.hardware import GPUS, Figure
from opsd.rundir import default_root

if TYPE_CHECKING:
    from opsd.plan.forecast import Habits
    from opsd.plan.hardware import Hardware
    from opsd.plan.plan import Plan

_DAYS = 30.0
"""Deadline if neither GPUs nor days are given."""
_MOST_DAYS = 36_500
_NONE = "none"
"""As ``--measured``: the defaults alone."""


_LEAST, _MOST = 1e-12, 1e24
"""Bounds of figures, beyond which there is nothing to compute."""
_LEAST_SHARE = 1e-3
"""Of the peak, or of a step: less of either is a slip, and its plan one of centuries."""
_MAY_BE_NONE = ("node_latency", "network_latency", "spread", "restart", "maintenance", "slow", "data", "evaluation")
"""Figures without which there is a plan all the same."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of this cluster: files of measurements, given figures, the configuration."""

    places: Sequence[str]
    assume: Sequence[str]
    settings: Settings


@click.command(
    epilog=exit_codes(
        {
            0: "planned",
            1: "there is no such plan",
            2: "CONFIG, a measurement or the command line is wrong",
        }
    )
)
@click.argument("config")
@option("--gpus", type=click.IntRange(1), help="Plan for so many GPUs.")
@option(
    "--days",
    type=Finite(0, _MOST_DAYS, min_open=True),
    help="Find the fewest nodes that are done in so many days (30).",
)
@option("--gpu", "kind", type=click.Choice(GPUS, case_sensitive=False), default="h100", help="Kind of the GPUs.")
@option("--tokens", type=Finite(1, 1e18), help="Train on so many tokens instead of run.steps; 11e12 is 11 trillion.")
@option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override one setting of the run.")
@option(
    "--measured",
    "places",
    multiple=True,
    metavar="PATH",
    help="What this cluster has measured, or none; by default what opsd has written here.",
)
@option("--assume", multiple=True, metavar="NAME=VALUE", help="A figure of this cluster instead of the default.")
@option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write a page with charts.")
@option("--chart", type=click.Path(path_type=Path, dir_okay=False), help="Write tokens/s over GPUs as SVG.")
@option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write JSON; - for stdout.")
@option("--as-is", is_flag=True, help="Plan the layout that CONFIG has, on --gpus alone, as opsd launch does.")
@option("--write", is_flag=True, help="Put the fastest layout into CONFIG, a TOML file.")
@option(
    "--run",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Keep the plan in the folder of a run, for `opsd report` and the pages; --write does so for run.folder.",
)
@option("--config", "file", type=click.Path(path_type=Path), metavar="FILE", help="Take cost.gpu_hour from FILE.")
def plan(
    config: str,
    gpus: int | None,
    days: float | None,
    kind: str,
    tokens: float | None,
    overrides: tuple[str, ...],
    places: tuple[str, ...],
    assume: tuple[str, ...],
    html: Path | None,
    chart: Path | None,
    json_file: Path | None,
    as_is: bool,
    write: bool,
    run: Path | None,
    file: Path | None,
) -> int:
    """Predict layout, memory, time, spares and cost of the run CONFIG.

    CONFIG is the TOML file of a run, the name of a preset (smollm3-3b), or a config.json of Hugging Face with --tokens.
    All numbers are predictions; --json names the source of each figure behind them. Measurements of preflight, make
    bench-gpu, runs, journals and Slurm's events replace defaults (docs/planning.md). --assume replaces any figure.
    """
    from opsd.calibration.read import NotUsable
    from opsd.plan.search import CannotPlan
    from opsd.trainer.config import ConfigError

    if gpus is not None and days is not None:
        raise click.UsageError("--gpus and --days exclude each other: give one of them")
    if as_is and (gpus is None or write):
        raise click.UsageError("--as-is plans one layout: it needs --gpus, and leaves --write nothing to change")
    if write and not config.endswith(".toml"):
        raise click.UsageError(f"--write changes the TOML file of a run, and {config} is none: copy the run into one")
    try:
        made = _plan(config, gpus, days, kind, tokens, overrides, Known(places, assume, load(file)), as_is=as_is)
        if write:
            _write(config, made)
            run = run or _own_folder(config)
        if run is not None:
            _keep(run, made)
    except (ConfigError, NotUsable) as error:
        raise click.UsageError(str(error)) from error
    except CannotPlan as error:
        fail(str(error))
    return _show(made, Path(config).stem, html, chart, json_file)


def _plan(
    source: str,
    gpus: int | None,
    days: float | None,
    kind: str,
    tokens: float | None,
    overrides: Sequence[str],
    known: Known,
    *,
    as_is: bool,
) -> Plan:
    """Raises CannotPlan, ConfigError, NotUsable and click.UsageError."""
    from opsd.plan.plan import plan_as_is, plan_for_days, plan_for_gpus
    from opsd.plan.source import read, tokens_of

    run = read(source, overrides, tokens, gpus, lambda sentence: click.echo(f"opsd: {sentence}", err=True))
    hardware, habits = figures_of(kind, run.model.dtype, known)
    wanted, step = tokens or float(tokens_of(run)), run.data.batch * run.data.sequence
    if wanted < step:
        raise click.UsageError(f"a step has {step:,} tokens, and the run only {wanted:,.0f}: give more --tokens")
    if gpus is not None:
        made = (plan_as_is if as_is else plan_for_gpus)(run, kind, gpus, wanted, hardware, habits)
    else:
        made = plan_for_days(run, kind, days or _DAYS, wanted, hardware, habits)
    return replace(made, price=known.settings.cost.gpu_hour, currency=known.settings.cost.currency)


def figures_of(kind: str, dtype: str, given: Known) -> tuple[Hardware, Habits]:
    """The defaults of this kind of GPU, with what was measured, and with what the user knows better."""
    from opsd.calibration.read import measured, usual_places
    from opsd.plan.forecast import HABITS
    from opsd.plan.hardware import hardware_of

    usual = usual_places(given.settings.agent.state_dir, default_root())
    places = [Path(place) for place in given.places if place != _NONE] if given.places else list(usual)
    found = measured(places, kind, hardware_of(kind, dtype), HABITS, forgiving=not given.places)
    for sentence in found.left_out:
        click.echo(f"opsd: not used: {sentence}", err=True)
    known = found.hardware.figures() | found.habits.figures()
    assumed = dict(_assumed(text, known) for text in given.assume)
    return found.hardware.given(assumed), found.habits.given(assumed)


def _assumed(text: str, known: Mapping[str, Figure]) -> tuple[str, Figure]:
    """``NAME=VALUE``. Raises click.UsageError."""
    name, _, number = text.partition("=")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if name not in known or not 0 <= value < math.inf:
        raise click.UsageError(f"--assume {text}: expected NAME=VALUE, a number and one of {', '.join(known)}")
    is_share = known[name].unit.startswith("share")
    least, most = (_LEAST_SHARE, 1.0) if is_share and name not in _MAY_BE_NONE else (_LEAST, 1.0 if is_share else _MOST)
    if value and (not least <= value <= most or (known[name].unit == "GPUs" and not value.is_integer())):
        raise click.UsageError(f"--assume {text}: no such {known[name].unit} can be planned with")
    if not value and name not in _MAY_BE_NONE:
        raise click.UsageError(f"--assume {text}: only {', '.join(_MAY_BE_NONE)} can be 0")
    return name, Figure(value, known[name].unit, "given with --assume")


def _write(source: str, made: Plan) -> None:
    """Raises CannotPlan if the file cannot be changed."""
    from opsd.plan.search import CannotPlan
    from opsd.plan.source import with_settings

    path = Path(source)
    try:
        changed = with_settings(path.read_text(encoding="utf-8"), made.best.layout.settings())
        write_text(path, changed)
    except OSError as error:
        raise CannotPlan(f"{path} cannot be written: {error.strerror}") from error
    except ValueError as error:
        raise CannotPlan(f"{path} was not changed: {error}") from error


def _own_folder(source: str) -> Path | None:
    """``run.folder``, if the file has it: by default a run's folder is known only once it starts."""
    folder = tomllib.loads(Path(source).read_text(encoding="utf-8")).get("run", {}).get("folder")
    return Path(folder) if folder else None


def _keep(folder: Path, made: Plan) -> None:
    """Raises CannotPlan if the folder cannot be written."""
    from opsd.plan.plan import planned
    from opsd.plan.search import CannotPlan

    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / PLAN, planned(made, time.time()).model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise CannotPlan(f"the plan cannot be kept in {folder}: {error.strerror}") from error


def _show(made: Plan, name: str, html: Path | None, chart: Path | None, json_file: Path | None) -> int:
    from opsd.charts import standalone
    from opsd.plan.plan import as_dict
    from opsd.plan.text import plan_text
    from opsd.report.page import plan_page, speed_chart

    if html is not None and not written(html, plan_page(made, name), "the page"):
        return exitcodes.FAILED
    if chart is not None and not written(chart, standalone(speed_chart(made, width=720)), "the chart"):
        return exitcodes.FAILED
    if json_file is not None and not written(json_file, json.dumps(as_dict(made), indent=1) + "\n", "the plan"):
        return exitcodes.FAILED
    if json_file is None or str(json_file) != "-":
        click.echo("\n".join(plan_text(made)))
    return exitcodes.OK
