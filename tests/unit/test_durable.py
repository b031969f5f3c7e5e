"""Files are replaced whole or not at all, and errors name them."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from opsd.commands.checkout import ROOT
from tests.fakes.faults import Faults, calls

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
