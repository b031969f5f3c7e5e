"""Manual pages, made from the command line: one for ``opsd`` and one for each command, under deploy/man."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from opsd import __version__, exitcodes
from opsd.commands import main
from tests.reference import attribute_docs, exit_codes

FOLDER = Path(__file__).parents[1] / "deploy/man"


def rendered() -> dict[Path, str]:
    """File and content of every page."""
    with click.Context(main.cli, info_name="opsd") as root:
        commands = {name: main.cli.get_command(root, name) for name in main.COMMANDS if name not in main.CHECKOUT_ONLY}
        pages = {"opsd": _overview()}
        for name, command in commands.items():
            assert command is not None
            pages[f"opsd-{name}"] = _page(name, command, click.Context(command, root, name))
    return {FOLDER / f"{name}.1": "\n".join(lines) + "\n" for name, lines in pages.items()}


def leftovers() -> list[Path]:
    """Pages of commands that are gone."""
    wanted = rendered().keys()
    return [path for path in FOLDER.glob("*.1") if path not in wanted]


def _overview() -> Iterator[str]:
    yield from _head("opsd", "keep a training run on a GPU cluster at full speed")
    yield from (".SH SYNOPSIS", r".B opsd", r"\fICOMMAND\fR [\fIOPTIONS\fR] [\fIARGUMENTS\fR]", ".SH COMMANDS")
    yield from _terms(
        (rf"\fBopsd {_text(name)}\fR", said) for name, said in main.COMMANDS.items() if name not in main.CHECKOUT_ONLY
    )
    yield ".SH EXIT STATUS"
    yield from _terms(
        (str(getattr(exitcodes, name)), said or "Done.") for name, said in attribute_docs(exitcodes).items()
    )
    yield ".SH FILES"
    yield from _terms([(r"\fI/etc/opsd/opsd.toml\fR", "Settings of the agent and the commands; it may be missing.")])
    yield ".SH SEE ALSO"
    names = sorted(f"opsd-{name}" for name in main.COMMANDS if name not in main.CHECKOUT_ONLY)
    yield from (rf".BR {_text(name)} (1){',' * (name != names[-1])}" for name in names)


def _page(name: str, command: click.Command, context: click.Context) -> Iterator[str]:
    yield from _head(f"opsd-{name}", main.COMMANDS[name].rstrip("."))
    yield ".SH SYNOPSIS"
    yield _usage(command, context)
    yield ".SH DESCRIPTION"
    yield from _about(command)
    yield from _options(command, context, ".SH OPTIONS")
    if isinstance(command, click.Group):
        yield ".SH COMMANDS"
        yield from _below(command, context)
    if codes := exit_codes(command):
        yield ".SH EXIT STATUS"
        yield from _terms(codes)
    yield from (".SH SEE ALSO", ".BR opsd (1)")


def _below(group: click.Group, context: click.Context) -> Iterator[str]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        inner = click.Context(command, context, name)
        yield f".SS {_text(inner.command_path)}"
        yield _usage(command, inner)
        yield ".PP"
        yield from _about(command)
        yield from _options(command, inner, ".PP")
        if isinstance(command, click.Group):
            yield from _below(command, inner)


def _head(name: str, about: str) -> Iterator[str]:
    yield r".\" Made by `make generate`; a change made here is lost."
    yield f'.TH {_text(name).upper()} 1 "" "opsd {__version__}" "opsd"'
    yield from (".SH NAME", rf"{_text(name)} \- {_text(about)}")


def _usage(command: click.Command, context: click.Context) -> str:
    return rf"\fB{_text(context.command_path)}\fR {_text(' '.join(command.collect_usage_pieces(context)))}"


def _about(command: click.Command) -> Iterator[str]:
    """The paragraphs of a docstring; those after a line of a backspace keep their lines."""
    for number, paragraph in enumerate(re.split(r"\n\n+", inspect.cleandoc(command.help or ""))):
        if number:
            yield ".PP"
        if paragraph.startswith("\b"):
            yield from (".nf", *map(_text, paragraph.splitlines()[1:]), ".fi")
        else:
            yield _text(" ".join(paragraph.split()))


def _options(command: click.Command, context: click.Context, heading: str) -> Iterator[str]:
    records = [record for each in command.params if (record := each.get_help_record(context)) and record[1]]
    if records:
        yield heading
        yield from _terms((rf"\fB{_text(names)}\fR", said) for names, said in records)


def _terms(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    for term, said in rows:
        yield from (".TP", term, _text(" ".join(said.split())))


def _text(text: str) -> str:
    """As roff prints it: no escape, no hyphen in place of a minus, ASCII, and no request at the start of a line."""
    text = text.replace("``", "").replace("\\", r"\e").replace("-", r"\-")
    text = re.sub(r"[^\x00-\x7f]", lambda found: rf"\[u{ord(found[0]):04X}]", text)
    return rf"\&{text}" if text.startswith((".", "'")) else text
