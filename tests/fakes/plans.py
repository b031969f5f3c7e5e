"""Runs to make plans of."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from opsd.plan.source import read
from opsd.trainer.config import Config
from tests.fakes.published import CONFIGS


def run_of(name: str, *overrides: str, tokens: float = 1e12) -> Config:
    """A preset, or one of the published models."""
    if name not in CONFIGS:
        return read(name, overrides, None, None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(CONFIGS[name]), encoding="utf-8")
        return read(str(path), overrides, tokens, None)
