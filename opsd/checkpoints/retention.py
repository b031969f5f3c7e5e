"""Which checkpoints may go, and how they go: file by file, by name, never a folder with what else is in it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from opsd.checkpoints.manifest import MANIFEST, CheckpointError, folder_of, read, steps, sync_folder

PRUNED = "manifest.json.pruned"


def prune(root: Path, keep: int) -> list[int]:
    """Remove all checkpoints under ``root`` but the newest ``keep`` (at least 1) and return the steps removed.

    The manifest is renamed first, so that the checkpoint has ceased to exist before any of its files goes, then the
    files that it names are unlinked, then the folder if it is empty. Files that the manifest does not name stay.
    A removal that was interrupted is completed by the next call. Raises OSError.
    """
    removed = []
    for step in steps(root)[: -max(keep, 1)]:
        folder = folder_of(root, step)
        with suppress(CheckpointError, FileNotFoundError):  # damaged, or removed by another process just now
            read(folder)
            os.rename(folder / MANIFEST, folder / PRUNED)
            removed.append(step)
    for record in root.glob(f"step-*/{PRUNED}"):
        _remove(record)
    return removed


def _remove(record: Path) -> None:
    folder = record.parent
    sync_folder(folder)
    with suppress(CheckpointError):
        for entry in read(folder, record.name).files:
            (folder / entry.name).unlink(missing_ok=True)
    record.unlink(missing_ok=True)
    with suppress(OSError):  # something else lies in it
        folder.rmdir()
