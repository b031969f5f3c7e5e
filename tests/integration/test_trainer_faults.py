"""What the trainer survives, and what it does not train on."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from trainer_world import STEPS, Run, flip

from opsd.checkpoints.manifest import MANIFEST, REJECTED, folder_of, read, steps, verify
from opsd.rank_page import process_state, write_request
from opsd.trainer.config import CONFIG
from tests.fakes.clock import until
from tests.fakes.tree import tmpfs

# What happens to a run of the trainer: killed ranks and workers, a full disk. The losses stay the same bits.


def kill_and_resume(run: Run, kills: int, rng: random.Random) -> None:
    """Kill a rank at ``kills`` random moments, its peers with it like a launcher does, and let the run finish."""
    for _ in range(kills):
        world = run.start()
        until(lambda world=world: world.page(0))
        time.sleep(rng.random() * 0.6)
        if rng.random() < 0.5:  # right into a save
            target = world.step() + 5
            while world.step() < target // 5 * 5 and world.ranks[0].exitcode is None:
                time.sleep(0.001)
        world.ranks[rng.randrange(2)].kill()
        world.kill()
    run.finish()


def test_killed_at_random_moments(run: Run, undisturbed: Run) -> None:
    """SIGKILL at any moment costs steps, never correctness."""
    kill_and_resume(run, 4, random.Random(1))
    assert run.curve() == undisturbed.curve()


def test_a_save_in_flight_is_not_lost(run: Run, undisturbed: Run) -> None:
    """Ranks die while their persist processes write: these finish, and the next start goes on from what they wrote."""
    world = run.start(checkpoint__every=7)
    until(lambda: min(world.step(0), world.step(1)) >= 7)  # both have handed over their part of step 7
    persist = [world.worker(rank, "persist") for rank in (0, 1)]
    committed = steps(run.checkpoints)
    world.kill()
    for pid in persist:
        until(lambda pid=pid: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text())
    run.finish()
    assert run.events("checkpoint_loaded")[0]["step"] >= max([7, *committed])
    assert run.curve() == undisturbed.curve()


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


@pytest.fixture
def small_disk(run: Run) -> Iterator[Path]:
    """A file system of 1 MB for the checkpoints of ``run``; one checkpoint has about 0.4 MB."""
    with tmpfs(run.checkpoints, "size=1m") as disk:
        yield disk


def test_a_full_disk_stops_saving_and_not_training(run: Run, undisturbed: Run, small_disk: Path) -> None:
    """On a full disk saves fail, say so and leave the old checkpoint; when there is room again, saving goes on."""
    world = run.start(run__steps=100_000, checkpoint__keep=1)
    world.wait_for_step(5)
    until(lambda: steps(small_disk))
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

    until(fill)
    failed = run.events("checkpoint_failed")[0]
    assert "No space left on device" in failed["why"]
    verify(folder_of(small_disk, steps(small_disk)[-1]))
    step = world.step()
    world.wait_for_step(step + 10)
    filler.unlink()
    before = steps(small_disk)[-1]
    until(lambda: steps(small_disk)[-1] > before)
    write_request(world.pages[0], "checkpoint_and_stop")
    assert world.wait() == [0, 0]
    curve = run.curve()
    expected = {step: point for step, point in undisturbed.curve().items() if step in curve}
    assert expected == {step: curve[step] for step in expected}


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
    until(lambda: (page := world.page(0)) and page.phase == "data" and time.monotonic() - page.phase_since > 1)
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
    until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text())
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


# What the trainer does not train on: damaged checkpoints and shards, settings that do not fit together.


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
    run.finish()
    (event,) = run.events("checkpoint_rejected")
    assert (event["step"], event["file"]) == (20, name)
    assert event["why"]
    assert run.events("checkpoint_loaded")[-1]["step"] == 15
    assert (folder / REJECTED).exists()
    assert run.curve() == undisturbed.curve()


def change_digest(path: Path) -> None:
    """Flip a bit of what the state belongs to, with which the whole run would be taken for another."""
    content = path.read_bytes()
    at = content.index(b'"config_digest": "') + len(b'"config_digest": "')
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])


def put_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def put_folder(path: Path) -> None:
    path.unlink()
    (path / "theirs").mkdir(parents=True)


BAD_MANIFESTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "never completed"),
    "flipped bit": (flip, ""),
    "another digest": (change_digest, "does not match the checksum of itself"),
    "nested deeply": (lambda path: path.write_bytes(b"[" * 100_000), "is nested too deeply"),
    "a gigabyte": (lambda path: os.truncate(path, 1 << 30), "has 1073741824 bytes"),
    "a pipe": (put_pipe, "is no regular file"),
    "a folder": (put_folder, "is no regular file"),
}


@pytest.mark.parametrize("bad", BAD_MANIFESTS)
def test_a_damaged_manifest_is_not_used(stopped_at_20: Run, undisturbed: Run, bad: str) -> None:
    """Without a manifest, or with one that is damaged, a checkpoint is not loaded, and the event names the manifest."""
    damage, why = BAD_MANIFESTS[bad]
    run = stopped_at_20
    damage(folder_of(run.checkpoints, 20) / MANIFEST)
    run.finish()
    (event,) = run.events("checkpoint_rejected")
    assert event["step"] == 20
    assert why in event["why"]
    assert run.events("checkpoint_loaded")[-1]["step"] == 15
    assert run.curve() == undisturbed.curve()


def hide(path: Path) -> None:
    """Have the storage fail whenever the file is read: with ELOOP."""
    path.rename(path.with_suffix(".hidden"))
    path.symlink_to(path.name)


def show(path: Path) -> None:
    """The storage is well again."""
    path.with_suffix(".hidden").replace(path)


def test_a_storage_error_of_one_rank_condemns_no_checkpoint(stopped_at_20: Run, undisturbed: Run) -> None:
    """What a rank cannot read is passed over and stays; with nothing else left the run ends with a sentence."""
    run = stopped_at_20
    saved = steps(run.checkpoints)
    files = [folder_of(run.checkpoints, step) / read(folder_of(run.checkpoints, step)).files[1].name for step in saved]
    for path in files:
        hide(path)
    code, line = refused(run)
    assert code == 1
    assert "not every rank can read the checkpoints" in line
    assert steps(run.checkpoints) == saved
    assert [event["step"] for event in run.events("checkpoint_rejected")] == saved[::-1]
    show(files[saved.index(15)])
    run.finish()
    assert run.events("checkpoint_loaded")[-1]["step"] == 15
    assert not list(run.checkpoints.glob(f"*/{REJECTED}"))
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
    run.finish("--fresh")
    assert run.curve() == undisturbed.curve()


def test_checkpoints_that_are_gone_are_not_begun_again_in_silence(stopped_at_20: Run) -> None:
    """The events of the launcher tell that there were some: a lost mount or a wrong clean-up must not cost the run."""
    run = stopped_at_20
    for step in steps(run.checkpoints):
        (folder_of(run.checkpoints, step) / MANIFEST).unlink()
    (run.folder / "events.jsonl").write_text(
        "".join(json.dumps({"event": "checkpoint_committed", "step": step}) + "\n" for step in (10, 15))
        + json.dumps({"event": "checkpoint_unproved", "step": 15})
        + "\n"
    )
    code, line = refused(run)
    assert code == 1
    assert "has no checkpoint, but this run saved step 10; bring it back" in line
    run.finish("--fresh")


def test_another_model_is_refused(stopped_at_20: Run) -> None:
    """Checkpoints of other settings are not loaded and not touched."""
    saved = steps(stopped_at_20.checkpoints)
    code, line = refused(stopped_at_20, model__ffn=64)
    assert code == 2
    assert "other settings: model.ffn was 50 and is 64;" in line
    code, line = refused(stopped_at_20, optimizer__kind="muon")
    assert code == 2
    assert "other settings: optimizer.kind was 'adamw' and is 'muon';" in line
    (stopped_at_20.folder / CONFIG).unlink()
    assert "another model, seed, optimizer, sequence length, corpus" in refused(stopped_at_20, run__seed=9)[1]
    assert steps(stopped_at_20.checkpoints) == saved


def test_settings_that_cannot_be_kept_stop_no_training(run: Run) -> None:
    """One sentence says so: something else has their name, the disk is full."""
    (run.folder / CONFIG).mkdir(parents=True)
    run.finish(run__steps=2)
    assert f"opsd: {run.folder / CONFIG}: Is a directory" in run.printed()


def test_damaged_shards_are_refused(run: Run, shards: Path, tmp_path: Path) -> None:
    """Shards that do not match their index stop the run before it begins, with the file's name."""
    copy = tmp_path / "shards"
    copy.mkdir()
    for path in shards.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    flip(copy / "shard-00000.tokens")
    run.shards = copy
    world = run.start()
    until(lambda: any(rank.exitcode == 2 for rank in world.ranks))
    world.kill()  # the other one waits to be joined
    assert "shard-00000.tokens does not match its checksum" in run.printed()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"data__batch": 3}, "not a multiple of 2 ranks x data.micro_batch 1; start 1 or 3 ranks"),
        ({"model__vocab": 100}, "model.vocab is 100"),
        ({"data__sequence": 1_000_000}, "fewer tokens than one sequence"),
        ({"data__shards": "/nowhere"}, "python -m opsd.trainer.data"),
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
