"""What the tests with real parts share: runs of the trainer, made once a process when a test asks for them."""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from trainer_world import Run, make_small_corpus

from opsd.checkpoints.manifest import steps
from opsd.simulated.gpus import NoCompilerError, build
from tests.fakes.transport import NET, Launcher, Launchers


@pytest.fixture(autouse=True)
def _no_rank_outlives_its_test() -> Iterator[None]:
    """Ranks that a failed test has left behind would slow down all tests after it."""
    yield
    for process in multiprocessing.active_children():
        if process.name.startswith("trainer rank"):
            process.kill()
            process.join()


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The simulated driver library, built once."""
    try:
        return str(build(tmp_path_factory.mktemp("nvml")))
    except NoCompilerError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus."""
    return make_small_corpus(tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Run:
    """A run of ``STEPS`` steps that nothing happened to."""
    run = Run(tmp_path_factory.mktemp("undisturbed"), shards)
    run.finish()
    return run


@pytest.fixture
def run(tmp_path: Path, shards: Path) -> Run:
    """A run that has not been started."""
    return Run(tmp_path / "run", shards)


@pytest.fixture(scope="session")
def half_done(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Run:
    """A run that ended after 15 and again after 20 steps, with a checkpoint of each."""
    run = Run(tmp_path_factory.mktemp("half") / "run", shards)
    for last in (15, 20):
        run.finish(run__steps=last)
    assert steps(run.checkpoints)[-2:] == [15, 20]
    return run


@pytest.fixture
def stopped_at_20(run: Run, half_done: Run) -> Run:
    """A copy of ``half_done`` to go on with."""
    shutil.copytree(half_done.folder, run.folder)
    run.generation = half_done.generation
    return run


@pytest.fixture
def launchers() -> Iterator[Launchers]:
    launchers = Launchers(lambda number: f"127.{NET}.2.{number}")
    yield launchers
    launchers.close()


@pytest.fixture
def pair(launchers: Launchers) -> tuple[Launcher, Launcher]:
    one, two = launchers.start(1), launchers.start(2)
    one.send(two)
    launchers.until(lambda: two.heard)
    return one, two
