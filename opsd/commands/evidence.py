"""``opsd evidence``: one archive with what is known of this node's hardware."""

from __future__ import annotations

import errno
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import click

from opsd import exitcodes
from opsd.commands.options import config_options, exit_codes, option
from opsd.commands.output import fail
from opsd.commands.settings import BadConfig, load
from opsd.config import Settings
from opsd.repair import evidence as archive
from opsd.repair.local import sources_of


@click.command(
    epilog=exit_codes(
        {
            0: "the archive was written",
            1: "it could not be written",
            2: "the command line is wrong",
        }
    )
)
@click.argument("node", required=False)
@option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path, allow_dash=True),
    help="Write it there, - for stdout. Default: the state folder.",
)
@option("--no-bug-report", is_flag=True, help="Without nvidia-bug-report.sh, which takes minutes.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@config_options
def evidence(
    node: str | None,
    out: Path | None,
    no_bug_report: bool,
    as_json: bool,
    file: Path | None,
    overrides: tuple[str, ...],
) -> int:
    """Put what is known of NODE, this node, into one archive, to be sent to its vendor.

    It has the kernel log, the state of the driver, NVIDIA's own report and the node in Slurm. Incidents, repairs and
    preflights are in it too. index.json names missing parts with the reason. The archive contains names of users and
    jobs, but no settings. Passwords and tokens are removed from logs, but not from NVIDIA's report.
    """
    settings = load(file, overrides)
    check_here(node, settings)
    now, sources, bug_report = time.time(), sources_of(settings), not no_bug_report
    if str(out) == "-":
        return _to_stdout(sources, now, as_json, bug_report)
    try:
        path = archive.make(sources, now, out, bug_report=bug_report)
    except OSError as error:
        fix = "; run it as root, or name a file with --out" if out is None and error.errno == errno.EACCES else ""
        fail(f"{out or settings.agent.state_dir}: the archive cannot be written: {error.strerror or error}{fix}")
    size = path.stat().st_size
    if as_json:
        click.echo(json.dumps({"node": settings.agent.node, "at": now, "archive": str(path), "bytes": size}))
    else:
        click.echo(f"{path} ({size / 1e6:.1f} MB)")
    return exitcodes.OK


def _to_stdout(sources: archive.Sources, now: float, as_json: bool, bug_report: bool) -> int:
    stdout = sys.stdout.buffer
    if as_json or stdout.isatty():
        raise click.UsageError("--out - writes the archive to stdout: send that to a file or a pipe, without --json")
    try:
        with tempfile.TemporaryDirectory(prefix="opsd-evidence-") as folder:
            path = archive.make(sources, now, Path(folder) / "archive.tar.gz", bug_report=bug_report)
            with path.open("rb") as made:
                shutil.copyfileobj(made, stdout)
            stdout.flush()
    except BrokenPipeError:
        raise  # the group ends quietly
    except OSError as error:
        fail(f"the archive cannot be written: {error.strerror or error}")
    return exitcodes.OK


def check_here(node: str | None, settings: Settings) -> None:
    """Raise BadConfig unless ``node`` is this one, or none is named."""
    here = settings.agent.node
    if node is not None and node != here:
        raise BadConfig(f"this is {here}: run the command on {node}, or name this node {node} with agent.node")
