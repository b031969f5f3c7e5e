"""The trainer as a whole: it learns, ranks agree, and interrupted or not, the losses are the same bits."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from trainer_world import CONTEXT, STEPS, Run, make_small_corpus
from trainer_world import World as TrainerWorld

from opsd.checkpoints.manifest import folder_of, read, steps, verify
from opsd.rank_page import read_page, write_request
from opsd.trainer.config import load as load_config
from opsd.trainer.load import load
from opsd.trainer.model import Decoder
from opsd.trainer.regions import region_of
from opsd.trainer.settings import ParallelSettings
from opsd.trainer.world import World
from tests.fakes.clock import until

# The trainer as a whole, two ranks on gloo: it learns, and interrupted or not, the losses are the same bits.


def test_it_learns_and_says_how(undisturbed: Run) -> None:
    """The loss falls, and each step has one line with every number of it."""
    lines = undisturbed.metrics()
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    losses = [line["loss"] for line in lines]
    assert losses[0] == pytest.approx(math.log(401), abs=0.3)
    assert sum(losses[-5:]) / 5 < losses[0] - 0.5
    for line in lines:
        assert line["tokens"] == line["step"] * 4 * 32
        assert line["generation"] == 1
        assert 0 <= line["data_s"] + line["checkpoint_s"] <= line["step_s"]
        assert line["tokens_per_s"] == pytest.approx(4 * 32 / line["step_s"])
        assert line["mfu"] is None
        assert line["grad_norm"] > 0
    assert [line["lr"] for line in lines[:6]] == pytest.approx([3e-3 * f for f in (0.2, 0.4, 0.6, 0.8, 1, 1)])
    assert lines[-1]["lr"] == pytest.approx(3e-3 / 2)
    assert max(line["checkpoint_s"] for line in lines) > 0


def test_it_keeps_the_newest_checkpoints(undisturbed: Run) -> None:
    """At the end the newest three checkpoints are there, whole, and nothing else is."""
    kept = steps(undisturbed.checkpoints)
    assert kept[-1] == STEPS
    assert len(kept) <= 3
    for step in kept:
        manifest = verify(folder_of(undisturbed.checkpoints, step))
        assert (manifest.sample, manifest.layout, manifest.run) == (step * 4, {"dp": 2}, "test")
        assert len(list(folder_of(undisturbed.checkpoints, step).iterdir())) == 3
    assert len(list(undisturbed.checkpoints.iterdir())) == len(kept) + 1  # and the lock file


def test_pages_are_finished(undisturbed: Run) -> None:
    """A run that is done leaves pages that say so, with the last step and its checkpoint."""
    for rank in (0, 1):
        page = read_page(undisturbed.folder / f"rank-{rank:04d}.page")
        assert (page.state, page.committed_step, page.workers) == ("finished", STEPS, ())
        assert page.last_step is not None
        assert page.last_step.step == STEPS
        assert page.last_step.learning_rate == pytest.approx(3e-3 / 2)
        assert page.tokens == STEPS * 2 * 32
        assert all(page.last_step.phase(name) > 0 for name in ("forward", "backward", "optimizer", "collective"))


def test_it_says_what_it_has_drawn_from_each_source(undisturbed: Run) -> None:
    """At the start, at each checkpoint and at the end, from one rank."""
    told = undisturbed.events("data_mixture")
    assert [event["step"] for event in told] == sorted({event["step"] for event in told})
    assert (told[0]["step"], told[-1]["step"]) == (0, STEPS)
    assert all(sum(event["tokens"].values()) == event["step"] * 4 * 32 for event in told)
    assert max(told[-1]["epochs"].values()) > 0


def test_a_finished_run_has_nothing_to_do(stopped_at_20: Run) -> None:
    """Started again, a run that has all its steps says so, ends well at once and adds no line."""
    stopped_at_20.finish(run__steps=20)
    assert len(stopped_at_20.metrics()) == 20
    assert "all 20 steps are done" in stopped_at_20.log().read_text()


def test_resume_is_exact(stopped_at_20: Run, undisturbed: Run) -> None:
    """A run that was extended has the same losses, bit for bit, as one that was never interrupted."""
    stopped_at_20.finish()
    assert stopped_at_20.curve() == undisturbed.curve()
    event = stopped_at_20.events("checkpoint_loaded")[-1]
    assert (event["step"], event["tier"]) == (20, "local")
    assert 0 <= event["load_s"] < 60


def test_stop_request_saves_at_the_step_boundary(run: Run, undisturbed: Run) -> None:
    """Asked to stop, on any rank, the run saves the very step it is at and ends well; going on is exact."""
    world = run.start(checkpoint__every=1000)
    world.wait_for_step(7)
    write_request(world.pages[1], "checkpoint_and_stop")
    assert world.wait() == [0, 0]
    last = run.metrics()[-1]["step"]
    assert 7 <= last < STEPS
    assert steps(run.checkpoints) == [last]
    run.finish(checkpoint__every=1000)
    assert run.curve() == undisturbed.curve()
    assert run.events("checkpoint_loaded")[0]["step"] == last


@pytest.mark.parametrize("world", [1, 4])
def test_another_world_size_goes_on(stopped_at_20: Run, undisturbed: Run, world: int) -> None:
    """Resumed on fewer or more ranks, the run reads the same samples and its losses agree to rounding."""
    stopped_at_20.finish(world=world)
    ours, theirs = stopped_at_20.curve(), undisturbed.curve()
    assert ours.keys() == theirs.keys()
    for step in range(21, STEPS + 1):
        assert ours[step] == pytest.approx(theirs[step], rel=1e-3)
    assert read(folder_of(stopped_at_20.checkpoints, 40)).layout == {"dp": world}


def test_initial_values_do_not_depend_on_the_layout(tmp_path: Path, shards: Path) -> None:
    """One rank, two and four begin with the same bits in every parameter."""
    weights = []
    for world in (1, 2, 4):
        run = Run(tmp_path / str(world), shards)
        run.finish(world=world, run__steps=1, optimizer__lr=1e-300)  # a step too small to change a bit
        folder = folder_of(run.checkpoints, 1)
        settings = load_config(str(run.folder / "config.toml"), [f"data.shards={shards}"], {}).model
        state = {f"model.{name}": region_of(value) for name, value in Decoder(settings).named_parameters()}
        load(folder, read(folder), state)
        weights.append({name: region.local for name, region in state.items()})
    for other in weights[1:]:
        assert all(torch.equal(value, other[name]) for name, value in weights[0].items())
    embedding = weights[0]["model.embedding.weight"]
    assert embedding.std().item() == pytest.approx(0.02, rel=0.05)
    assert weights[0]["model.blocks.0.ffn.up.weight"].unique().numel() > 50 * 36 * 0.9


def test_half_precision_compute_keeps_full_precision_state(run: Run, undisturbed: Run) -> None:
    """With model.dtype bfloat16 the losses are close, and a run goes on exactly like one that was not interrupted."""
    run.finish(model__dtype="bfloat16", run__steps=6)
    for step, (loss, _) in run.curve().items():
        assert loss == pytest.approx(undisturbed.curve()[step][0], rel=0.02)
    run.finish(model__dtype="bfloat16", run__steps=12)
    whole = Run(run.folder.with_name("whole"), run.shards)
    whole.finish(model__dtype="bfloat16", run__steps=12)
    assert run.curve() == whole.curve()


@pytest.mark.slow
@pytest.mark.parametrize("program", [("opsd.trainer",), ("opsd", "train")])
def test_the_command_alone(tmp_path: Path, shards: Path, program: tuple[str, ...]) -> None:
    """`python -m opsd.trainer tiny` runs without any launcher, as the only rank; `opsd train tiny` brings one."""
    settings = {"data.shards": shards, "run.steps": 2, "run.folder": tmp_path, "data.batch": 2, "data.prefetch": 1}
    command = [sys.executable, "-m", *program, "tiny", *(f"--set={k}={v}" for k, v in settings.items())]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OPSD_")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert steps(tmp_path / "checkpoints") == [2]


# What the ranks agree on while one of them is busy for longer than a collective may last.


LIMIT_S = 4.0

BUSY_S = 6.0


def rank_main(rank: int, folder: Path) -> None:
    """Hear from the first rank what it knows only after ``BUSY_S``, with collectives that end after ``LIMIT_S``."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    world = World(rank, 2, torch.device("cpu"), init_device_mesh("cpu", (2,)), ParallelSettings())
    world.least(0)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=LIMIT_S))
    known_at = time.monotonic() + BUSY_S
    heard = world.once_first_has(lambda: 42 if time.monotonic() > known_at else None)
    (folder / str(rank)).write_text(str(heard))


@pytest.mark.long
def test_waiting_for_the_first_rank_runs_into_no_time_limit(tmp_path: Path) -> None:
    """All ranks hear what it took the first one longer to find out than a collective may last."""
    ranks = [CONTEXT.Process(target=rank_main, args=(rank, tmp_path), name=f"trainer rank {rank}") for rank in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=120)
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == ["42", "42"]


# A mixture of sources in the real trainer: whatever the number of ranks, it trains on the same samples.


STAGES = "[{start = 1, weights = {a = 0.75, b = 0.25}}, {start = 13, weights = {b = 1.0}}]"

MIXED_STEPS = 16


def finish(run: Run, world: int, **settings: object) -> None:
    codes = run.start(world=world, data__stages=STAGES, **settings).wait()
    assert codes == [0] * world, run.log().read_text()


def test_mixtures_survive_another_world_size(tmp_path: Path) -> None:
    """Gone on with on one rank from the middle of a block, a mixture gives the losses of an undisturbed run."""
    for name in ("a", "b"):
        make_small_corpus(tmp_path / "shards" / name)
    whole, broken = (Run(tmp_path / name, tmp_path / "shards") for name in ("whole", "broken"))
    finish(whole, 2, run__steps=MIXED_STEPS)
    finish(broken, 2, run__steps=15)
    finish(broken, 1, run__steps=MIXED_STEPS)
    assert broken.curve().keys() == whole.curve().keys()
    for step, (loss, _) in whole.curve().items():
        assert broken.curve()[step][0] == pytest.approx(loss, rel=1e-3)


def test_a_skipped_batch_is_not_trained_on(tmp_path: Path) -> None:
    """With steps 3 to 5 in the skip list, step 3 trains on what would have been the batch of step 6."""
    shards = make_small_corpus(tmp_path / "shards")
    plain, skipping = (Run(tmp_path / name, shards) for name in ("plain", "skipping"))
    frozen = {"run__steps": 6, "optimizer__lr": 1e-300}  # the model stays what it was, so the loss tells the batch
    for run, more in ((plain, {}), (skipping, {"data__skip": "[[3, 5]]"})):
        assert run.start(world=1, **frozen, **more).wait() == [0], run.log().read_text()
    batches = {step: loss for step, (loss, _) in plain.curve().items()}
    trained = {step: loss for step, (loss, _) in skipping.curve().items()}
    assert (trained[1], trained[2], trained[3]) == (batches[1], batches[2], batches[6])
    assert trained[4] not in batches.values()


# The end of a run that has something to wait for: it is seen to wait, and a stop does not wait long.


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a storage that refuses its first client, that of the start, and lets all others wait."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: server.accept()[0].close(), daemon=True).start()
        yield f"ftp://127.0.0.1:{server.getsockname()[1]}/run"


def changed(world: TrainerWorld) -> float:
    page = world.page(0)
    assert page is not None
    return page.changed


@pytest.mark.slow
def test_an_upload_is_waited_for_visibly_and_not_by_a_run_that_is_to_stop(run: Run, silent: str) -> None:
    """The page changes while the last upload is on its way; asked to stop, the run ends well and leaves it behind."""
    world = run.start("--fresh", world=1, run__steps=5, checkpoint__remote=silent)

    def waits() -> bool:
        page = world.page(0)
        return page is not None and page.committed_step == 5 and page.phase == "checkpoint"

    until(waits)
    before = time.monotonic()
    until(lambda: changed(world) > before)
    write_request(world.pages[0], "checkpoint_and_stop")
    assert world.wait() == [0], run.log().read_text()
    assert not run.events("checkpoint_upload_failed")  # it has neither been waited for nor given up
    assert list(run.checkpoints.glob("*/awaiting-upload"))


def test_evaluations_do_not_hold_up_a_stop(run: Run) -> None:
    """A run that is asked to stop while it waits for an evaluation ends that too, and ends well."""
    world = run.start(world=1, run__steps=5, evaluation__harness="true {model}", evaluation__queue="sleep 1000")
    waiting = until(lambda: (page := world.page(0)) is not None and page.phase == "evaluation" and page)
    assert waiting.committed_step == 5
    write_request(world.pages[0], "checkpoint_and_stop")
    assert world.wait() == [0], run.log().read_text()
    assert list(run.checkpoints.glob("*/awaiting-evaluation"))
