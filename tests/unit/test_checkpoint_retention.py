"""Removing checkpoints: what is kept, and what a removal touches."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from opsd.checkpoints import manifest
from opsd.checkpoints.manifest import MANIFEST
from opsd.checkpoints.retention import PRUNED, prune
from tests.fakes.checkpoints import make


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    """Only the newest stay, and the folders of the others go with them."""
    for step in (10, 20, 30, 40):
        make(tmp_path, step)
    assert prune(tmp_path, 2) == [10, 20]
    assert manifest.steps(tmp_path) == [30, 40]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000000030", "step-000000000040"]
    assert prune(tmp_path, 2) == []


def test_prune_never_removes_the_last(tmp_path: Path) -> None:
    """Even when told to keep none, the newest checkpoint stays."""
    make(tmp_path, 10)
    assert prune(tmp_path, 0) == []
    assert manifest.steps(tmp_path) == [10]


def test_prune_touches_only_what_the_manifest_names(tmp_path: Path) -> None:
    """A file that somebody put into a checkpoint folder stays, and so does the folder."""
    folder = make(tmp_path, 10)
    make(tmp_path, 20)
    (folder / "evaluation.json").write_text("{}")
    prune(tmp_path, 1)
    assert [path.name for path in folder.iterdir()] == ["evaluation.json"]


def test_prune_leaves_damaged_and_rejected_ones_alone(tmp_path: Path) -> None:
    """What cannot be read says nothing about what may be deleted; what was set aside waits for its post-mortem."""
    torn, rejected = make(tmp_path, 10), make(tmp_path, 20)
    (torn / MANIFEST).write_text("{")
    manifest.reject(rejected)
    make(tmp_path, 30)
    assert prune(tmp_path, 1) == []
    assert len(list(torn.iterdir())) == len(list(rejected.iterdir())) == 3


def test_an_interrupted_removal_is_completed(tmp_path: Path) -> None:
    """A checkpoint whose removal was cut short does not exist, and the next prune finishes it."""
    folder = make(tmp_path, 10)
    make(tmp_path, 20)
    os.rename(folder / MANIFEST, folder / PRUNED)
    (folder / "rank-0000.safetensors").unlink()
    assert manifest.steps(tmp_path) == [20]
    prune(tmp_path, 1)
    assert not folder.exists()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """A manifest that names a link removes the link, not what it points to."""
    folder = make(tmp_path / "c", 10)
    make(tmp_path / "c", 20)
    precious = tmp_path / "precious"
    shutil.copy(folder / "rank-0000.safetensors", precious)
    (folder / "rank-0000.safetensors").unlink()
    (folder / "rank-0000.safetensors").symlink_to(precious)
    prune(tmp_path / "c", 1)
    assert precious.exists()


def test_what_failed_saves_have_left_goes_after_an_hour(tmp_path: Path) -> None:
    """Parts and drafts by their names, up to the newest checkpoint; what may still be written stays."""
    old, young = tmp_path / "step-000000000010", tmp_path / "step-000000000015"
    newer = tmp_path / "step-000000000030"
    rejected = make(tmp_path, 12)
    (rejected / MANIFEST).rename(rejected / manifest.REJECTED)
    newest = make(tmp_path, 20)
    part = f"rank-0000.0000002a-1.{'0' * 32}.safetensors"
    for folder in (old, young, newer):
        folder.mkdir()
        (folder / part).touch()
    (old / ".rank-0001.0000002a-1.draft").touch()
    (rejected / part).touch()
    (newest / part).touch()
    (newest / "notes.txt").touch()
    for path in (*old.iterdir(), *newer.iterdir(), newest / part, newest / "notes.txt", rejected / part):
        os.utime(path, (0, 0))
    assert prune(tmp_path, 5) == []
    assert not old.exists()
    assert [(folder / part).exists() for folder in (young, newer, rejected, newest)] == [True, True, True, False]
    assert (newest / "notes.txt").exists()
    assert manifest.verify(newest).step == 20
