"""Which checkpoints may go, and how they go: file by file, by name, never a folder with what else is in it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from opsd.checkpoints.manifest import MANIFEST, CheckpointError, folder_of, read, steps, sync_folder

PRUNED = "manifest.json.pruned"


AWAITED = ("awaiting-upload", "awaiting-evaluation")
"""Names of empty files in the folder of a checkpoint that somebody still needs: it is kept while one is there."""


def prune(root: Path, keep: int, every: int = 0) -> list[int]:
    """Remove checkpoints under ``root`` and return their steps.

    Kept are the newest ``keep`` (at least 1), those of every ``every``-th step (0: of none), and those that are still
    awaited. Nothing goes while the newest is not there in full size, so that the last good one is never removed.

    The manifest is renamed first, so that the checkpoint has ceased to exist before any of its files goes, then the
    files that it names are unlinked, then the folder if it is empty. Files that the manifest does not name stay.
    A removal that was interrupted is completed by the next call. Raises OSError.
    """
    removed = []
    existing = steps(root)
    if not existing or not _is_whole(folder_of(root, existing[-1])):
        return []
    for step in existing[: -max(keep, 1)]:
        if every and step % every == 0:
            continue
        folder = folder_of(root, step)
        if any((folder / name).exists() for name in AWAITED):
            continue
        with suppress(CheckpointError, FileNotFoundError):  # damaged, or removed by another process just now
            read(folder)
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
