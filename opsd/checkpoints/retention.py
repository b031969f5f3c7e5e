"""Which checkpoints may be removed, and their removal: file by file, by name, never a folder with unknown content."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from opsd.checkpoints.manifest import (
    MANIFEST,
    REJECTED,
    CheckpointError,
    Manifest,
    Unreadable,
    folder_of,
    folders,
    is_there,
    newest,
    read,
    steps,
)
from opsd.durable import DRAFT, FORGOTTEN_S, prove, rename, sync_folder

PRUNED = "manifest.json.pruned"

PART = re.compile(r"rank-(\d{4,})\.([0-9a-f]{8}-\d+)\.([0-9a-f]{32})\.safetensors")
"""The name of the file that a rank writes: its number, the save, and the checksum."""

NEWEST = "among the newest"
AWAITED = ("awaiting-upload", "awaiting-evaluation")
"""Marker files in a checkpoint's folder for its further uses: it is kept while one exists."""


def reasons(root: Path, keep: int, every: int = 0) -> dict[int, str]:
    """Why each checkpoint under ``root`` is kept, oldest first; "" if it may be removed. Raises OSError.

    The newest ``keep`` (at least 1) complete checkpoints and everything newer are kept, and those of every ``every``-th
    step (0: none). So are awaited ones, and those whose manifest does not list their files.
    """
    found, left = {}, max(keep, 1)
    for step in reversed(steps(root)):
        folder = folder_of(root, step)
        try:
            flaw = _flaw(folder, read(folder))
        except CheckpointError as error:
            found[step] = "its manifest " + ("cannot be read" if isinstance(error, Unreadable) else "is damaged")
            continue
        found[step] = (flaw or NEWEST) if left else _reason(folder, step, every)
        left -= bool(left and not flaw)
    return dict(sorted(found.items()))


def _flaw(folder: Path, manifest: Manifest) -> str:
    """Why the checkpoint is incomplete; "" if it is complete."""
    for entry in manifest.files:
        try:
            if (folder / entry.name).stat().st_size != entry.size:
                return f"{entry.name} has not its size"
        except FileNotFoundError:
            return f"{entry.name} is missing"
        except OSError:
            return f"{entry.name} cannot be seen"
    return ""


def _reason(folder: Path, step: int, every: int) -> str:
    if every and step % every == 0:
        return f"every {every} steps one is kept"
    return ", ".join(name.replace("-", " ") for name in AWAITED if is_there(folder, name))


def prune(root: Path, keep: int, every: int = 0) -> list[int]:
    """Remove checkpoints under ``root`` that have no ``reasons`` to stay, and return their steps.

    Nothing is removed unless the newest that stay are proved to outlive a power loss. The manifest is renamed first, so
    that the checkpoint no longer exists before its first file is removed. Then the files that it names are removed, and
    the folder if it is empty. The next call completes an interrupted removal. Files of failed saves are removed too,
    once they are an hour older than the newest checkpoint. Other files stay. A failure does not keep the others from
    being
    removed; the last one is raised at the end. Raises OSError.
    """
    removed, failure = [], None
    kept = reasons(root, keep, every)
    going = [step for step, reason in kept.items() if not reason]
    if going:
        for step in [step for step, reason in kept.items() if reason == NEWEST]:
            prove(folder_of(root, step) / MANIFEST)
        sync_folder(root)
    for step in going:
        folder = folder_of(root, step)
        try:
            rename(folder / MANIFEST, folder / PRUNED)
            removed.append(step)
        except FileNotFoundError:  # removed by another process just now
            pass
        except OSError as error:
            failure = error
    for _, folder in folders(root):
        try:
            _remove(folder)
        except OSError as error:
            failure = error
    try:
        _remove_left_behind(root)
    except OSError as error:
        failure = error
    if failure is not None:
        raise failure
    return removed


def _remove_left_behind(root: Path) -> None:
    """Remove what saves up to the newest checkpoint have left that were never committed, by their names."""
    if (last := newest(root)) is None:
        return
    before = (folder_of(root, last) / MANIFEST).lstat().st_mtime - FORGOTTEN_S
    for step, folder in folders(root):
        if step > last or is_there(folder, REJECTED) or is_there(folder, PRUNED):
            continue
        named: set[str] = set()
        if is_there(folder):
            try:
                named = {entry.name for entry in read(folder).files}
            except CheckpointError:
                continue
        for path in list(folder.iterdir()):
            is_ours = PART.fullmatch(path.name) or (path.name.startswith(".") and path.name.endswith(DRAFT))
            if is_ours and path.name not in named and path.lstat().st_mtime < before:
                path.unlink(missing_ok=True)
        if not named:
            with suppress(OSError):  # something lies in it
                folder.rmdir()


def _remove(folder: Path) -> None:
    """Complete a removal that was begun in ``folder``."""
    if not is_there(folder, PRUNED):
        return
    with suppress(CheckpointError):
        entries = read(folder, PRUNED).files
        sync_folder(folder)
        for entry in entries:
            (folder / entry.name).unlink(missing_ok=True)
        (folder / PRUNED).unlink(missing_ok=True)
        with suppress(OSError):  # something else lies in it
            folder.rmdir()
