"""The ranks' environment and GPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from opsd.launch.ranks.process import launcher_mark
from opsd.launch.ranks.settings import (
    GENERATION_VARIABLES,
    RESTART_VARIABLES,
    Assignment,
    Program,
    Settings,
    flight_recorder,
    gpu_count,
    gpu_of,
    too_few_gpus,
)


def settings_of(local_size: int) -> Settings:
    """Those of the run r in job 77, with so many ranks on this node, n1."""
    program = Program("script", "/train.py", (), "python", Path("/"))
    return Settings(program, "r", "77", "n1", local_size, "id")


def test_environment_is_torchruns(tmp_path: Path) -> None:
    """A rank finds every variable that torchrun sets, and opsd's own."""
    place, settings = Assignment(0, 1, 0, 4, 4, "127.0.0.1", 29_501), settings_of(4)
    env = settings.environment(2, tmp_path, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}) | settings.generation_environment(
        place, 2, generation=3, restarts=1, error_file=tmp_path / "error.json", page=tmp_path / "page"
    )
    assert env == {
        "CUDA_VISIBLE_DEVICES": "4,5,6,7", "OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1", "ROLE_RANK": "2", "ROLE_WORLD_SIZE": "4", "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501", "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "8", "TORCHELASTIC_RUN_ID": "id", "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json"), "OPSD_RANK_PAGE": str(tmp_path / "page"),
        "OPSD_GENERATION": "3", "OPSD_RUN": "r", "OPSD_RUN_DIR": str(tmp_path), "OPSD_JOB": "77", "OPSD_NODE": "n1",
        "OPSD_GPU": "6", "OPSD_AUDIT": "refuse", "OPSD_LAUNCHER": launcher_mark(), **flight_recorder(tmp_path, {}),
    }  # fmt: skip


def test_what_a_generation_tells_is_known(tmp_path: Path) -> None:
    """A standby on a spare node is told which variables it has yet to be told."""
    place = Assignment(0, 1, 0, 1, 1, "127.0.0.1", 29_501)
    env = settings_of(1).generation_environment(
        place, 0, generation=1, restarts=0, error_file=tmp_path / "error.json", page=tmp_path / "page"
    )
    assert env.keys() == GENERATION_VARIABLES > RESTART_VARIABLES


def test_ranks_know_of_a_terminal_that_shows_what_they_print(tmp_path: Path) -> None:
    """Their own stdout is none; the user's word wins."""
    shown = replace(settings_of(1), color=True)
    assert shown.environment(0, tmp_path, {})["OPSD_COLOR"] == "1"
    assert shown.environment(0, tmp_path, {"OPSD_COLOR": ""})["OPSD_COLOR"] == ""


def test_user_settings_win(tmp_path: Path) -> None:
    """What the user has set for the ranks is left alone."""
    env = settings_of(2).environment(0, tmp_path, {"OMP_NUM_THREADS": "7", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"})
    assert env["OMP_NUM_THREADS"] == "7"
    assert env["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "0"
    assert "TORCH_FR_BUFFER_SIZE" not in env, "torch would read it first"
    assert env["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "flight_recorder" / "rank_")
    assert env["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1", "older releases do not by themselves"


@pytest.mark.parametrize(
    ("visible", "local_rank", "gpu"),
    [("0,3", 1, 3), ("GPU-aa,GPU-bb", 0, None), ("", 0, None), ("2", 1, None), (None, 1, 1), (None, 2, None)],
)
def test_gpu_of_a_rank(tmp_path: Path, visible: str | None, local_rank: int, gpu: int | None) -> None:
    """The GPU comes from CUDA_VISIBLE_DEVICES, otherwise from the driver's list of two."""
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "driver/nvidia/gpus" / bus).mkdir(parents=True)
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpu_of(env, local_rank, str(tmp_path)) == gpu


def test_no_driver_no_gpus(tmp_path: Path) -> None:
    """A node without the driver has no GPUs."""
    assert gpu_count({}, str(tmp_path)) == 0


@pytest.mark.parametrize(("ranks", "visible", "said"), [(2, "0", True), (8, "0,1,2,3", True), (4, "0,1,2,3", False),
                                                        (2, "", False), (1, "0,1", False)])  # fmt: skip
def test_more_ranks_than_gpus_are_said(ranks: int, visible: str, said: bool) -> None:
    """A program without GPUs may have as many ranks as it likes."""
    assert bool(too_few_gpus(ranks, {"CUDA_VISIBLE_DEVICES": visible})) == said
