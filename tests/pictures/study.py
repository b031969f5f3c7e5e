"""The study of docs/ablations.md that takes three decisions of SmolLM3 back, and the picture of its page."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.fakes.tree import ROOT
from tests.pictures.browser import PictureError, take
from tests.pictures.pages import smaller

FILE: Final = ROOT / "examples/smollm3-decisions.toml"
SIZE: Final = (1240, 1980)
LIMIT_S: Final = 3600.0


def pictures(folder: Path, target: Path) -> None:
    """Run the study in ``folder`` and write ablations.png to ``target``. Raises PictureError."""
    shutil.copytree(ROOT / "docs", folder / "text", ignore=shutil.ignore_patterns("pictures"))
    shutil.copy(FILE, folder)
    _run(folder, "opsd.trainer.data", "text", "--out", "shards")
    _run(folder, "opsd", "ablate", "run", FILE.name, "--local")
    draw(folder, target)


def draw(folder: Path, target: Path) -> None:
    """Write the picture of the study that has been run in ``folder``. Raises PictureError."""
    _run(folder, "opsd", "ablate", "report", FILE.name, "--html", "page.html")
    take((folder / "page.html").absolute().as_uri(), target / "ablations.png", SIZE, "light")
    smaller(target / "ablations.png")


def _run(folder: Path, *module: str) -> None:
    try:
        done = subprocess.run(
            [sys.executable, "-m", *module], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise PictureError(f"{' '.join(module)} was not done within {LIMIT_S:.0f} s") from None
    if done.returncode:
        raise PictureError(f"{' '.join(module)} failed: {done.stderr[-1000:]}")
