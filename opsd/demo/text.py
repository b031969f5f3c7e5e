"""Text that every machine has: the sources of Python's standard library and installed documentation."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

MIN_BYTES, MAX_BYTES = 2_000, 200_000


def copy_text(target: Path, limit: int) -> int:
    """Copy text files into ``target`` until ``limit`` bytes are reached; returns the bytes copied.

    The order is fixed, so that one machine always gives the same text. Raises OSError if ``target`` cannot
    be written.
    """
    target.mkdir(parents=True, exist_ok=True)
    total = 0
    for number, source in enumerate(_sources()):
        if total >= limit:
            break
        data = source.read_bytes()
        (target / f"{number:05d}-{source.name}.txt").write_bytes(data)
        total += len(data)
    return total


def _sources() -> Iterator[Path]:
    library = Path(sysconfig.get_path("stdlib"))
    for folder, pattern in ((library, "*.py"), (Path("/usr/share/doc"), "README*"), (Path("/usr/share/doc"), "*.txt")):
        for path in sorted(folder.rglob(pattern)):
            if "site-packages" in path.parts or "test" in path.parts or path.is_symlink():
                continue
            if path.is_file() and MIN_BYTES <= path.stat().st_size <= MAX_BYTES and _is_text(path):
                yield path


def _is_text(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return False
    return True
