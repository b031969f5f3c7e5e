"""Options of several commands, and numbers on the command line."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def option(*names: str, **attributes: Any) -> Callable[[F], F]:
    """``click.option`` that shows its default in the help, if there is something to show."""
    default = attributes.get("default")
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
    option("--config", "file", type=click.Path(path_type=Path), help="Use FILE instead of /etc/opsd/opsd.toml."),
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


class Finite(click.FloatRange):
    """A finite number in a range: click's own type takes ``nan`` for any and ``inf`` where there is no maximum."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Raises click.BadParameter."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number
