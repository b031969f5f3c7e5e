"""``opsd checkpoint``: list, verify, audit, prune and upload checkpoints from their manifests."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from opsd import exitcodes, pip_install, words
from opsd.checkpoints.manifest import MANIFEST, REJECTED, CheckpointError, Manifest, folders, is_there, read, verify
from opsd.checkpoints.remote import AWAITING, Remote, RemoteError, reason_of, without_user
from opsd.checkpoints.retention import PART, PRUNED, prune, reasons
from opsd.commands.options import Group, RunPath, exit_codes, option
from opsd.commands.output import output_console
from opsd.durable import FORGOTTEN_S

SUBFOLDER = "checkpoints"


@dataclass(frozen=True, slots=True)
class Entry:
    """One checkpoint folder; ``state`` is complete, rejected, removed (half way), damaged or incomplete."""

    step: int
    folder: Path
    state: str
    manifest: Manifest | None
    size: int

    def as_json(self) -> dict[str, Any]:
        """The entry as plain values."""
        manifest = asdict(self.manifest) if self.manifest else None
        return {"step": self.step, "folder": str(self.folder), "state": self.state, "size": self.size} | {
            "manifest": manifest
        }


@click.group(cls=Group)
def checkpoint() -> None:
    """List, verify, audit, prune and upload checkpoints from their manifests.

    PATH is a run folder or the name of one of this user's runs, a checkpoints folder, or the folder of one checkpoint.
    """


@checkpoint.command("list")
@click.argument("path", type=RunPath(exists=True, file_okay=False, path_type=Path))
@option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_command(path: Path, as_json: bool) -> int:
    """List the checkpoints under PATH, oldest first."""
    entries = find(path)
    if as_json:
        click.echo(json.dumps({"checkpoints": [entry.as_json() for entry in entries]}, indent=1))
        return exitcodes.OK
    table = Table("step", "state", "layout", "files", "size", "sample", "age", box=None, header_style="bold")
    for entry in entries:
        manifest = entry.manifest
        table.add_row(
            str(entry.step),
            entry.state,
            " ".join(f"{name}{size}" for name, size in manifest.layout.items()) if manifest else "",
            str(len(manifest.files)) if manifest else "",
            words.size(entry.size),
            str(manifest.sample) if manifest else "",
            words.span(time.time() - manifest.created) if manifest else "",
        )
    if entries:
        output_console().print(table)
    else:
        click.echo(f"no checkpoints under {path}")
    return exitcodes.OK


@checkpoint.command("verify")
@click.argument("path", type=RunPath(exists=True, file_okay=False, path_type=Path))
@option("--json", "as_json", is_flag=True, help="Print JSON lines.")
def verify_command(path: Path, as_json: bool) -> int:
    """Check every file of the checkpoints under PATH; exit code 1 if one is damaged or there is none.

    Those that a trainer removes meanwhile are named and are no failure.
    """
    entries = [entry for entry in find(path) if entry.state in ("complete", "damaged")]
    if not entries:
        click.echo(f"no complete checkpoint under {path}", err=True)
        return exitcodes.FAILED
    damaged = 0
    for entry in entries:
        state, why = "ok", ""
        try:
            manifest = verify(entry.folder)
            said = f"ok, {len(manifest.files)} files, {words.size(entry.size)}"
        except CheckpointError as error:
            gone = not any(is_there(entry.folder, name) for name in (MANIFEST, REJECTED))
            damaged += not gone
            state, why = ("removed", "") if gone else ("damaged", str(error))
            said = "removed meanwhile" if gone else f"DAMAGED: {error}"
        line = json.dumps({"step": entry.step, "state": state, "why": why}) if as_json else f"step {entry.step}: {said}"
        click.echo(line)
    return exitcodes.FAILED if damaged else exitcodes.OK


@checkpoint.command(
    "audit",
    epilog=exit_codes(
        {
            0: "no copies",
            1: "copies were found",
            2: "nothing can be read",
        }
    ),
)
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@option("--json", "as_json", is_flag=True, help="Print JSON.")
def audit_command(path: Path, as_json: bool) -> int:
    """Look for tensors whose tensor-parallel shards are copies of each other.

    PATH may also be what others wrote: a checkpoint of torch.distributed.checkpoint, a folder of safetensors or one
    such file. Of a run folder the newest complete checkpoint is examined.
    """
    entries = find(path) if path.is_dir() else []
    complete = [entry.folder for entry in entries if entry.state == "complete"]
    if not complete and any(PART.fullmatch(file.name) for entry in entries for file in entry.folder.iterdir()):
        states = ", ".join(f"step {entry.step} is {entry.state}" for entry in entries)
        raise click.UsageError(f"{path} has no complete checkpoint: {states}")
    return audit(complete[-1] if complete else path, as_json=as_json)


@checkpoint.command("prune")
@click.argument("path", type=RunPath(exists=True, file_okay=False, path_type=Path))
@option("--keep", type=click.IntRange(1), default=3, help="How many of the newest stay.")
@option("--keep-every", type=click.IntRange(0), default=0, metavar="N", help="Those of every N-th step stay too.")
@option("--dry-run", is_flag=True, help="Say what would go and change nothing.")
def prune_command(path: Path, keep: int, keep_every: int, dry_run: bool) -> int:
    """Remove old checkpoints by the rules of the trainer.

    Those that await an upload or an evaluation stay, and all of them while the newest is not whole. Only files that a
    manifest names are removed. Exit code 1 if a file could not be removed.
    """
    root = path if dict(folders(path)) else path / SUBFOLDER
    sizes = {entry.step: entry.size for entry in find(root)}
    kept = reasons(root, keep, keep_every)
    try:
        going = [step for step, reason in kept.items() if not reason] if dry_run else prune(root, keep, keep_every)
    except OSError as error:
        click.echo(f"opsd: not all old checkpoints could be removed: {words.with_remedy(error)}", err=True)
        return exitcodes.FAILED
    left = {entry.step: entry.size for entry in find(root)} if not dry_run else {}
    for step in sorted({*kept, *going}):
        fate = ("would be removed" if dry_run else "removed") if step in going else f"kept: {kept[step]}"
        click.echo(f"step {step}: {fate}, {words.size(sizes.get(step, 0) - left.get(step, 0) * (step in going))}")
        if step in going and left.get(step):
            click.echo(f"  {words.size(left[step])} of a save that failed stay for {words.span(FORGOTTEN_S)}")
    if not going:
        click.echo(f"nothing to remove under {root}")
    return exitcodes.OK


@checkpoint.command("upload")
@click.argument("path", type=RunPath(exists=True, file_okay=False, path_type=Path))
@click.argument("url")
@option("--dry-run", is_flag=True, help="Say what would be uploaded and send nothing.")
def upload_command(path: Path, url: str, dry_run: bool) -> int:
    """Copy the complete checkpoints under PATH that URL does not have to it, oldest first, and read them back.

    URL is one that fsspec knows, s3://bucket/run for instance, or a folder. The files read back are compared with the
    manifest, which is written last. Exit code 1 if one could not be copied.
    """
    entries = [entry for entry in find(path) if entry.state == "complete"]
    code = exitcodes.OK if entries else exitcodes.FAILED
    try:
        remote = Remote.open(url)
        there = set(remote.steps())
        for entry in entries:
            try:
                click.echo(f"step {entry.step}: {_upload(entry, remote, there, dry_run=dry_run)}")
            except (CheckpointError, OSError) as error:
                click.echo(without_user(f"opsd: {url}: step {entry.step}: {reason_of(error)}"), err=True)
                code = exitcodes.of_error(error) if isinstance(error, OSError) else exitcodes.FAILED
    except RemoteError as error:
        raise click.UsageError(str(error)) from error
    except Exception as error:  # clients of object storages raise what they like
        click.echo(without_user(f"opsd: {url}: {reason_of(error)}"), err=True)
        return exitcodes.FAILED
    if not entries:
        click.echo(f"no complete checkpoint under {path}", err=True)
    return code


def _upload(entry: Entry, remote: Remote, there: Collection[int], *, dry_run: bool) -> str:
    """What has become of the checkpoint. Raises CheckpointError, OSError or what the client raises."""
    size = words.size(entry.size)
    if dry_run:
        return "already there" if entry.step in there else f"would be uploaded, {size}"
    if entry.step not in there:
        remote.upload(entry.folder)
    (entry.folder / AWAITING).unlink(missing_ok=True)
    return "already there" if entry.step in there else f"uploaded, {size}"


def find(path: Path) -> list[Entry]:
    """The checkpoints of a run folder, of a folder of checkpoints, or the one that ``path`` is; oldest first.

    A trainer may write and remove some meanwhile.
    """
    found = dict(folders(path)) or dict(folders(path / SUBFOLDER))
    if not found:
        found = {
            step: folder for step, folder in folders(path.absolute().parent) if folder.name == path.absolute().name
        }
    return [_entry(step, found[step]) for step in sorted(found)]


def _entry(step: int, folder: Path) -> Entry:
    size = _size(folder)
    for name, state in ((MANIFEST, "complete"), (REJECTED, "rejected"), (PRUNED, "removed")):
        if is_there(folder, name):
            try:
                return Entry(step, folder, state, read(folder, name), size)
            except CheckpointError:
                if is_there(folder, name):  # else renamed just now
                    return Entry(step, folder, "damaged" if name == MANIFEST else state, None, size)
    return Entry(step, folder, "incomplete", None, size)


def _size(folder: Path) -> int:
    size = 0
    with suppress(OSError):  # what cannot be seen counts as nothing
        for file in folder.iterdir():
            with suppress(OSError):
                size += file.lstat().st_size
    return size


NAMED = 5
"""Shards that a row of the table names."""


def audit(path: Path, *, as_json: bool) -> int:
    """Examine the checkpoint at ``path``, print what is found and return the exit code.

    Another process reads the tensors, since this command must not load torch.
    """
    if importlib.util.find_spec("torch") is None:
        raise click.UsageError(f"reading tensors needs torch: {pip_install('train')}")
    findings, examined = [], 0
    for line in _examine(path):
        if "error" in line:
            raise click.UsageError(line["error"])
        if "tensor" in line:
            findings.append(line)
        examined = line.get("tensors", examined)
    if as_json:
        click.echo(json.dumps({"tensors": examined, "copies": findings}, indent=1))
    elif findings:
        _print(findings, examined)
    else:
        click.echo(f"{examined} tensors: no shards are copies of each other")
    return exitcodes.FAILED if findings else exitcodes.OK


def _examine(path: Path) -> Iterator[dict[str, Any]]:
    command = [sys.executable, "-P", "-m", "opsd.trainer.duplicate_shards", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        raise click.ClickException(f"{path} could not be examined; the reason is above")


def _print(findings: list[dict[str, Any]], examined: int) -> None:
    table = Table("tensor", "split along", "shards", "copies of each other", "correlation", box=None)
    for finding in findings:
        copies = finding["copies"]
        more = f" and {len(copies) - NAMED} more" if len(copies) > NAMED else ""
        named = ", ".join(map(str, copies[:NAMED])) + more
        whole = "all" if len(copies) == finding["shards"] else named
        table.add_row(
            finding["tensor"], f"dimension {finding['dimension']}", str(finding["shards"]), whole,
            f"{finding['correlation']:.6g}",
        )  # fmt: skip
    output_console().print(table)
    click.echo(f"{len(findings)} of {examined} tensors hold copies; opsd runbook show tp_seed")
