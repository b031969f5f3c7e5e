"""Models of Hugging Face on the command line: ``python -m opsd.trainer.huggingface``.

To begin a run with the weights of a folder, set ``run.initial`` to it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import click
import torch

from opsd import exitcodes
from opsd.checkpoints.manifest import CheckpointError, folder_of, steps
from opsd.trainer.config import CHECKPOINTS, ConfigError, load
from opsd.trainer.hf.config import settings_of
from opsd.trainer.hf.export import export_checkpoint, export_foreign
from opsd.trainer.hf.foreign import foreign
from opsd.trainer.hf.verify import compare
from opsd.trainer.hf.weights import config_in
from opsd.trainer.tensors import FormatError
from opsd.words import with_remedy

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Export checkpoints as Hugging Face models, import those of others, and read and verify such models."""


@main.command()
@click.argument("config")
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override one setting.")
@click.option("--step", type=int, help="Of which checkpoint; the newest by default.")
@click.option("--dtype", type=click.Choice(list(_DTYPES)), default="bfloat16", show_default=True)
@click.option(
    "--chat-template",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write this Jinja template beside the tokenizer, for a post-training and for opsd chat.",
)
def export(
    config: str, target: Path, overrides: tuple[str, ...], step: int | None, dtype: str, chat_template: Path | None
) -> None:
    """Write a checkpoint of the run that CONFIG describes as a Hugging Face model into the folder TARGET."""
    settings = load(config, overrides)
    root = Path(settings.run.folder) / CHECKPOINTS
    if not (found := steps(root)):
        raise ConfigError(f"{root} has no checkpoint; set run.folder to the folder of the run")
    folder = folder_of(root, found[-1] if step is None else step)
    count = export_checkpoint(settings, folder, target, _DTYPES[dtype], chat_template)
    click.echo(f"{count} tensors of {folder} written to {target}")


@main.command("import")
@click.argument("folder", type=_FOLDER)
@click.argument("target", type=click.Path(path_type=Path))
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The config.json of Hugging Face for the model, which a checkpoint of torchtitan does not say.",
)
def import_(folder: Path, target: Path, config: Path | None) -> None:
    """Write the checkpoint of torchtitan, nanotron or Megatron-LM in FOLDER as a Hugging Face model to TARGET."""
    count = export_foreign(foreign(folder, config), target)
    click.echo(f"{count} tensors of {folder} written to {target}")


@main.command()
@click.argument("folder", type=_FOLDER)
def settings(folder: Path) -> None:
    """Print the section [model] for the Hugging Face model in FOLDER."""
    click.echo("[model]")
    for key, value in settings_of(config_in(folder)).model_dump(exclude_defaults=True).items():
        click.echo(f"{key} = {json.dumps(value)}")


@main.command()
@click.argument("folder", type=_FOLDER)
@click.option(
    "--layers", type=click.IntRange(min=0), default=0, help="Compare the first so many; by default what fits."
)
def verify(folder: Path, layers: int) -> None:
    """Compare the logits of the Hugging Face model in FOLDER, computed by this trainer and by transformers.

    Ends with 1 if they differ by more than rounding.
    """
    found = compare(folder, layers)
    said = (
        f"{found.layers} of {found.of_layers} layers: logits differ by at most {found.difference:.1e} of the greatest"
    )
    click.echo(said)
    if not found.same:
        raise Different(f"{folder} does not compute the same here as in transformers; do not train from it")


class Different(Exception):
    """The two compute different things."""


def run(command: Callable[[], object] = main) -> None:
    """Entry point: errors that the user can fix are one sentence."""
    try:
        command()
    except OSError as error:
        click.echo(f"opsd: {with_remedy(error)}", err=True)
        sys.exit(exitcodes.of_error(error, otherwise=2))
    except (ConfigError, CheckpointError, FormatError, KeyError) as error:
        click.echo(f"opsd: {error}", err=True)
        sys.exit(2)
    except Different as error:
        click.echo(f"opsd: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    run()
