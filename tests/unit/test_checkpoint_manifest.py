"""Checkpoints as files: commit, verify, set aside, prune, and the command that shows them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opsd.checkpoints import manifest
from opsd.checkpoints.manifest import MANIFEST, REJECTED, CheckpointError, Unreadable
from tests.fakes.checkpoints import edit, flip, make, swap_for_folder


def test_a_commit_is_read_back(tmp_path: Path) -> None:
    """What is committed is read back equal, verifies, and leaves no draft behind."""
    folder = make(tmp_path, 20)
    read = manifest.verify(folder)
    assert (read.step, read.sample, read.layout, read.run) == (20, 80, {"dp": 2}, "run")
    assert manifest.read(folder) == read
    assert sorted(path.name for path in folder.iterdir()) == [
        MANIFEST, "rank-0000.safetensors", "rank-0001.safetensors",
    ]  # fmt: skip


def test_a_checkpoint_exists_with_its_manifest(tmp_path: Path) -> None:
    """Folders without a manifest and other files are not checkpoints; a missing root has none."""
    assert manifest.steps(tmp_path / "none") == []
    for step in (40, 20):
        make(tmp_path, step)
    (make(tmp_path, 60) / MANIFEST).unlink()
    (tmp_path / "notes").mkdir()
    assert manifest.steps(tmp_path) == [20, 40]


def test_a_commit_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """When the manifest cannot be put in place the checkpoint does not exist and no draft stays."""
    folder = make(tmp_path, 20)
    entry = manifest.read(folder)
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).mkdir()  # a rename of a file onto a folder fails
    with pytest.raises(OSError):
        manifest.commit(folder, entry)
    assert not any(path.name.startswith(".") for path in folder.iterdir())


COMMIT = """
import sys
from pathlib import Path

from opsd.checkpoints import manifest
from opsd.durable import Unproved

folder = Path(sys.argv[1])
try:
    manifest.commit(folder, manifest.read(folder, manifest.REJECTED))
except Unproved as error:
    sys.exit(error.filename)
"""


def test_a_commit_that_may_not_be_durable_is_not_undone(tmp_path: Path) -> None:
    """If the folders cannot be synced once the manifest is in place, the checkpoint exists, since others may use it."""
    folder = make(tmp_path / "checkpoints", 20)
    manifest.reject(folder)
    # A folder that may not be listed cannot be synced; root needs to drop the right to do so nevertheless.
    drop = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    folder.parent.chmod(0o300)
    try:
        done = subprocess.run(
            [*drop, sys.executable, "-c", COMMIT, folder], capture_output=True, text=True, timeout=60, check=False
        )
    finally:
        folder.parent.chmod(0o700)
    assert done.stderr == f"{folder}\n"
    assert manifest.steps(folder.parent) == [20]
    manifest.prove(folder)
    manifest.verify(folder)
    assert not any(path.name.startswith(".") for path in folder.iterdir())


DAMAGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "bit": (lambda f: flip(f / "rank-0001.safetensors"), "rank-0001.safetensors", "does not match its checksum"),
    "short": (lambda f: os.truncate(f / "rank-0000.safetensors", 9), "rank-0000.safetensors", "has 9 bytes"),
    "gone": (lambda f: (f / "rank-0001.safetensors").unlink(), "rank-0001.safetensors", "is missing"),
    "folder": (lambda f: swap_for_folder(f / "rank-0000.safetensors"), "rank-0000.safetensors", ""),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), MANIFEST, "was never completed"),
    "torn manifest": (lambda f: os.truncate(f / MANIFEST, 40), MANIFEST, "is no JSON"),
    "not a manifest": (lambda f: (f / MANIFEST).write_text('{"format": 1}'), MANIFEST, "lacks field"),
    "a list": (lambda f: (f / MANIFEST).write_text("[]"), MANIFEST, "is a JSON list"),
    "newer format": (lambda f: edit(f, format=9), MANIFEST, "has format 9"),
    "points elsewhere": (
        lambda f: edit(f, files=[{"name": "../x", "size": 1, "checksum": ""}]), MANIFEST, "names the file '../x'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_named(tmp_path: Path, damage: str) -> None:
    """Every kind of damage is refused in a sentence, with the file that is wrong."""
    inflict, file, text = DAMAGES[damage]
    folder = make(tmp_path, 20)
    inflict(folder)
    with pytest.raises(CheckpointError) as error:
        manifest.verify(folder)
    assert error.value.file == file
    assert text in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["", "rank-0001.safetensors"])
def test_a_failing_storage_is_no_damage(tmp_path: Path, name: str) -> None:
    """What cannot be read is told apart from what is wrong, be it the whole folder or a file."""
    folder = make(tmp_path, 20)
    (folder / name).rename(tmp_path / "away")
    (folder / name).symlink_to((folder / name).name)  # ELOOP, as good as any other error
    with pytest.raises(Unreadable, match="cannot be read: Too many levels of symbolic links"):
        manifest.verify(folder)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_is_found(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """There is no bit in a file that can flip unnoticed."""
    folder = make(tmp_path_factory.mktemp("c"), 20)
    path = folder / "rank-0000.safetensors"
    content = bytearray(path.read_bytes())
    bit = data.draw(st.integers(0, len(content) * 8 - 1))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    with pytest.raises(CheckpointError):
        manifest.verify(folder)


def test_verification_can_be_shared(tmp_path: Path) -> None:
    """Of several readers that each check a part, exactly one finds a damaged file."""
    folder = make(tmp_path, 20, files=5)
    flip(folder / "rank-0003.safetensors")
    found = []
    for part in range(3):
        try:
            manifest.verify(folder, part, 3)
        except CheckpointError as error:
            found.append((part, error.file))
    assert found == [(0, "rank-0003.safetensors")]


def test_a_rejected_checkpoint_keeps_its_files(tmp_path: Path) -> None:
    """Setting aside ends its existence and deletes nothing; the manifest can still be read."""
    folder = make(tmp_path, 20)
    before = {path.name for path in folder.iterdir()}
    manifest.reject(folder)
    assert manifest.steps(tmp_path) == []
    assert {path.name for path in folder.iterdir()} == before - {MANIFEST} | {REJECTED}
    assert manifest.read(folder, REJECTED).step == 20
