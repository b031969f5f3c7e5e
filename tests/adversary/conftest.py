"""What attackers meet: a root agent in act mode on a node of its own, and a user who may do nothing there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from opsd.simulated.gpus import NoCompilerError, SimulatedGpus, build
from tests.adversary.attacker import Attacker
from tests.adversary.node import Node


@pytest.fixture(autouse=True)
def _as_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: the attacks are those of another user")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The simulated driver library, built once."""
    try:
        return build(tmp_path_factory.mktemp("nvml"))
    except NoCompilerError as error:
        pytest.skip(str(error))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users reach, which pytest's own are not."""
    folder = Path(tempfile.mkdtemp(prefix="opsd-adversary-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)  # an attacker or the agent may still be about to end


@pytest.fixture
def node(open_folder: Path, library: Path) -> Iterator[Node]:
    """A node with two GPUs, whose agent a test starts with ``with node.agent():``."""
    with SimulatedGpus.create(open_folder / "gpus.state", count=2) as gpus:
        yield Node(open_folder, library, gpus)


@pytest.fixture
def attacker() -> Iterator[Attacker]:
    """An ordinary user."""
    try:
        attacker = Attacker()
    except LookupError as error:
        pytest.skip(str(error))
    yield attacker
    attacker.close()
