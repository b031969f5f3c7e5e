"""``opsd chat``: talk to a checkpoint."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from opsd import durable, exitcodes
from opsd.commands.options import Finite, exit_codes, option
from opsd.commands.output import fail

if TYPE_CHECKING:
    from opsd.posttrain.speaker import Messages, Speaker

_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
CHATS = "chats"
"""Below the folder of the run: a file per chat, a line per question."""
RESET, SYSTEM = "/reset", "/system"


@click.command(
    epilog=exit_codes(
        {
            0: "the chat has ended",
            1: "no question was answered, or the transcript cannot be written",
            2: "the command line is wrong, or a folder is no checkpoint",
            74: "the disk or the quota below the transcript is full",
        }
    )
)
@click.argument("checkpoint", type=_FOLDER)
@option("--with", "other", type=_FOLDER, metavar="CHECKPOINT", help="Put each question to this one as well.")
@option("--system", default="", metavar="TEXT", help="The system prompt.")
@option("--max-new-tokens", type=click.IntRange(1), default=512, help="Tokens after which an answer is broken off.")
@option("--temperature", type=Finite(0), default=0.0, help="0 takes the likeliest token each time, 1 draws.")
@option("--seed", type=click.IntRange(0), default=0, help="Of what is drawn.")
@option("--device", default="auto", metavar="DEVICE", help="A device of torch; auto: the first GPU, or the CPU.")
@option(
    "--transcript",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Keep the chat there. Default: chats/TIME.jsonl in the folder of the run.",
)
def chat(
    checkpoint: Path,
    other: Path | None,
    system: str,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    device: str,
    transcript: Path | None,
) -> int:
    """Talk to CHECKPOINT, a folder for transformers, or the newest checkpoint in a trainer's output folder.

    The chat template is the one that was saved with it. A line is a question, /system TEXT sets another system prompt,
    /reset begins again, Ctrl-D ends. Questions may also come from a file: opsd chat out < questions.txt. The transcript
    is kept with the run, a JSON line for each question, durably before the next one.
    """
    try:
        from transformers import set_seed

        from opsd.posttrain.speaker import Speaker, SpeakerError, checkpoints_in, home_of, told_apart
    except ImportError as error:
        raise click.UsageError(f"this needs {error.name}: pip install transformers torch") from error
    try:
        place = transcript or home_of(checkpoints_in(checkpoint)[-1]) / CHATS / time.strftime("%Y%m%d-%H%M%S.jsonl")
        with _kept(place):
            durable.make_folder(place.parent)
        folders = [folder for folder in (checkpoint, other) if folder is not None]
        speakers = [Speaker.load(folder, device) for folder in folders]
        names = told_apart([each.name for each in speakers], folders)
        speakers = [replace(each, name=name) for each, name in zip(speakers, names, strict=True)]
        set_seed(seed)
        return _talk(speakers, _readable(system), place, max_new_tokens, temperature)
    except SpeakerError as error:
        raise click.UsageError(str(error)) from error


@contextmanager
def _kept(place: Path) -> Iterator[None]:
    """An OSError in here is one of the transcript, not of stdout, and ends the command."""
    try:
        yield
    except OSError as error:
        where = error.filename or place
        fail(f"the transcript cannot be written to {where}: {error.strerror}", exitcodes.of_error(error))


def _talk(speakers: list[Speaker], system: str, place: Path, most: int, temperature: float) -> int:
    from opsd.posttrain.speaker import SpeakerError

    for speaker in speakers:
        if not speaker.has_template:
            click.echo(f"opsd: {speaker.name} has no chat template: it continues texts", err=True)
    histories: list[Messages] = [[] for _ in speakers]
    asked = answered = False
    for line in _lines():
        word, _, rest = line.partition(" ")
        if word in (RESET, SYSTEM):
            system, histories = rest.strip() if word == SYSTEM else system, [[] for _ in speakers]
            continue
        answers = {}
        for speaker, history in zip(speakers, histories, strict=True):
            begin: Messages = [{"role": "system", "content": system}] if system else []
            history.append({"role": "user", "content": line})
            if len(speakers) > 1:
                click.secho(speaker.name, bold=True)
            try:
                answer = speaker.answer([*begin, *history], most=most, temperature=temperature, said=_say)
            except SpeakerError as error:
                history.pop()
                click.echo(f"opsd: {error}", err=True)
                continue
            click.echo("" if answer.stopped else " …")
            history.append({"role": "assistant", "content": answer.text})
            answers[speaker.name] = {"text": answer.text, "stopped": answer.stopped}
        asked, answered = True, answered or bool(answers)
        turn = len(histories[0]) // 2
        record = {"t": time.time(), "turn": turn, "system": system, "user": line, "answers": answers}
        with _kept(place):
            durable.append(place, json.dumps(record).encode() + b"\n")
    if place.exists():
        click.echo(f"transcript: {place}", err=True)
    return exitcodes.OK if answered or not asked else exitcodes.FAILED


def _say(text: str) -> None:
    click.echo(text, nl=False)


def _readable(text: str) -> str:
    """``text`` with a question mark for each byte that is not UTF-8, which no tokenizer takes."""
    return text.encode(errors="replace").decode()


def _lines() -> Iterator[str]:
    """Questions from the terminal or from a file, without empty ones."""
    asks = sys.stdin.isatty()
    if asks:
        import readline  # noqa: F401  # input() edits lines with it
    while True:
        try:
            line = _readable(input("> " if asks else "").strip())
        except (EOFError, KeyboardInterrupt):
            if asks:
                click.echo()
            return
        if line:
            yield line
