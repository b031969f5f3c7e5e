"""The guides of alerts that no agent can raise as an incident: Prometheus raises them from many nodes, or from silence.

Like those of runbooks they are shown by ``opsd runbook show NAME`` and at ``/runbooks/NAME`` of any agent. Each is a
file of ``docs/runbooks``, written by hand; those of runbooks are made from the runbook and lie beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from opsd.runbooks import RUNBOOKS
from opsd.runbooks.base import Guide

FOLDER: Final = Path(__file__).parents[1] / "guides"
"""Next to this package when opsd is installed, a link to ``docs/runbooks`` in a checkout."""


def _guides(folder: Path) -> Mapping[str, Guide]:
    made = {"README", *(book.kind for book in RUNBOOKS)}
    files = [file for file in sorted(folder.glob("*.md")) if file.stem not in made]
    return {file.stem: Guide.parse(file.read_text(encoding="utf-8")) for file in files}


GUIDES: Final = _guides(FOLDER)
"""By the alert's name in snake case."""
