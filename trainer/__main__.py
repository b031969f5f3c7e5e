"""``python -m opsd.trainer CONFIG``: train, one process per rank, under ``opsd launch``, torchrun or alone."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress

import click
from torch.distributed.elastic.multiprocessing.errors import record

from opsd.checkpoints.claims import EXIT_FENCED, ClaimError, Fence, Fenced
from opsd.checkpoints.manifest import CheckpointError
from opsd.trainer.config import ConfigError, load
from opsd.trainer.data.shards import DataError
from opsd.trainer.parts import STORAGE_RETRY_S
from opsd.trainer.restore import RestoreError
from opsd.trainer.train import TrainingError, train

FAILED, USAGE = 1, 2


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="\b\nExit codes:\n"
    "  0   done, or stopped on request with the state saved\n"
    "  1   failed\n"
    "  2   settings or data cannot be used\n"
    "  76  a later generation of the run has begun",
)
@click.argument("config")
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override one setting.")
@click.option("--fresh", is_flag=True, help="Begin at step 0 if no checkpoint of the run is available.")
def main(config: str, overrides: tuple[str, ...], fresh: bool) -> None:
    """Train the model that CONFIG describes: a TOML file, or the name of a preset.

    Presets: smollm3-3b, tiny, tiny-hybrid, tiny-mla, tiny-moe.

    Goes on from the newest checkpoint of the run folder that verifies.
    """
    try:
        if fence := Fence.of(os.environ):
            fence.check(STORAGE_RETRY_S)
        saved = _train(config, overrides, fresh)
    except (ConfigError, DataError) as error:
        click.echo(f"opsd: {error}", err=True)
        sys.exit(USAGE)
    except (RestoreError, CheckpointError, TrainingError) as error:
        click.echo(f"opsd: {error}", err=True)
        sys.exit(FAILED)
    except ClaimError as error:
        click.echo(f"opsd: {error.strerror}", err=True)
        sys.exit(EXIT_FENCED if isinstance(error, Fenced) else FAILED)
    if not saved:
        sys.exit(FAILED)


@record
def _train(config: str, overrides: tuple[str, ...], fresh: bool) -> bool:
    return train(load(config, overrides), fresh=fresh)


def run() -> None:
    """Run ``main`` and end the process without the interpreter's shutdown.

    With torch imported that shutdown takes 0.8 to 2 s, which would delay every planned swap and every preemption. All
    files are closed by then, and the processes that write checkpoints have ended.
    """
    try:
        main()
    except SystemExit as end:
        if not isinstance(end.code, int):
            raise
        atexit._run_exitfuncs()
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(end.code)


if __name__ == "__main__":
    run()
