"""Claims as tests make them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from opsd.checkpoints.claims import (
    FOLDER,
    Claim,
)


def claim_of(number: int, launcher: str = "n1 7", *, alone: bool = False, **plan: object) -> Claim:
    return Claim(number, "run, job 1.0", launcher, alone, plan)


def place_of(folder: Path, number: int) -> Path:
    return folder / FOLDER / f"{number:06d}.json"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / FOLDER).iterdir() if not path.name.startswith(".room"))


def run(*command: object) -> str:
    """What a command has printed; the test is skipped if it cannot be had or is not permitted."""
    try:
        done = subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"{command[0]} cannot be had here: {error}")
    return done.stdout.strip()
