"""The guides: Markdown files, one of each kind of incident and of each alert that only Prometheus can raise."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from opsd.runbooks import NAMES

FOLDER: Final = Path(__file__).parents[2] / "guides"
"""In the package when opsd is installed, a link to ``docs/runbooks`` in a checkout."""
SECTIONS: Final = ("Meaning", "Impact", "Diagnosis", "Mitigation", "What opsd does by itself")
"""The headings of a guide, in the order of the fields of ``Guide`` after its title."""


@dataclass(frozen=True, slots=True)
class Guide:
    """What the person on call is told. ``automatic`` says what opsd does by itself in each policy mode."""

    title: str
    meaning: str
    impact: str
    diagnosis: str
    mitigation: str
    automatic: str

    @classmethod
    def parse(cls, markdown: str) -> Guide:
        """A guide from its Markdown: the title, then the sections of ``SECTIONS`` in their order. Raises ValueError."""
        title, *sections = re.split(r"^## ", markdown.strip(), flags=re.MULTILINE)
        heads = tuple(section.partition("\n")[0].strip() for section in sections)
        if not title.startswith("# ") or heads != SECTIONS:
            raise ValueError(f"a guide has a title and the sections {', '.join(SECTIONS)}; this one has {heads}")
        return cls(title[2:].strip(), *(section.partition("\n")[2].strip() for section in sections))


def markdown(name: str) -> str:
    """The file of the guide ``name``. Raises OSError."""
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


@cache
def guides() -> dict[str, Guide]:
    """Every guide by its name: those of incidents in the order of their runbooks, then those of alerts."""
    files = {file.stem for file in FOLDER.glob("*.md")} - {"README"}
    return {name: Guide.parse(markdown(name)) for name in (*NAMES, *sorted(files - {*NAMES}))}
