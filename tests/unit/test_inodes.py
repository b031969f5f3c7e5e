"""Looking at files and opening them, without entering what is mounted over them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from opsd.inodes import look, open_beside, open_folder
from tests.fakes.fuse import FUSE, silent_mount


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
