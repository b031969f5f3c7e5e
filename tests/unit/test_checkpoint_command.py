"""opsd checkpoint: list, verify, prune and upload by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from opsd import exitcodes
from opsd.checkpoints import manifest
from opsd.checkpoints.manifest import MANIFEST
from opsd.checkpoints.retention import PRUNED
from tests.fakes.checkpoints import flip, make, run, swap_for_folder


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


def test_a_run_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by opsd report; what lies in the working directory comes first."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "opsd/runs/first/checkpoints", 10)
    assert " 10 " in run("list", "first").output
    make(tmp_path / "first/checkpoints", 20)
    assert " 20 " in run("list", "first").output
    assert "does not exist" in str(run("list", "second").exception)


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
    assert done.stderr == f"opsd: not all old checkpoints could be removed: {stuck}: Is a directory\n"


def test_a_part_of_a_save_that_failed_is_not_called_removed(tmp_path: Path) -> None:
    """Its writer may still be at work, so it stays for an hour."""
    for step in (10, 20):
        make(tmp_path, step)
    part = manifest.folder_of(tmp_path, 10) / f"rank-0001.0123abcd-1.{'0' * 32}.safetensors"
    part.write_bytes(bytes(5000))
    done = opsd("prune", tmp_path, "--keep", 1)
    assert part.exists()
    assert "  5 kB of a save that failed stay for 60 min" in done.stdout


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
