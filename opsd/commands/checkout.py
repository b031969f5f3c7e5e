"""Where generated files belong: into the checkout, or where the user says if opsd was installed from a wheel."""

from __future__ import annotations

from pathlib import Path

from opsd.commands.settings import BadConfig

ROOT = Path(__file__).parents[2]


def folder(name: str, chosen: Path | None, root: Path = ROOT) -> Path:
    """``chosen``, else the folder ``name`` of the checkout. Raises BadConfig where there is no checkout."""
    if chosen is not None:
        return chosen
    if not (root / "pyproject.toml").exists():
        raise BadConfig("this opsd is installed and no checkout; name a folder with --out")
    return root / name
