"""``opsd vibe``: what checkpoints do with a chat, in numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from opsd import exitcodes
from opsd.commands.options import exit_codes, option
from opsd.words import plural

if TYPE_CHECKING:
    from opsd.posttrain.rows import Example
    from opsd.posttrain.vibe import Vibe

_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command(
    epilog=exit_codes(
        {
            0: "nothing is wrong with the last checkpoint",
            1: "something is wrong with it, which is said",
            2: "the command line is wrong, or a folder is no checkpoint",
        }
    )
)
@click.argument("checkpoints", nargs=-1, required=True, type=_FOLDER, metavar="CHECKPOINT...")
@option("--base", type=_FOLDER, metavar="FOLDER", help="The model before the training, as the first line of the table.")
@option(
    "--rows",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Held-out rows with system prompts as JSON lines. Only they prove that it follows them.",
)
@option("--max-new-tokens", type=click.IntRange(1), default=128, help="Tokens after which an answer is broken off.")
@option("--device", default="auto", metavar="DEVICE", help="A device of torch; auto: the first GPU, or the CPU.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def vibe(
    checkpoints: tuple[Path, ...],
    base: Path | None,
    rows: Path | None,
    max_new_tokens: int,
    device: str,
    as_json: bool,
) -> int:
    """Measure whether checkpoints follow their system prompt, stop, repeat, and keep to their chat template.

    CHECKPOINT is a folder for transformers, or a trainer's output folder: then all checkpoints in it are measured.

        opsd vibe out --base smollm --rows held_out.jsonl
    """
    from opsd.posttrain.audit import DumpError

    try:
        examples = _examples(rows) if rows else []
        found = _measured(checkpoints, base, examples, max_new_tokens, device)
    except DumpError as error:
        raise click.UsageError(str(error)) from error
    except ImportError as error:
        raise click.UsageError(f"this needs {error.name}: pip install transformers torch") from error
    if as_json:
        from opsd.posttrain.vibe import described

        click.echo(json.dumps({"base": base is not None, "checkpoints": [described(each) for each in found]}))
    else:
        _print(found, base=base is not None)
    return exitcodes.FAILED if found[-1].problems else exitcodes.OK


def _examples(path: Path) -> list[Example]:
    """The rows that can prove something. Raises DumpError, and click.UsageError if they are too few."""
    from opsd.posttrain.audit import read_rows
    from opsd.posttrain.rows import Example
    from opsd.posttrain.vibe import LEAST_ROWS, usable

    found = usable(Example.of(row, number) for number, row in enumerate(read_rows(path)))
    systems = {tuple(each.texts("system")) for each in found}
    if len(found) < LEAST_ROWS or len(systems) < 2:
        raise click.UsageError(
            f"{path} has {plural(len(found), 'row')} with a system prompt, a question and an answer, and "
            f"{plural(len(systems), 'system prompt')}: at least {LEAST_ROWS} rows and two system prompts are needed"
        )
    return found


def _measured(
    checkpoints: tuple[Path, ...], base: Path | None, examples: list[Example], most: int, device: str
) -> list[Vibe]:
    from opsd.posttrain.speaker import Speaker, SpeakerError, checkpoints_in, told_apart
    from opsd.posttrain.vibe import measure

    try:
        folders = [path for folder in checkpoints for path in checkpoints_in(folder)]
        folders = [*(checkpoints_in(base)[-1:] if base else []), *folders]
        found = [measure(Speaker.load(folder, device), examples, most=most) for folder in folders]
    except SpeakerError as error:
        raise click.UsageError(str(error)) from error
    names = told_apart([each.name for each in found], folders)
    return [replace(each, name=name) for each, name in zip(found, names, strict=True)]


def _print(found: list[Vibe], *, base: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("checkpoint", "follows", "divergence", "gain", "stops", "repeats", "strays"):
        table.add_column(
            name, no_wrap=True, overflow="ignore", justify="left" if name in ("checkpoint", "follows") else "right"
        )
    for number, each in enumerate(found):
        moved = "-" if each.divergence is None else f"{each.divergence:.3f}"
        gain = "-" if each.gain is None else f"{each.gain:+.3f} ± {each.gain_error:.3f}"
        shares = [f"{share:.0%}" for share in (each.stops, each.repeats, each.strays)]
        name = f"{each.name} (base)" if base and number == 0 else each.name
        table.add_row(name, each.follows, moved, gain, *shares)
    Console(width=max(100, 70 + max(len(each.name) for each in found)), highlight=False).print(table)
    for problem in found[-1].problems:
        click.echo(f"{found[-1].name}: {problem}")
