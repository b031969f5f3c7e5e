"""Small file systems in memory, for disks that are full or read-only."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[Path]:
    """Mount one at ``folder``, with ``options`` of mount(8). The test is skipped where that is not permitted."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
