"""The checkout, and small trees of files that stand for sysfs or procfs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]


def write_tree(root: Path, files: Mapping[str, str | int]) -> Path:
    """Write each text to its path below ``root``, with the line end that the kernel gives. Returns ``root``."""
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return root
