"""Checkpoints as files: commit, verify, set aside, prune, and the command that shows them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from opsd import exitcodes
from opsd.checkpoints import manifest
from opsd.checkpoints.manifest import MANIFEST, REJECTED, CheckpointError, FileEntry, Manifest, Unreadable
from opsd.checkpoints.retention import PRUNED, prune
from opsd.checkpoints.sealed import seal
from opsd.commands.checkpoint import checkpoint


def make(root: Path, step: int, *, files: int = 2) -> Path:
    folder = manifest.folder_of(root, step)
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for rank in range(files):
        path = folder / f"rank-{rank:04d}.safetensors"
        path.write_bytes(f"{step} {rank} ".encode() * 50)
        entries.append(FileEntry(path.name, path.stat().st_size, manifest.checksum(path)))
    manifest.commit(folder, Manifest(step, step * 4, {"dp": files}, "digest", tuple(entries), "local", 1.7e9, "run"))
    return folder


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

folder = Path(sys.argv[1])
try:
    manifest.commit(folder, manifest.read(folder, manifest.REJECTED))
except PermissionError as error:
    sys.exit(error.filename)
"""


def test_a_commit_that_may_not_be_durable_is_taken_back(tmp_path: Path) -> None:
    """When the folders cannot be synced once the manifest is in place, the checkpoint does not exist: a save failed."""
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
    assert done.stderr == f"{folder.parent}\n"
    assert manifest.steps(folder.parent) == []
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


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)


def swap_for_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def edit(folder: Path, **changes: object) -> None:
    raw = json.loads((folder / MANIFEST).read_text())
    del raw["checksum"]
    (folder / MANIFEST).write_text(json.dumps(seal(raw | changes)))


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


def run(*arguments: object) -> Result:
    return CliRunner().invoke(checkpoint, [str(a) for a in arguments], standalone_mode=False)


def test_list_shows_every_state(tmp_path: Path) -> None:
    """The list has complete, rejected, damaged, incomplete and half removed checkpoints, oldest first."""
    root = tmp_path / "checkpoints"
    for step in (10, 20, 30, 40, 50):
        make(root, step)
    folder = {step: manifest.folder_of(root, step) for step in (10, 20, 30, 40, 50)}
    os.rename(folder[10] / MANIFEST, folder[10] / PRUNED)
    manifest.reject(folder[20])
    (folder[30] / MANIFEST).write_text("{")
    (folder[40] / MANIFEST).unlink()
    for path in (tmp_path, root):
        listed = json.loads(run("list", path, "--json").output)["checkpoints"]
        assert [(entry["step"], entry["state"]) for entry in listed] == [
            (10, "removed"), (20, "rejected"), (30, "damaged"), (40, "incomplete"), (50, "complete"),
        ]  # fmt: skip
    assert listed[-1]["manifest"]["sample"] == 200
    table = run("list", tmp_path).output.splitlines()
    assert len(table) == 6
    assert "dp2" in table[-1]


def test_prune_by_hand_follows_the_rules_of_the_trainer(tmp_path: Path) -> None:
    """A dry run says what would go and why the others stay, and the real one does just that."""
    root = tmp_path / "checkpoints"
    for step in (10, 20, 25, 30, 40):
        make(root, step)
    (manifest.folder_of(root, 10) / "awaiting-evaluation").touch()
    rules = (tmp_path, "--keep", 2, "--keep-every", 20)
    dry = run("prune", *rules, "--dry-run")
    assert [line.split(", ")[0] for line in dry.output.splitlines()] == [
        "step 10: kept: awaiting evaluation", "step 20: kept: every 20 steps one is kept",
        "step 25: would be removed", "step 30: kept: among the newest", "step 40: kept: among the newest",
    ]  # fmt: skip
    assert manifest.steps(root) == [10, 20, 25, 30, 40]
    assert "step 25: removed" in run("prune", *rules).output
    assert manifest.steps(root) == [10, 20, 30, 40]
    again = run("prune", *rules)
    assert again.return_value == exitcodes.OK
    assert "nothing to remove" in again.output


def test_prune_by_hand_counts_those_that_are_whole(tmp_path: Path) -> None:
    """With a file of the newest missing the one before is the last good one: it stays, and the reasons are said."""
    for step in (10, 20, 30):
        make(tmp_path, step)
    (manifest.folder_of(tmp_path, 30) / "rank-0001.safetensors").unlink()
    result = run("prune", tmp_path, "--keep", 1)
    assert "step 30: kept: rank-0001.safetensors is missing" in result.output
    assert "step 20: kept: among the newest" in result.output
    assert manifest.steps(tmp_path) == [20, 30]


def test_upload_by_hand(tmp_path: Path) -> None:
    """What the other place does not have is copied and verified; a dry run sends nothing."""
    root, there = tmp_path / "checkpoints", tmp_path / "there"
    make(root, 10)
    (make(root, 20) / "awaiting-upload").touch()
    assert "step 20: would be uploaded" in run("upload", tmp_path, there, "--dry-run").output
    assert manifest.steps(there) == []
    assert run("upload", tmp_path, f"file://{there}").return_value == exitcodes.OK
    assert manifest.verify(manifest.folder_of(there, 20)).tier == "remote"
    assert not (manifest.folder_of(root, 20) / "awaiting-upload").exists()
    (manifest.folder_of(root, 10) / "awaiting-upload").touch()
    assert run("upload", tmp_path, there).output == "step 10: already there\nstep 20: already there\n"
    assert not (manifest.folder_of(root, 10) / "awaiting-upload").exists()


def test_a_damaged_checkpoint_is_not_uploaded_and_the_others_are(tmp_path: Path) -> None:
    """What is wrong with it is said, and the exit code says that something was."""
    for step in (10, 20):
        make(tmp_path / "here", step)
    flip(manifest.folder_of(tmp_path / "here", 10) / "rank-0000.safetensors")
    done = opsd("upload", tmp_path / "here", tmp_path / "there")
    assert done.returncode == exitcodes.FAILED
    assert "step 10: CheckpointError: " in done.stderr
    assert "step 20: uploaded" in done.stdout
    assert manifest.steps(tmp_path / "there") == [20]


def opsd(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "opsd", "checkpoint", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("url", "sentence", "code"),
    [
        ("nosuch://x", "nosuch://x cannot be used", exitcodes.USAGE),
        ("file:///proc/nowhere", "opsd: file:///proc/nowhere: ", exitcodes.FAILED),
    ],
)
def test_an_upload_that_cannot_be_done_says_why(tmp_path: Path, url: str, sentence: str, code: int) -> None:
    """An unknown protocol or a storage that refuses is one sentence, and the checkpoint stays."""
    make(tmp_path, 10)
    done = opsd("upload", tmp_path, url)
    assert (done.returncode, sentence in done.stderr, "Traceback" in done.stderr) == (code, True, False)
    assert manifest.steps(tmp_path) == [10]


def test_a_file_that_cannot_be_removed_is_a_failure(tmp_path: Path) -> None:
    """And not a wrong command line: others may have been removed already."""
    for step in (10, 20):
        make(tmp_path, step)
    stuck = manifest.folder_of(tmp_path, 10) / "rank-0000.safetensors"
    swap_for_folder(stuck)
    done = opsd("prune", tmp_path, "--keep", 1)
    assert done.returncode == exitcodes.FAILED
    assert done.stderr == f"opsd: {stuck} could not be removed: Is a directory\n"


def test_list_of_nothing_says_so(tmp_path: Path) -> None:
    """A folder without checkpoints is not an empty table."""
    assert run("list", tmp_path).output == f"no checkpoints under {tmp_path}\n"


def test_verify_says_which_is_damaged(tmp_path: Path) -> None:
    """All checkpoints of a run, or one of them, are verified; a damaged one is named and decides the exit code."""
    for step in (10, 20):
        make(tmp_path, step)
    good = run("verify", tmp_path)
    assert good.return_value == exitcodes.OK
    assert good.output.count(": ok, 2 files") == 2
    flip(manifest.folder_of(tmp_path, 10) / "rank-0001.safetensors")
    bad = run("verify", tmp_path)
    assert bad.return_value == exitcodes.FAILED
    assert "step 10: DAMAGED" in bad.output
    assert "rank-0001.safetensors" in bad.output
    assert "step 20: ok" in bad.output
    assert run("verify", manifest.folder_of(tmp_path, 20)).return_value == exitcodes.OK
    assert run("verify", manifest.folder_of(tmp_path, 10)).return_value == exitcodes.FAILED


def test_verify_of_nothing_is_not_a_success(tmp_path: Path) -> None:
    """A folder without checkpoints fails the check."""
    result = run("verify", tmp_path)
    assert result.return_value == exitcodes.FAILED
    assert "no complete checkpoint" in result.output


@contextmanager
def meanwhile(action: Callable[[], object]) -> Iterator[None]:
    """``action`` is done by another thread, and must have been by the end of the block."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    yield
    thread.join(20)
    assert not thread.is_alive()


def test_a_checkpoint_that_is_removed_meanwhile_is_not_damaged(tmp_path: Path) -> None:
    """Neither to who verifies it, nor to who lists it: a trainer that goes on removes old ones at any moment."""
    folder = make(tmp_path, 10)
    entry, pipe = manifest.read(folder), folder / "rank-0000.safetensors"
    pipe.unlink()
    os.mkfifo(pipe)
    (folder / MANIFEST).unlink()
    manifest.commit(folder, replace(entry, files=(replace(entry.files[0], size=0),)))

    def prune_while_read() -> None:
        with open(pipe, "w"):  # is open once verify reads the file, after the manifest
            os.rename(folder / MANIFEST, folder / PRUNED)

    with meanwhile(prune_while_read):
        verified = run("verify", tmp_path)
    assert (verified.return_value, verified.output) == (exitcodes.OK, "step 10: removed meanwhile\n")


def test_a_checkpoint_that_goes_while_it_is_listed_is_not_damaged(tmp_path: Path) -> None:
    """Each is there or being removed, whenever the list looks."""
    folders = [make(tmp_path, step, files=1) for step in range(1, 200)]

    def remove_one_after_the_other() -> None:
        for folder in folders:
            os.rename(folder / MANIFEST, folder / PRUNED)

    with meanwhile(remove_one_after_the_other):
        listed = [json.loads(run("list", tmp_path, "--json").output)["checkpoints"] for _ in range(3)]
    assert {entry["state"] for entries in listed for entry in entries} <= {"complete", "removed"}


def test_a_list_goes_on_beside_a_trainer_that_writes(tmp_path: Path) -> None:
    """Drafts come and go while sizes are added up."""
    folder, stop = make(tmp_path, 10), threading.Event()

    def write_drafts() -> None:
        while not stop.is_set():
            for number in range(20):
                (folder / f"draft-{number}").touch()
            for number in range(20):
                (folder / f"draft-{number}").unlink()

    with meanwhile(write_drafts):
        try:
            assert all(run("list", tmp_path, "--json").return_value == exitcodes.OK for _ in range(100))
        finally:
            stop.set()
