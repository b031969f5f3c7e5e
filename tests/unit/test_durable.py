"""Files are replaced whole or not at all, and errors name them."""

from __future__ import annotations

import errno
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from tests.fakes.faults import Faults, calls

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
