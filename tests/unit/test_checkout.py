"""Generated files never end up among installed modules."""

from __future__ import annotations

from pathlib import Path

import pytest

from opsd.commands.checkout import ROOT, folder
from opsd.commands.settings import BadConfig


def test_files_go_into_the_checkout_or_where_the_user_says(tmp_path: Path) -> None:
    """Without a checkout the user must say it."""
    assert folder("docs", None) == ROOT / "docs"
    assert folder("docs", tmp_path, root=tmp_path) == tmp_path
    with pytest.raises(BadConfig, match="name a folder with --out"):
        folder("docs", None, root=tmp_path)
