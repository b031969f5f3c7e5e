"""The trainer as a whole, two ranks on gloo: it learns, and whatever happens to it, the losses are the same bits."""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from trainer_world import Run, eventually, make_small_corpus

from opsd.checkpoints.manifest import MANIFEST, REJECTED, folder_of, read, steps, verify
from opsd.client import process_state, read_page, write_request
from trainer.config import load as load_config
from trainer.model import Decoder
from trainer.regions import region_of
from trainer.restore import load

STEPS = 40


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small_corpus(tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Run:
    """A run of 40 steps that nothing happened to."""
    run = Run(tmp_path_factory.mktemp("undisturbed"), shards)
    assert run.start().wait() == [0, 0], run.log().read_text()
    return run


@pytest.fixture
def run(tmp_path: Path, shards: Path) -> Run:
    return Run(tmp_path / "run", shards)


@pytest.fixture(scope="session")
def half_done(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Run:
    """A run that ended after 15 and again after 20 steps, with a checkpoint of each."""
    run = Run(tmp_path_factory.mktemp("half") / "run", shards)
    for last in (15, 20):
        assert run.start(run__steps=last).wait() == [0, 0], run.log().read_text()
    assert steps(run.checkpoints)[-2:] == [15, 20]
    return run


@pytest.fixture
def stopped_at_20(run: Run, half_done: Run) -> Run:
    """A copy of ``half_done`` to go on with."""
    shutil.copytree(half_done.folder, run.folder)
    run.generation = half_done.generation
    return run


def finish(run: Run, *arguments: str, world: int = 2, **settings: object) -> None:
    assert run.start(*arguments, world=world, **settings).wait() == [0] * world, run.log().read_text()


def refused(run: Run, *arguments: str, **settings: object) -> tuple[int | None, str]:
    """Exit code and last line of a start that must not work.

    A rank that is not ready to refuse when another one does ends with the lost connection to that one.
    """
    for log in run.folder.glob("rank-*.log"):
        log.unlink()
    codes = run.start(*arguments, **settings).wait()
    refusing = max(range(len(codes)), key=lambda rank: codes[rank] or 0)
    assert {codes[refusing], 1} >= set(codes)
    text = run.log(refusing).read_text()
    assert "Traceback" not in text, text
    return codes[refusing], text.splitlines()[-1]


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
    """At the start and at each checkpoint, from one rank."""
    told = undisturbed.events("data_mixture")
    assert [event["step"] for event in told] == sorted({event["step"] for event in told})
    assert told[0]["step"] == 0
    assert all(sum(event["tokens"].values()) == event["step"] * 4 * 32 for event in told)
    assert max(told[-1]["epochs"].values()) > 0


def test_a_finished_run_has_nothing_to_do(stopped_at_20: Run) -> None:
    """Started again, a run that has all its steps ends well at once and adds no line."""
    finish(stopped_at_20, run__steps=20)
    assert len(stopped_at_20.metrics()) == 20


def test_resume_is_exact(stopped_at_20: Run, undisturbed: Run) -> None:
    """A run that was extended has the same losses, bit for bit, as one that was never interrupted."""
    finish(stopped_at_20)
    assert stopped_at_20.curve() == undisturbed.curve()
    event = stopped_at_20.events("checkpoint_loaded")[-1]
    assert (event["step"], event["tier"]) == (20, "local")
    assert 0 <= event["load_s"] < 60


def kill_and_resume(run: Run, kills: int, rng: random.Random) -> None:
    """Kill a rank at ``kills`` random moments, its peers with it like a launcher does, and let the run finish."""
    for _ in range(kills):
        world = run.start()
        eventually(lambda world=world: world.page(0))
        time.sleep(rng.random() * 0.6)
        if rng.random() < 0.5:  # right into a save
            target = world.step() + 5
            while world.step() < target // 5 * 5 and world.ranks[0].exitcode is None:
                time.sleep(0.001)
        world.ranks[rng.randrange(2)].kill()
        world.kill()
    finish(run)


def test_killed_at_random_moments(run: Run, undisturbed: Run) -> None:
    """SIGKILL at any moment costs steps, never correctness."""
    kill_and_resume(run, 5, random.Random(1))
    assert run.curve() == undisturbed.curve()


def test_stop_request_saves_at_the_step_boundary(run: Run, undisturbed: Run) -> None:
    """Asked to stop, on any rank, the run saves the very step it is at and ends well; going on is exact."""
    world = run.start(checkpoint__every=1000)
    world.wait_for_step(7)
    write_request(world.pages[1], "checkpoint_and_stop")
    assert world.wait() == [0, 0]
    last = run.metrics()[-1]["step"]
    assert 7 <= last < STEPS
    assert steps(run.checkpoints) == [last]
    finish(run, checkpoint__every=1000)
    assert run.curve() == undisturbed.curve()
    assert run.events("checkpoint_loaded")[0]["step"] == last


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 8
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped bit": flip,
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "missing": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_damaged_checkpoint_is_set_aside(stopped_at_20: Run, undisturbed: Run, damage: str, rank: int) -> None:
    """A file of the newest checkpoint is damaged: it is named, the previous checkpoint is used, the losses agree."""
    run = stopped_at_20
    folder = folder_of(run.checkpoints, 20)
    name = read(folder).files[rank].name
    DAMAGES[damage](folder / name)
    finish(run)
    (event,) = run.events("checkpoint_rejected")
    assert (event["step"], event["file"]) == (20, name)
    assert event["why"]
    assert run.events("checkpoint_loaded")[-1]["step"] == 15
    assert (folder / REJECTED).exists()
    assert run.curve() == undisturbed.curve()


@pytest.mark.parametrize(("damage", "why"), [(Path.unlink, "never completed"), (flip, "")])
def test_a_damaged_manifest_is_not_used(
    stopped_at_20: Run, undisturbed: Run, damage: Callable[[Path], object], why: str
) -> None:
    """Without a manifest, or with one that is damaged, a checkpoint is not loaded, and the event names the manifest."""
    run = stopped_at_20
    damage(folder_of(run.checkpoints, 20) / MANIFEST)
    finish(run)
    (event,) = run.events("checkpoint_rejected")
    assert event["step"] == 20
    assert why in event["why"]
    assert run.events("checkpoint_loaded")[-1]["step"] == 15
    assert run.curve() == undisturbed.curve()


def test_never_afresh_in_silence(stopped_at_20: Run, undisturbed: Run) -> None:
    """When every checkpoint is damaged the run stops and says so, each time, until it is told to begin again."""
    run = stopped_at_20
    saved = steps(run.checkpoints)
    for step in saved:
        flip(folder_of(run.checkpoints, step) / read(folder_of(run.checkpoints, step)).files[0].name)
    for _ in range(2):
        code, line = refused(run)
        assert code == 1
        assert "damaged" in line
        assert "--fresh" in line
    assert [event["step"] for event in run.events("checkpoint_rejected")] == saved[::-1]
    finish(run, "--fresh")
    assert run.curve() == undisturbed.curve()


def test_another_model_is_refused(stopped_at_20: Run) -> None:
    """Checkpoints of other settings are not loaded and not touched."""
    saved = steps(stopped_at_20.checkpoints)
    code, line = refused(stopped_at_20, model__ffn=64)
    assert code == 2
    assert "made with another model" in line
    assert steps(stopped_at_20.checkpoints) == saved


def test_damaged_shards_are_refused(run: Run, shards: Path, tmp_path: Path) -> None:
    """Shards that do not match their index stop the run before it begins, with the file's name."""
    copy = tmp_path / "shards"
    copy.mkdir()
    for path in shards.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    flip(copy / "shard-00000.tokens")
    run.shards = copy
    world = run.start()
    eventually(lambda: any(rank.exitcode == 2 for rank in world.ranks))
    world.kill()  # the other one waits to be joined
    assert "shard-00000.tokens does not match its checksum" in run.printed()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"data__batch": 3}, "not a multiple of 2 ranks x data.micro_batch 1; start 1 or 3 ranks"),
        ({"model__vocab": 100}, "model.vocab is 100"),
        ({"data__sequence": 1_000_000}, "fewer tokens than one sequence"),
        ({"data__shards": "/nowhere"}, "python -m trainer.data"),
        pytest.param(
            {"run__device": "cuda"},
            "torch finds no GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_unusable_settings_are_refused(run: Run, settings: dict[str, object], text: str) -> None:
    """What does not fit together is refused in one sentence with exit code 2."""
    code, line = refused(run, **settings)
    assert code == 2
    assert text in line


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def stop_then_kill(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.3)
    kill(pid)


@pytest.mark.parametrize("end", [kill, stop_then_kill])
def test_a_lost_data_worker_changes_nothing(run: Run, undisturbed: Run, end: Callable[[int], None]) -> None:
    """A data worker that dies is replaced at the very next sample: reported, and not to be seen in the losses."""
    world = run.start()
    world.wait_for_step(8)
    pid = world.worker(1, "data")
    end(pid)
    assert world.wait() == [0, 0]
    (event,) = run.events("data_worker_restarted")
    assert (event["pid"], event["why"]) == (pid, "signal SIGKILL")
    assert event["new_pid"] != pid
    assert run.curve() == undisturbed.curve()


def test_waiting_for_data_is_no_failure(run: Run, undisturbed: Run) -> None:
    """While its data worker is stopped a rank waits in the phase "data"; when it goes on, so does the run."""
    world = run.start()
    world.wait_for_step(8)
    pid = world.worker(0, "data")
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: (page := world.page(0)) and page.phase == "data" and time.monotonic() - page.phase_since > 1)
    step = world.step()
    assert world.ranks[0].is_alive()
    os.kill(pid, signal.SIGCONT)
    assert world.wait() == [0, 0]
    assert not run.events("data_worker_restarted")
    assert run.metrics()[step]["data_s"] > 1
    assert run.curve() == undisturbed.curve()


def test_a_data_worker_dies_with_its_rank(run: Run) -> None:
    """A rank that is killed takes its data worker with it, even a stopped one."""
    world = run.start()
    world.wait_for_step(3)
    page = world.page(0)
    pid = world.worker(0, "data")
    os.kill(pid, signal.SIGSTOP)
    world.kill()
    assert page is not None
    eventually(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text())
    assert process_state(page) is None


def test_a_corpus_that_kills_its_reader_is_given_up(run: Run) -> None:
    """A worker that cannot live is not restarted for ever: the run ends with a sentence."""
    world = run.start(run__steps=100_000, checkpoint__every=10)
    world.wait_for_step(3)
    for _ in range(2000):
        page = world.page(0)
        for pid in [pid for pid, role in (page.workers if page else ()) if role == "data"]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if world.ranks[0].exitcode is not None:
            break
        time.sleep(0.005)
    world.ranks[0].join(timeout=60)
    assert world.ranks[0].exitcode == 2
    world.kill()
    assert "died 3 times in a row" in run.log(0).read_text()


def test_a_lost_persist_process_costs_one_checkpoint(run: Run, undisturbed: Run) -> None:
    """A persist process that dies is reported and replaced; the training does not notice."""
    world = run.start(checkpoint__every=2, checkpoint__keep=100)
    world.wait_for_step(6)
    pid = world.worker(1, "persist")
    os.kill(pid, signal.SIGSTOP)  # so that it dies with a checkpoint in hand
    step = world.step()
    world.wait_for_step(step + 4)
    kill(pid)
    assert world.wait() == [0, 0]
    (event,) = run.events("checkpoint_failed")
    assert "-9" in event["why"]
    assert steps(run.checkpoints)[-1] == STEPS
    for step in steps(run.checkpoints):
        verify(folder_of(run.checkpoints, step))
    assert run.curve() == undisturbed.curve()


def test_a_save_in_flight_is_not_lost(run: Run, undisturbed: Run) -> None:
    """Ranks die while their persist processes write: these finish, and the next start goes on from what they wrote."""
    world = run.start(checkpoint__every=7)
    eventually(lambda: min(world.step(0), world.step(1)) >= 7)  # both have handed over their part of step 7
    persist = [world.worker(rank, "persist") for rank in (0, 1)]
    committed = steps(run.checkpoints)
    world.kill()
    for pid in persist:
        eventually(lambda pid=pid: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text())
    finish(run)
    assert run.events("checkpoint_loaded")[0]["step"] >= max([7, *committed])
    assert run.curve() == undisturbed.curve()


@pytest.mark.parametrize("world", [1, 4])
def test_another_world_size_goes_on(stopped_at_20: Run, undisturbed: Run, world: int) -> None:
    """Resumed on fewer or more ranks, the run reads the same samples and its losses agree to rounding."""
    finish(stopped_at_20, world=world)
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
        finish(run, world=world, run__steps=1, optimizer__lr=1e-300)  # a step too small to change a bit
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
    finish(run, model__dtype="bfloat16", run__steps=6)
    for step, (loss, _) in run.curve().items():
        assert loss == pytest.approx(undisturbed.curve()[step][0], rel=0.02)
    finish(run, model__dtype="bfloat16", run__steps=12)
    whole = Run(run.folder.with_name("whole"), run.shards)
    finish(whole, model__dtype="bfloat16", run__steps=12)
    assert run.curve() == whole.curve()


@pytest.fixture
def small_disk(run: Run) -> Iterator[Path]:
    """A file system of 1 MB for the checkpoints of ``run``; one checkpoint has about 0.4 MB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    run.checkpoints.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(run.checkpoints)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted here")
    yield run.checkpoints
    subprocess.run(["umount", "--lazy", run.checkpoints], check=True)


def test_a_full_disk_stops_saving_and_not_training(run: Run, undisturbed: Run, small_disk: Path) -> None:
    """On a full disk saves fail, say so and leave the old checkpoint; when there is room again, saving goes on."""
    world = run.start(run__steps=100_000, checkpoint__keep=1)
    world.wait_for_step(5)
    eventually(lambda: steps(small_disk))
    filler = small_disk / "filler"
    filler.touch()

    def fill() -> bool:
        free = os.statvfs(small_disk)
        with open(filler, "ab") as file:
            file.truncate(filler.stat().st_size)
            try:
                os.posix_fallocate(file.fileno(), filler.stat().st_size, max(1, free.f_bavail * free.f_frsize - 50_000))
            except OSError:
                return False
        return bool(run.events("checkpoint_failed"))

    eventually(fill)
    failed = run.events("checkpoint_failed")[0]
    assert "No space left on device" in failed["why"]
    verify(folder_of(small_disk, steps(small_disk)[-1]))
    step = world.step()
    world.wait_for_step(step + 10)
    filler.unlink()
    before = steps(small_disk)[-1]
    eventually(lambda: steps(small_disk)[-1] > before)
    write_request(world.pages[0], "checkpoint_and_stop")
    assert world.wait() == [0, 0]
    curve = run.curve()
    expected = {step: point for step, point in undisturbed.curve().items() if step in curve}
    assert expected == {step: curve[step] for step in expected}


@pytest.mark.slow
def test_the_command_alone(tmp_path: Path, shards: Path) -> None:
    """`python -m trainer tiny` runs without any launcher, as the only rank."""
    settings = {"data.shards": shards, "run.steps": 2, "run.folder": tmp_path, "data.batch": 2, "data.prefetch": 1}
    command = [sys.executable, "-m", "trainer", "tiny", *(f"--set={k}={v}" for k, v in settings.items())]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OPSD_")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert steps(tmp_path / "checkpoints") == [2]
