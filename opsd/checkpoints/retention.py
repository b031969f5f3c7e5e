"""Which checkpoints may go, and how they go: file by file, by name, never a folder with what else is in it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from opsd.checkpoints.manifest import MANIFEST, CheckpointError, folder_of, read, steps, sync_folder

PRUNED = "manifest.json.pruned"


AWAITED = ("awaiting-upload", "awaiting-evaluation")
"""Names of files in the folder of a checkpoint that somebody still needs: it is kept while one is there."""


def reasons(root: Path, keep: int, every: int = 0) -> dict[int, str]:
    """Why each checkpoint under ``root`` is kept, oldest first; "" if it may go.

    Kept are the newest ``keep`` (at least 1), those of every ``every``-th step (0: of none), and those that are still
    awaited. Nothing goes while the newest is not there in full size, so that the last good one is never removed.
    """
    existing = steps(root)
    if existing and not _is_whole(folder_of(root, existing[-1])):
        return dict.fromkeys(existing, f"the newest, of step {existing[-1]}, is not whole")
    newest = existing[-max(keep, 1) :]
    return {step: "among the newest" if step in newest else _reason(folder_of(root, step), every) for step in existing}


def _reason(folder: Path, every: int) -> str:
    try:
        step = read(folder).step
    except CheckpointError:
        return "its manifest is damaged"
    if every and step % every == 0:
        return f"every {every} steps one is kept"
    return ", ".join(name.replace("-", " ") for name in AWAITED if (folder / name).exists())


def prune(root: Path, keep: int, every: int = 0) -> list[int]:
    """Remove checkpoints under ``root`` for which there are no ``reasons`` to stay, and return their steps.

    The manifest is renamed first, so that the checkpoint has ceased to exist before any of its files goes, then the
    files that it names are unlinked, then the folder if it is empty. Files that the manifest does not name stay.
    A removal that was interrupted is completed by the next call. Raises OSError.
    """
    removed = []
    for step in (step for step, reason in reasons(root, keep, every).items() if not reason):
        folder = folder_of(root, step)
        with suppress(FileNotFoundError):  # removed by another process just now
            os.rename(folder / MANIFEST, folder / PRUNED)
            removed.append(step)
    for record in root.glob(f"step-*/{PRUNED}"):
        _remove(record)
    return removed


def _is_whole(folder: Path) -> bool:
    try:
        return all((folder / entry.name).stat().st_size == entry.size for entry in read(folder).files)
    except (CheckpointError, OSError):
        return False


def _remove(record: Path) -> None:
    folder = record.parent
    sync_folder(folder)
    with suppress(CheckpointError):
        for entry in read(folder, record.name).files:
            (folder / entry.name).unlink(missing_ok=True)
    record.unlink(missing_ok=True)
    with suppress(OSError):  # something else lies in it
        folder.rmdir()
