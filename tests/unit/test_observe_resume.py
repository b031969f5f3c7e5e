"""Which step a restarted program goes on from."""

from __future__ import annotations

import os
import time
from pathlib import Path

from opsd.launch.observe.observer import KEPT, SavedSteps


def save(saved: SavedSteps, path: Path, step: int, content: bytes = b"weights") -> None:
    path.write_bytes(content)
    saved.note(str(path), len(content), step)


def test_the_step_of_the_checkpoint_that_is_loaded(tmp_path: Path) -> None:
    """A later process of the rank counts on from there."""
    save(SavedSteps(str(tmp_path), 1), tmp_path / "a.pt", 9)
    later = SavedSteps(str(tmp_path), 1)
    later.loaded(str(tmp_path / "a.pt"))
    assert later.next_step == 10


def test_rank_0_saves_for_all(tmp_path: Path) -> None:
    """A rank that has saved nothing itself knows what rank 0 has."""
    save(SavedSteps(str(tmp_path), 0), tmp_path / "a.pt", 9)
    other = SavedSteps(str(tmp_path), 5)
    other.loaded(str(tmp_path / "a.pt"))
    assert other.next_step == 10


def test_a_file_that_was_renamed_is_known(tmp_path: Path) -> None:
    """Careful programs save beside the old checkpoint and put it in its place then."""
    saved = SavedSteps(str(tmp_path), 0)
    save(saved, tmp_path / "new", 4)
    (tmp_path / "new").rename(tmp_path / "a.pt")
    later = SavedSteps(str(tmp_path), 0)
    later.loaded(str(tmp_path / "a.pt"))
    assert later.next_step == 5


def test_a_file_that_was_made_in_memory_is_known_by_its_size(tmp_path: Path) -> None:
    """Of buffers of one size, the file was the last before it was written; other sizes are other things."""
    saved = SavedSteps(str(tmp_path), 0)
    now = time.time()
    saved.note(None, 7, 9)
    (tmp_path / "a.ckpt").write_bytes(b"weights")
    os.utime(tmp_path / "a.ckpt", (now, now))
    assert resumed(tmp_path, "a.ckpt") == 10
    saved.note(None, 7, 19)
    (tmp_path / "b.ckpt").write_bytes(b"weights")
    assert resumed(tmp_path, "b.ckpt") == 20
    (tmp_path / "c.ckpt").write_bytes(b"other weights")
    assert resumed(tmp_path, "c.ckpt") == 1
    os.utime(tmp_path / "b.ckpt", (now - 60, now - 60))
    assert resumed(tmp_path, "b.ckpt") == 1, "older than all that was saved"


def resumed(folder: Path, name: str) -> int:
    """The next step of a process that loads a file."""
    later = SavedSteps(str(folder), 0)
    later.loaded(str(folder / name))
    return later.next_step


def test_a_path_that_was_written_again_has_its_newest_step(tmp_path: Path) -> None:
    """One checkpoint that is always overwritten."""
    saved = SavedSteps(str(tmp_path), 0)
    for step in (9, 19, 29):
        save(saved, tmp_path / "a.pt", step)
    later = SavedSteps(str(tmp_path), 0)
    later.loaded(str(tmp_path / "a.pt"))
    assert later.next_step == 30


def test_a_file_of_nobody_is_no_checkpoint(tmp_path: Path) -> None:
    """Pretrained weights, or data: the steps begin at 1."""
    save(SavedSteps(str(tmp_path), 0), tmp_path / "a.pt", 9)
    (tmp_path / "base.pt").write_bytes(b"pretrained")
    later = SavedSteps(str(tmp_path), 0)
    later.loaded(str(tmp_path / "base.pt"))
    later.loaded(str(tmp_path / "missing.pt"))
    assert later.next_step == 1


def test_the_optimizers_own_count_where_no_file_is_known(tmp_path: Path) -> None:
    """A checkpoint of another run, or in a form that is not hooked; a file of this run knows better."""
    save(SavedSteps(str(tmp_path), 0), tmp_path / "a.pt", 9)
    later = SavedSteps(str(tmp_path), 0)
    later.counted(7)
    assert later.next_step == 8
    later.loaded(str(tmp_path / "a.pt"))
    assert later.next_step == 10


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    """A run of thousands of checkpoints leaves a small file, and a damaged one is as good as none."""
    saved = SavedSteps(str(tmp_path), 0)
    for step in range(3 * KEPT):
        save(saved, tmp_path / f"{step}.pt", step, str(step).encode() * 40)
    (file,) = (tmp_path / "observed").iterdir()
    assert file.stat().st_size < 200 * KEPT
    file.write_text("[[1], 2, {")
    later = SavedSteps(str(tmp_path), 0)
    later.loaded(str(tmp_path / "47.pt"))
    assert later.next_step == 1


def test_a_run_without_a_folder_counts_from_1(tmp_path: Path) -> None:
    """Nothing is written then."""
    saved = SavedSteps(None, 0)
    save(saved, tmp_path / "a.pt", 9)
    saved.loaded(str(tmp_path / "a.pt"))
    assert saved.next_step == 1
