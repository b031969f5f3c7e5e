"""Build the boards. Grafana loads the JSON beside the builders; a test checks that it is current."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from opsd.dashboards import cluster, goodput, incidents, job, node, preflight, training
from opsd.dashboards.kit import to_json

BOARDS = (cluster, job, node, goodput, incidents, training, preflight)
FOLDER = Path(__file__).parent


def rendered(folder: Path = FOLDER) -> Iterator[tuple[Path, str]]:
    """File and content of every board."""
    for module in BOARDS:
        yield folder / f"{module.__name__.rpartition('.')[2]}.json", to_json(module.build())


def write(folder: Path) -> list[Path]:
    """Write every board; returns the files that changed. Raises OSError if the folder cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    changed = []
    for path, text in rendered(folder):
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            changed.append(path)
    return changed


def outdated() -> list[Path]:
    """Files of boards whose JSON differs from what the builder makes."""
    return [path for path, text in rendered() if not path.exists() or path.read_text(encoding="utf-8") != text]
