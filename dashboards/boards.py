"""The Grafana boards: JSON that people edit in Grafana, export, and bring into order with ``make generate``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parent
NAMES: Final = ("cluster", "job", "node", "goodput", "incidents", "training", "preflight")
OF_GRAFANA: Final = ("id", "version")
"""Fields that Grafana adds to a board."""


def text_of(name: str) -> str:
    """The JSON of a board."""
    return (FOLDER / f"{name}.json").read_text(encoding="utf-8")


def in_order(exported: str) -> str:
    """What Grafana exported, as it stands in the repository: equal boards give equal text. Raises ValueError."""
    board: Mapping[str, Any] = json.loads(exported)
    kept = {key: value for key, value in board.items() if key not in OF_GRAFANA}
    return json.dumps(kept | {"editable": False}, indent=1, sort_keys=True) + "\n"
