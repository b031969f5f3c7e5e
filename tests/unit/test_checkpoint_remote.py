"""Checkpoints on other storage: uploaded and read back, fetched and verified, and storage that refuses or hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem

from opsd.checkpoints.manifest import (
    MANIFEST,
    CheckpointError,
    folder_of,
    read,
    reject,
    steps,
    verify,
)
from opsd.checkpoints.remote import AWAITING, Remote, RemoteError, fetch_newer, upload_waiting, without_user
from opsd.checkpoints.retention import prune
from opsd.client import events_path
from opsd.trainer.saving import finish_uploads
from tests.fakes.checkpoints import make


def make_waiting(root: Path, step: int) -> Path:
    folder = make(root, step, files=1)
    (folder / AWAITING).touch()
    return folder


class Damaging(LocalFileSystem):
    """A storage that keeps something else than it was given."""

    protocol = "objects"

    def put_file(self, path1: str, path2: str, *arguments: object, **more: object) -> None:
        super().put_file(path1, path2)
        with open(path2, "ab") as file:
            file.write(b"!")


class Refusing(LocalFileSystem):
    """A storage whose credentials have expired."""

    protocol = "objects"

    def put_file(self, *arguments: object, **more: object) -> None:
        raise PermissionError("the token has expired")


def test_a_checkpoint_goes_there_and_back(tmp_path: Path) -> None:
    """Uploaded, lost here and fetched, a checkpoint is the same; its manifest says where it came from."""
    remote = Remote(LocalFileSystem(), str(tmp_path / "bucket"))
    for step in (10, 20):
        make_waiting(tmp_path / "here", step)
    assert remote.steps() == []
    assert list(upload_waiting(tmp_path / "here", remote)) == [10, 20]
    assert remote.steps() == [10, 20]
    assert not list((tmp_path / "here").glob(f"*/{AWAITING}"))
    assert fetch_newer(tmp_path / "there", remote, 10) == 20
    assert fetch_newer(tmp_path / "there", remote, 20) is None
    manifest = verify(folder_of(tmp_path / "there", 20))
    assert manifest.tier == "remote"
    assert manifest.files == read(folder_of(tmp_path / "here", 20)).files


@pytest.mark.parametrize(("storage", "error"), [(Damaging, CheckpointError), (Refusing, PermissionError)])
def test_the_local_copy_stays_until_the_upload_is_verified(
    tmp_path: Path, storage: type[LocalFileSystem], error: type[Exception]
) -> None:
    """After a refused or damaged upload the checkpoint does not exist there, and retention keeps it here."""
    for step in (10, 20, 30):
        make_waiting(tmp_path / "here", step)
    remote = Remote(storage(), str(tmp_path / "bucket"))
    with pytest.raises(error):
        list(upload_waiting(tmp_path / "here", remote))
    assert remote.steps() == []
    assert prune(tmp_path / "here", keep=1) == []
    assert list(upload_waiting(tmp_path / "here", Remote(LocalFileSystem(), str(tmp_path / "bucket")))) == [10, 20, 30]
    assert prune(tmp_path / "here", keep=1) == [10, 20]
    assert steps(tmp_path / "here") == [30]


def test_a_damaged_remote_copy_gives_way_to_an_older(tmp_path: Path) -> None:
    """Fetching verifies, falls back step by step, and says what is wrong if nothing is whole."""
    remote = Remote(LocalFileSystem(), str(tmp_path / "bucket"))
    for step in (10, 20):
        make_waiting(tmp_path / "here", step)
    assert list(upload_waiting(tmp_path / "here", remote)) == [10, 20]
    os.truncate(folder_of(tmp_path / "bucket", 20) / "rank-0000.safetensors", 5)
    assert fetch_newer(tmp_path / "there", remote, -1) == 10
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        fetch_newer(tmp_path / "there", remote, 10)
    assert steps(tmp_path / "there") == [10]


def test_what_was_set_aside_outlives_the_fetch(tmp_path: Path) -> None:
    """The damaged file of a rejected checkpoint is kept under another name beside the one that replaces it."""
    remote = Remote(LocalFileSystem(), str(tmp_path / "bucket"))
    folder = make_waiting(tmp_path / "here", 10)
    assert list(upload_waiting(tmp_path / "here", remote)) == [10]
    (folder / "rank-0000.safetensors").write_bytes(b"damaged")
    reject(folder)
    assert fetch_newer(tmp_path / "here", remote, -1) == 10
    verify(folder)
    assert (folder / "rank-0000.safetensors.rejected").read_bytes() == b"damaged"


def test_a_fetch_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    """A file that is here and whole is not asked for again."""
    remote = Remote(LocalFileSystem(), str(tmp_path / "bucket"))
    folder = make_waiting(tmp_path / "here", 10)
    assert list(upload_waiting(tmp_path / "here", remote)) == [10]
    (folder / MANIFEST).unlink()
    (folder_of(tmp_path / "bucket", 10) / "rank-0000.safetensors").unlink()
    assert fetch_newer(tmp_path / "here", remote, -1) == 10
    verify(folder)


def transfer(tmp_path: Path, url: str, *arguments: str | Path) -> tuple[int, str]:
    page = {"OPSD_RANK_PAGE": str(tmp_path / "rank-0000.page"), "OPSD_REMOTE": url}
    command = [sys.executable, "-m", "opsd.checkpoints.remote", *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | page, capture_output=True, text=True, timeout=90, check=False)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout


def events(tmp_path: Path) -> list[dict[str, object]]:
    path = events_path(tmp_path / "rank-0000.page")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_the_program_tells_what_it_did(tmp_path: Path) -> None:
    """Transfers are told as events of the rank."""
    make_waiting(tmp_path / "here", 10)
    url = f"file://{tmp_path}/bucket"
    assert transfer(tmp_path, url, "upload", tmp_path / "here") == (0, "10\n")
    assert transfer(tmp_path, url, "fetch", tmp_path / "there", "-1") == (0, "10\n")
    assert transfer(tmp_path, url, "fetch", tmp_path / "there", "10") == (0, "")
    assert [event["event"] for event in events(tmp_path)] == ["checkpoint_uploaded", "checkpoint_fetched"]


def test_a_damaged_checkpoint_does_not_keep_the_others_from_the_storage(tmp_path: Path) -> None:
    """One that differs from its manifest is told, each time, and the later ones are uploaded nevertheless."""
    for step in (10, 20, 30):
        make_waiting(tmp_path / "here", step)
    os.truncate(folder_of(tmp_path / "here", 10) / "rank-0000.safetensors", 5)
    assert transfer(tmp_path, f"file://{tmp_path}/bucket", "upload", tmp_path / "here") == (1, "20\n30\n")
    told = events(tmp_path)
    assert [event.get("step") for event in told] == [20, 30, None]
    assert told[-1]["event"] == "checkpoint_upload_failed"
    assert "step-000000000010/rank-0000.safetensors is not what was uploaded" in str(told[-1]["why"])
    assert [path.parent.name for path in (tmp_path / "here").glob(f"*/{AWAITING}")] == ["step-000000000010"]


HANGING = """
import sys, threading
from fsspec import register_implementation
from fsspec.implementations.local import LocalFileSystem
from opsd.checkpoints import remote

class Hanging(LocalFileSystem):
    protocol = "hanging"
    def put_file(self, *arguments, **more):
        threading.Event().wait()

register_implementation("hanging", Hanging)
sys.exit(remote.main(sys.argv[1:]))
"""


def test_a_storage_that_hangs_is_given_up(tmp_path: Path) -> None:
    """A call that never returns ends with the time limit, a sentence, and the checkpoint still waiting."""
    folder = make_waiting(tmp_path / "here", 10)
    page = {"OPSD_RANK_PAGE": str(tmp_path / "rank-0000.page"), "OPSD_TRANSFER_LIMIT_S": "1"}
    page["OPSD_REMOTE"] = f"hanging://{tmp_path}/bucket"
    command = [sys.executable, "-c", HANGING, "upload", tmp_path / "here"]
    done = subprocess.run(command, env=os.environ | page, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 1
    (event,) = events(tmp_path)
    assert event["event"] == "checkpoint_upload_failed"
    assert "did not answer in time" in str(event["why"])
    assert (folder / AWAITING).exists()


def test_a_storage_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    """A URL of an unknown kind is one sentence and an event."""
    make_waiting(tmp_path / "here", 10)
    assert transfer(tmp_path, "tape://archive/run", "upload", tmp_path / "here")[0] == 1
    assert "tape://archive/run" in str(events(tmp_path)[0]["why"])


def test_a_password_is_told_to_nobody(tmp_path: Path) -> None:
    """Neither in the event nor in what is printed, also where the client puts the URL into its message."""
    make_waiting(tmp_path / "here", 10)
    url = "tape://user:password@archive/run"
    assert transfer(tmp_path, url, "upload", tmp_path / "here")[0] == 1
    (event,) = events(tmp_path)
    assert "tape://archive/run cannot be used" in str(event["why"])
    assert "password" not in str(event)
    with pytest.raises(RemoteError) as refused:
        Remote.open(url)
    assert "password" not in str(refused.value)
    assert without_user("s3://bucket/a@b ftp://h/x sftp://u@h/y") == "s3://bucket/a@b ftp://h/x sftp://h/y"


def test_retention_keeps_what_it_must(tmp_path: Path) -> None:
    """The newest K that are whole and every Nth stay; what is newer than those and not whole does not count."""
    for step in range(10, 80, 10):
        make(tmp_path, step, files=1)
    newest = folder_of(tmp_path, 70) / "rank-0000.safetensors"
    content = newest.read_bytes()
    newest.write_bytes(content[:9])
    (folder_of(tmp_path, 20) / "awaiting-evaluation").touch()
    assert prune(tmp_path, keep=2, every=30) == [10, 40]
    newest.write_bytes(content)
    assert prune(tmp_path, keep=2, every=30) == [50]
    assert steps(tmp_path) == [20, 30, 60, 70]


def test_a_finished_run_uploads_what_waits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The storage was full at its end. A copy that fails again stays marked, and the message says what to do."""
    waiting = make(tmp_path / "checkpoints", 8) / AWAITING
    waiting.touch()
    (tmp_path / "full").write_text("")
    finish_uploads(tmp_path / "checkpoints", f"file://{tmp_path}/full")
    assert "the next start of the run tries again" in capfd.readouterr().err
    assert waiting.exists()
    finish_uploads(tmp_path / "checkpoints", f"file://{tmp_path}/room")
    assert not waiting.exists()
    assert verify(folder_of(tmp_path / "room", 8)).step == 8
