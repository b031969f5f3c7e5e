"""Options of several commands, and numbers on the command line."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from textwrap import wrap
from typing import Any, Final, TypeVar

import click

from opsd.rundir import default_root

EXIT_CODES: Final = "Exit codes:"
"""The heading of a table of exit codes."""

F = TypeVar("F", bound=Callable[..., Any])


def option(*names: str, **attributes: Any) -> Callable[[F], F]:
    """``click.option`` that shows its default in the help, if there is something to show; integers are N."""
    default = attributes.get("default")
    if isinstance(attributes.get("type"), click.IntRange):
        attributes.setdefault("metavar", "N")
    if isinstance(default, float) and default.is_integer() and "type" in attributes:
        attributes["default"] = int(default)  # shown without .0; the type makes it a float again
    attributes.setdefault("show_default", default not in (None, "", ()) and not callable(default))
    return click.option(*names, **attributes)


def options(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """One decorator that adds all of these, in their order."""

    def apply(command: F) -> F:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return apply


config_options = options(
    option(
        "--config",
        "file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Use FILE instead of /etc/opsd/opsd.toml.",
    ),
    option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Change one setting."),
)
"""``file`` and ``overrides``, for ``load``."""

_FILE = click.Path(dir_okay=False, path_type=Path)

report_options = options(
    option("--json", "json_file", type=_FILE, help="Write the report as JSON to FILE, - for stdout."),
    option("--junit", "junit_file", type=_FILE, help="Write it as JUnit XML for CI systems."),
    option("--markdown", "markdown_file", type=_FILE, help="Write it as Markdown."),
    option("--textfile", "textfile_file", type=_FILE, help="Write it for node_exporter's textfile collector."),
)
"""Files for a preflight report, for ``report_targets``."""


def report_targets(files: Mapping[str, Path | None]) -> dict[str, Path]:
    """The files that ``report_options`` name, by their form."""
    return {name.removesuffix("_file"): path for name, path in files.items() if path is not None}


def exit_codes(meanings: Mapping[int, str]) -> str:
    """The end of a command's help: a table of its exit codes."""
    lines = [
        wrap(said, 70, initial_indent=f"  {code:<5}", subsequent_indent=" " * 7) for code, said in meanings.items()
    ]
    return "\n".join(["\b", EXIT_CODES, *chain.from_iterable(lines)])


class RunPath(click.Path):
    """A path, or the name of one of this user's runs where there is no file of that name."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See click."""
        folder = default_root() / value
        return super().convert(folder if folder.is_dir() and not Path(value).exists() else value, param, ctx)


class SectionedCommand(click.Command):
    """A command whose help has its options below headings: ``sections`` has the names of their parameters."""

    def __init__(self, *args: Any, sections: Mapping[str, Sequence[str]], **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See click."""
        for title, parameters in sections_of(self, ctx):
            records = [record for each in parameters if (record := each.get_help_record(ctx)) is not None]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class Group(click.Group):
    """A group that shows the first sentence of each of its commands whole; click cuts them to a line."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See click."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, found.get_short_help_str(1000)) for name, found in commands if found and not found.hidden]
            )


class SectionedGroup(SectionedCommand, Group):
    """A group with sections."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See click."""
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)


def sections_of(command: click.Command, ctx: click.Context) -> Iterator[tuple[str, list[click.Option]]]:
    """Each heading with its options; those that belong below none come last, as Options."""
    rest = {found.name: found for found in command.get_params(ctx) if isinstance(found, click.Option)}
    for title, names in command.sections.items() if isinstance(command, SectionedCommand) else ():
        yield title, [rest.pop(name) for name in names]
    yield "Options", [*rest.values()]


class Finite(click.FloatRange):
    """A finite number in a range: click's own type takes ``nan`` for any and ``inf`` where there is no maximum."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Raises click.BadParameter."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


class Seconds(Finite):
    """A duration."""

    name = "seconds"


class Span(click.ParamType):  # type: ignore[type-arg]  # click 8.1 has no argument
    """A time with its unit, in seconds: 90s, 30m, 4h, 2d."""

    name = "time"
    _UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Raises click.BadParameter."""
        found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)([smhd])", str(value).strip())
        if found is None or (seconds := float(found[1]) * self._UNITS[found[2]]) <= 0:
            self.fail(f"{value!r} is no time such as 30m, 4h or 2d.", param, ctx)
        return seconds
