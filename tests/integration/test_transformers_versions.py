"""Models go in and out alike with the oldest and the newest transformers that pyproject.toml allows."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from opsd.commands.checkout import ROOT

TESTS = ("tests/unit/test_trainer_huggingface.py", "tests/unit/test_trainer_huggingface_refused.py")

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def allowed() -> str:
    """The requirement, such as ``transformers>=5.23,<6``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (found,) = (each for each in project["optional-dependencies"]["dev"] if each.startswith("transformers"))
    return str(found)


@pytest.mark.parametrize("which", ["oldest", "newest"])
def test_models_go_in_and_out(tmp_path: Path, which: str) -> None:
    """The tests of the installed version pass with it; without a package index they are skipped by name."""
    requirement = allowed()
    lower, _ = requirement.removeprefix("transformers>=").split(",")
    wanted = f"transformers=={lower}.*" if which == "oldest" else requirement
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tmp_path / "packages"), wanted]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{wanted} cannot be installed: {done.stderr.splitlines()[-1]}")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "packages")}
    words = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *TESTS]
    ran = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:]
