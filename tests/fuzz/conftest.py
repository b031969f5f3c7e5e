"""Fixtures of the fuzz targets."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """An empty folder in memory, where writing thousands of files takes no time."""
    with tempfile.TemporaryDirectory(
        prefix="opsd-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None
    ) as name:
        yield Path(name)
