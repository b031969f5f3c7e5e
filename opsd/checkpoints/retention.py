"""Which checkpoints may go, and how they go: file by file, by name, never a folder with what else is in it."""

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
    sync_folder,
)

PRUNED = "manifest.json.pruned"


AWAITED = ("awaiting-upload", "awaiting-evaluation")
"""Names of files in the folder of a checkpoint that somebody still needs: it is kept while one is there."""


def reasons(root: Path, keep: int, every: int = 0) -> dict[int, str]:
    """Why each checkpoint under ``root`` is kept, oldest first; "" if it may go. Raises OSError.

    Kept are the newest ``keep`` (at least 1) that are there in full size and what is newer than those, those of every
    ``every``-th step (0: of none), those that are still awaited, and those whose manifest does not say what is theirs.
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
    """What keeps the checkpoint from being whole; "" if nothing does."""
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
    """Remove checkpoints under ``root`` for which there are no ``reasons`` to stay, and return their steps.

    The manifest is renamed first, so that the checkpoint has ceased to exist before any of its files goes, then the
    files that it names are unlinked, then the folder if it is empty. Files that the manifest does not name stay.
    A removal that was interrupted is completed by the next call. One that fails does not keep the others from it: what
    it met is raised at the end, of several the last. Raises OSError.
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
    """Complete the removal of the checkpoint in ``folder`` if one was begun."""
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
