"""How the trainer hands its evaluations on: to a process that is no rank, and none gets lost between two starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from opsd.checkpoints.manifest import Manifest, commit, folder_of
from opsd.client import Reporter, events_path
from opsd.evaluations.queue import AWAITING, RESULTS, SUBMITTED, Queue, without_rank_variables
from opsd.launch.ranks.settings import Assignment, Program, Settings
from opsd.trainer.config import load
from opsd.trainer.evaluations import queue_of


def test_an_evaluation_is_no_rank() -> None:
    """Nothing of what the launcher gives to its ranks alone is left but its mark, by which it finds what they began."""
    base = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "OPSD_CONFIG": "/etc/opsd.toml", "HOME": "/home/a"}
    kept = dict.fromkeys(("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT", "OMP_NUM_THREADS"), "1")
    kept["TORCH_FR_BUFFER_SIZE"] = "2000"
    settings = Settings(Program("module", "train", (), "python", Path("/r")), "r", "1", "n1", 2, "r", evaluation="{}")
    fixed = settings.environment(0, Path("/r"), base)
    changing = settings.generation_environment(
        Assignment(0, 2, 0, 2, 4, "n1", 29500), 0, generation=3, restarts=2, error_file=Path("/e"), page=Path("/p")
    )
    assert without_rank_variables({**fixed, **changing}) == base | kept | {"OPSD_LAUNCHER": fixed["OPSD_LAUNCHER"]}


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """That of a checkpoint of step 20 which waits for its evaluation."""
    folder = folder_of(tmp_path / "checkpoints", 20)
    folder.mkdir(parents=True)
    commit(folder, Manifest(20, 80, {"dp": 1}, "", (), "local", 0.0))
    (folder / AWAITING).touch()
    return folder / AWAITING


def begin(folder: Path, queue: str = "{command}") -> Queue:
    """Another start of the run."""
    config = load("tiny", ["data.shards=/data", f"evaluation.queue={json.dumps(queue)}"], {})
    return queue_of(config, folder, Reporter(folder / "page"))


def events(folder: Path) -> list[dict[str, Any]]:
    path = events_path(folder / "page")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize(
    ("refuses", "how"), [("false", "false ended with status 1"), ("/none", "/none: No such file or directory")]
)
def test_what_a_queue_refused_is_told_and_handed_in_by_the_next_start(
    tmp_path: Path, mark: Path, refuses: str, how: str
) -> None:
    """Once it has been taken, a later start does not hand it in again."""
    begin(tmp_path, refuses).close()
    (event,) = events(tmp_path)
    assert (event["step"], event["results"]) == (20, {})
    assert event["why"].startswith(how)
    hand_in = f"sh -c 'echo taken >> {tmp_path}/queue'"
    for _ in range(2):
        begin(tmp_path, hand_in).close()
    assert (tmp_path / "queue").read_text() == "taken\n"
    assert mark.read_text() == SUBMITTED
    assert len(events(tmp_path)) == 1


def test_an_evaluation_that_was_done_has_no_mark(tmp_path: Path, mark: Path) -> None:
    """What the evaluation has taken away does not come back, or the checkpoint would stay for ever."""
    begin(tmp_path, f"rm {mark}").close()
    assert not mark.exists()


def test_results_that_came_between_two_starts_are_told(tmp_path: Path) -> None:
    """Each once; lines that two writers have mixed up are passed over."""
    begin(tmp_path).close()
    good = '{"t": 1.0, "step": 20, "results": {"held_loss": 3.5}}\n'
    (tmp_path / RESULTS).write_text(f'{{"t": 1.0, "ste{good}\0\0{good}{good}')
    for _ in range(2):
        begin(tmp_path).close()
    (event,) = events(tmp_path)
    assert (event["step"], event["results"]) == (20, {"held_loss": 3.5})
