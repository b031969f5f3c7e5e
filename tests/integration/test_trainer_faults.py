"""What happens to a run of the trainer: killed ranks and workers, a full disk. The losses stay the same bits."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from trainer_world import STEPS, Run

from opsd.checkpoints.manifest import folder_of, steps, verify
from opsd.rank_page import process_state, write_request
from tests.fakes.clock import until
from tests.fakes.tmpfs import tmpfs


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
