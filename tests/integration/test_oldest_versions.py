"""The oldest and newest releases of transformers and TRL that pyproject.toml allows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.fakes.tree import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


# Models go in and out alike with the oldest and the newest transformers that pyproject.toml allows.


TESTS = ("tests/unit/test_trainer_huggingface.py", "tests/unit/test_trainer_huggingface.py")


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


# Unchanged scripts of the oldest TRL that pyproject.toml allows, with the oldest transformers.


OF_THEIR_TIME = ("tokenizers>=0.22,<0.23", "huggingface_hub>=0.34,<1", "datasets>=4.7,<5")
"""Packages that the oldest transformers takes only in releases of its time."""

CHOSEN = "not distillation and (fills_its_page or evaluated)"


def oldest() -> list[str]:
    """``trl==0.18.*`` and ``transformers==4.56.*``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = (re.match(r"(\w+)>=(\d+\.\d+)", each) for each in project["optional-dependencies"]["posttrain"])
    return [f"{name[1]}=={name[2]}.*" for name in names if name]


def test_the_oldest_trl_runs_as_the_newest(tmp_path: Path) -> None:
    """The tests of the installed version pass with it; without a package index they are skipped by name."""
    packages, wanted = tmp_path / "packages", [*oldest(), *OF_THEIR_TIME]
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages), *wanted]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{wanted} cannot be installed: {done.stderr.splitlines()[-1]}")
    environment = os.environ | {"PYTHONPATH": str(packages)}
    words = ["-q", "-n", "0", "-p", "no:cacheprovider", "tests/integration/test_launch_trl.py", "-k", CHOSEN]
    command = [sys.executable, "-m", "pytest", *words, f"--basetemp={tmp_path / 'temporary'}"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:]
