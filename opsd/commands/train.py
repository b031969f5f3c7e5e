"""``opsd train``: the trainer under the launcher, in one word."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import click

from opsd import pip_install
from opsd.commands.launch import launch
from opsd.commands.launch_settings import TRAINER
from opsd.commands.options import option
from opsd.launch.ranks.settings import gpu_count


@click.command()
@click.argument("config")
@option(
    "--nproc-per-node",
    "ranks",
    metavar="N|cpu|gpu|auto",
    help="Ranks on this node, as of opsd launch. By default one for each GPU, and one where there is none.",
)
@option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override one setting.")
@option("--run-id", "run", default="", help="Name of the run; the same name goes on with it. By default a new one.")
@option("--fresh", is_flag=True, help="Begin at step 0 if no checkpoint of the run is available.")
def train(config: str, ranks: str | None, overrides: tuple[str, ...], run: str, fresh: bool) -> int:
    """Train the model that CONFIG describes on this node: a TOML file, or the name of a preset.

    Presets: smollm3-3b, tiny, tiny-hybrid, tiny-mla, tiny-moe.

    Short for opsd launch --nproc-per-node N -m opsd.trainer CONFIG, which has more options and also runs on several
    nodes. Started by a launcher or torchrun, with RANK set, this is one of its ranks.
    """
    if find_spec("torch") is None:
        raise click.UsageError(f"training needs torch: {pip_install('train')}")
    settings = [word for override in overrides for word in ("--set", override)]
    program = [TRAINER, *settings, *(["--fresh"] if fresh else []), "--", config]
    if "RANK" in os.environ:
        os.execv(sys.executable, [sys.executable, "-m", *program])  # noqa: S606
    from opsd.trainer.config import ConfigError, load

    try:
        load(config, overrides)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    named = ["--run-id", run] if run else []
    options = [*named, "--nproc-per-node", ranks or str(gpu_count(os.environ) or 1), "-m"]
    return int(launch.main([*options, *program], "opsd launch", standalone_mode=False))
