"""Files are replaced whole or not at all, and opened without entering what is mounted over them."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from opsd import durable
from opsd.checkpoints.claims import put
from opsd.durable import draft_of
from opsd.inodes import look, open_beside, open_folder
from tests.fakes.power_loss import Faults, calls
from tests.fakes.tree import FUSE, ROOT, silent_mount

# Files are replaced whole or not at all, and errors name them.


ELSEWHERE = {
    "opsd/chaos/undo.py": "changes one byte in place",
    "opsd/checkpoints/remote.py": "syncs what a library has downloaded",
    "opsd/spares/transfer.py": "goes on with a part of a copy",
    "trainer/parts.py": "writes around the page cache, into space that was reserved",
}
"""Modules that sync a file themselves, and why ``opsd.durable`` cannot do it for them."""

REPLACE = """
import sys
from pathlib import Path

from opsd.durable import replace

try:
    replace(Path(sys.argv[1]), b"new")
except OSError as error:
    print(type(error).__name__, error.filename)
"""


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    """Whichever call fails, the file has its old or its new content, nothing lies beside it, and the error names it."""
    path, faults = tmp_path / "folder/file", Faults(tmp_path / "folder", log=tmp_path / "calls")
    path.parent.mkdir()

    def run(faults: Faults) -> str:
        path.write_bytes(b"old")
        return subprocess.run(
            [sys.executable, "-c", REPLACE, path], env=faults.environment, capture_output=True, text=True, check=True
        ).stdout

    assert run(faults) == ""
    count = len(calls(tmp_path / "calls"))
    assert count >= 5
    for number in range(1, count + 1):
        told = run(replace(faults, first=number, error=errno.EIO))
        assert path.read_bytes() == (b"new" if told.startswith("Unproved") else b"old")
        assert str(path.parent) in told
        assert list(path.parent.iterdir()) == [path]


def test_files_are_made_durable_in_one_module() -> None:
    """But for those whose content comes about in another way."""
    paths = [path for room in ("opsd", "trainer", "collectors", "runbooks") for path in (ROOT / room).rglob("*.py")]
    syncing = [path for path in paths if re.search(r"os\.(fsync|fdatasync)\(", path.read_text(encoding="utf-8"))]
    assert {str(path.relative_to(ROOT)) for path in syncing} == {"opsd/durable.py", *ELSEWHERE}


def test_a_rename_that_fails_tells_its_own_error(tmp_path: Path) -> None:
    """Also if the target does not exist, which is found out when the target is looked at."""
    faults = Faults(tmp_path / "folder", calls="rename", first=1, error=errno.ENOSPC)
    faults.folder.mkdir()
    told = subprocess.run(
        [sys.executable, "-c", REPLACE, faults.folder / "file"],
        env=faults.environment, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert told.startswith("OSError")
    assert list(faults.folder.iterdir()) == []


def test_the_draft_of_a_killed_process_goes_with_the_next_write(tmp_path: Path) -> None:
    """That of a living one stays, and so does that of another machine, until it is old."""
    killed = Faults(tmp_path, calls="rename", first=1, kill=True)
    path = tmp_path / "file"
    subprocess.run([sys.executable, "-c", REPLACE, path], env=killed.environment, check=False)
    (dead,) = tmp_path.iterdir()
    living, elsewhere = draft_of(path), tmp_path / re.sub(r"file\.[0-9a-f]{8}", "file.00000000", dead.name)
    for draft in (living, elsewhere):
        draft.touch()
    durable.replace(path, b"new")
    assert {*tmp_path.iterdir()} == {path, living, elsewhere}
    for draft in (living, elsewhere):
        os.utime(draft, (0, 0))
    durable.replace(path, b"newer")
    assert [*tmp_path.iterdir()] == [path]


def test_an_error_names_the_file_and_not_its_draft(tmp_path: Path) -> None:
    """Whichever call met it; a link to nothing is no folder."""
    faults = Faults(tmp_path / "folder", calls="open", first=1)
    faults.folder.mkdir()
    told = subprocess.run(
        [sys.executable, "-c", REPLACE, faults.folder / "file"],
        env=faults.environment, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert told == f"OSError {faults.folder / 'file'}\n"
    (tmp_path / "link").symlink_to(tmp_path / "none")
    with pytest.raises(NotADirectoryError, match="a link to nothing"):
        durable.make_folder(tmp_path / "link")


def test_a_draft_of_a_claim_that_could_not_be_removed_goes_later(tmp_path: Path) -> None:
    """Once it is an hour older than a new claim; other files stay."""
    draft = tmp_path / f".n1.{8 * '0f'}"
    for path in (draft, tmp_path / ".room"):
        path.touch()
    assert put(b"{}", tmp_path / "000001.json")
    assert draft.exists()
    for path in (draft, tmp_path / ".room"):
        os.utime(path, (0, 0))
    assert put(b"{}", tmp_path / "000002.json")
    assert {path.name for path in tmp_path.iterdir()} == {".room", "000001.json", "000002.json"}


def test_a_line_is_appended_whole_or_not_at_all(tmp_path: Path) -> None:
    """Half of one, of a crash or a full disk, would spoil the next."""
    path = tmp_path / "lines"
    path.write_bytes(b"one\nhal")
    durable.append(path, b"two\n")
    assert path.read_bytes() == b"one\nhal\ntwo\n"
    with pytest.raises(OSError, match="No space left") as raised:
        durable.append(path, b"three\n", lambda descriptor, content: os.write(descriptor, content[:2]))
    assert raised.value.filename == str(path)
    durable.append(path, b"four\n")
    assert path.read_bytes() == b"one\nhal\ntwo\nfour\n"


# Looking at files and opening them, without entering what is mounted over them.


def test_it_tells_what_stat_tells(tmp_path: Path) -> None:
    """Owner, kind, time of change and device."""
    (tmp_path / "link").symlink_to("/dev/zero")
    os.utime(tmp_path, (1, 1_700_000_000.25))
    for path, follow in ((tmp_path, True), (tmp_path / "link", False), (tmp_path / "link", True)):
        found, known = look(path, follow=follow), path.stat() if follow else path.lstat()
        assert found[:3] == (known.st_mode, known.st_uid, pytest.approx(known.st_mtime, abs=1e-6))
        assert found.device == (os.major(known.st_rdev), os.minor(known.st_rdev))
    with pytest.raises(FileNotFoundError):
        look(tmp_path / "gone")


def test_files_and_folders_are_opened_beside_one_another(tmp_path: Path) -> None:
    """But no link is followed."""
    (tmp_path / "file").write_text("content")
    (tmp_path / "link").symlink_to("file")
    folder = open_folder(tmp_path)
    try:
        with open(open_beside("file", folder, os.O_RDONLY)) as file:
            assert file.read() == "content"
        with pytest.raises(OSError) as caught:
            open_beside("link", folder, os.O_RDONLY)
        assert caught.value.errno == errno.ELOOP
    finally:
        os.close(folder)


@pytest.mark.skipif(os.geteuid() != 0 or not FUSE.exists(), reason="needs root and FUSE for a mount")
@pytest.mark.parametrize("name", ["file", "folder"])
def test_what_is_mounted_there_is_not_opened(tmp_path: Path, name: str) -> None:
    """Nor waited for: its server never answers."""
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    beside = look(tmp_path / "file").mount
    folder = open_folder(tmp_path)
    try:
        with silent_mount(tmp_path / name):
            assert look(tmp_path / name).mount != beside
            with pytest.raises(OSError) as caught:
                open_beside(name, folder, os.O_RDONLY)
            assert caught.value.errno == errno.EXDEV
    finally:
        os.close(folder)
