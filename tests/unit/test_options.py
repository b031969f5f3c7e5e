"""Numbers on the command line: finite ones only, whichever command they are given to."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from opsd import exitcodes
from opsd.commands.main import cli
from opsd.commands.options import Finite

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NAME": "train"}


def options(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Parameter]]:
    """Every parameter of every command below ``command``, and the command's path."""
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            found = command.get_command(click.Context(command), name)
            assert found is not None
            yield from options(found, (*path, name))
    for parameter in command.params:
        yield path, parameter


FLOATS = [
    (path, parameter)
    for path, parameter in options(cli)
    if isinstance(parameter.type, click.types.FloatParamType | click.FloatRange)
]


@pytest.mark.parametrize(("path", "parameter"), FLOATS, ids=lambda value: getattr(value, "name", None))
def test_every_number_is_finite_and_in_a_range(path: tuple[str, ...], parameter: click.Parameter) -> None:
    """``nan`` is in every range to click, and ``inf`` in one without a maximum."""
    assert isinstance(parameter.type, Finite), f"{' '.join(path)} {parameter.name}"
    assert parameter.type.min is not None


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "1e999", "ten"])
@pytest.mark.parametrize(
    "line",
    ["slurm run --wait={} -- t.py", "launch --hang-limit={} t.py", "launch --monitor-interval={} t.py",
     "requeue 7 --limit={}", "swap n1 --timeout={}"],
)  # fmt: skip
def test_what_is_no_such_number_is_a_wrong_command_line(line: str, value: str) -> None:
    """One sentence that names the option and what was given."""
    done = CliRunner().invoke(cli, line.format(value).split(), env=JOB)
    assert done.exit_code == exitcodes.USAGE
    (said,) = [sentence for sentence in done.output.splitlines() if sentence.startswith("Error: ")]
    assert line.partition("={}")[0].split()[-1] in said
    assert f"'{value}'" in said or str(float(value)) in said


@pytest.mark.parametrize("value", ["²", "0", "-1", "1025"])
def test_digits_that_are_no_number_of_ranks(value: str) -> None:
    """A superscript is a digit to Python, and no number."""
    done = CliRunner().invoke(cli, ["launch", f"--nproc-per-node={value}", "t.py"])
    assert (done.exit_code, "is not a number of ranks" in done.output) == (exitcodes.USAGE, True), done.output
