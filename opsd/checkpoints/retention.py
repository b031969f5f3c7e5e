"""Which checkpoints may be removed, and their removal: file by file, by name, never a folder with unknown content."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from opsd.checkpoints.manifest import (
    MANIFEST,
    CheckpointError,
    Manifest,
    Unreadable,
    folder_of,
    folders,
    is_there,
    read,
    steps,
)
from opsd.durable import sync_folder

PRUNED = "manifest.json.pruned"


AWAITED = ("awaiting-upload", "awaiting-evaluation")
"""Marker files in a checkpoint's folder for its further uses: it is kept while one exists."""


def reasons(root: Path, keep: int, every: int = 0) -> dict[int, str]:
    """Why each checkpoint under ``root`` is kept, oldest first; "" if it may be removed. Raises OSError.

    Kept are the newest ``keep`` (at least 1) complete ones and everything newer, those of every ``every``-th step (0:
    none), those that are awaited, and those whose manifest does not tell which files are theirs.
    """
    found, left = {}, max(keep, 1)
    for step in reversed(steps(root)):
        folder = folder_of(root, step)
        try:
            flaw = _flaw(folder, read(folder))
        except CheckpointError as error:
            found[step] = "its manifest " + ("cannot be read" if isinstance(error, Unreadable) else "is damaged")
            continue
        found[step] = (flaw or "among the newest") if left else _reason(folder, step, every)
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

    The manifest is renamed first, so that the checkpoint no longer exists before its first file is removed; then the
    files that it names are removed, then the folder if it is empty. Other files stay. The next call completes an
    interrupted removal. A failure does not keep the others from being removed; the last one is raised at the end.
    Raises OSError.
    """
    removed, failure = [], None
    for step in (step for step, reason in reasons(root, keep, every).items() if not reason):
        folder = folder_of(root, step)
        try:
            os.rename(folder / MANIFEST, folder / PRUNED)
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
    if failure is not None:
        raise failure
    return removed


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
