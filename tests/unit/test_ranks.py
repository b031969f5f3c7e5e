"""The ranks collector over real rank pages and run folders."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from opsd import client, rank_page
from opsd.collectors.base import RankFact, Reading
from opsd.collectors.lib.gpu_owners import GpuOwners
from opsd.collectors.lib.rank_series import PhaseTotals, tokens_per_second
from opsd.collectors.lib.run_files import RUN_STATES
from opsd.collectors.ranks import LEFT_OUT, RanksCollector
from opsd.rundir import State
from tests.fakes.ranks import FakeRank
from tests.fakes.run_folder import Clock, ranks, read, reporter, runs, values, write_run


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The shared-memory folder of the run "r1"."""
    folder = tmp_path / "shm" / "r1"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def gpu_owners() -> GpuOwners:
    """Slurm runs the job 4242 of this user here."""
    gpu_owners = GpuOwners()
    gpu_owners.jobs = {"4242": os.getuid()}
    return gpu_owners


@pytest.fixture
def collector(run: Path, clock: Clock, gpu_owners: GpuOwners) -> RanksCollector:
    return RanksCollector(run.parent, clock=clock, gpu_owners=gpu_owners)


@pytest.fixture
def ended_pid() -> int:
    """A process that has just ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def told_of(run: str, reading: Reading) -> list[object]:
    """Facts and series of a run."""
    return [*reading.facts, *reading.events, *(s for s in reading.samples if run in s.labels)]


def test_a_rank_is_seen_with_its_steps_and_phases(run: Path, collector: RanksCollector) -> None:
    """Everything a runbook needs of a rank, and the series of it."""
    rank = reporter(run, 3, world_size=8, generation=2, gpu=5, job="4242")
    for loss in (2.5, 2.25):
        with rank.phase("data"):
            pass
        rank.step(tokens=1000, loss=loss, grad_norm=0.5, learning_rate=1e-3)
    rank.checkpoint_committed(2)
    with rank.phase("backward"):
        reading = read(collector)
    (fact,) = ranks(reading)
    assert (fact.run, fact.job, fact.rank, fact.gpu, fact.generation, fact.phase) == ("r1", "4242", 3, 5, 2, "backward")
    assert fact.live
    assert [step.loss for step in fact.steps] == [2.5, 2.25]
    assert fact.steps[-1].phase_s["data"] > 0
    samples = values(reading)
    assert samples["opsd_rank_up", "r1", "3"] == 1
    assert samples["opsd_rank_step", "r1", "3"] == 2
    assert samples["opsd_rank_tokens_total", "r1", "3"] == 2000
    assert samples["opsd_rank_loss", "r1", "3"] == 2.25
    assert samples["opsd_rank_learning_rate", "r1", "3"] == 1e-3
    assert samples["opsd_rank_committed_step", "r1", "3"] == 2
    assert samples["opsd_rank_phase", "r1", "3", "backward"] == 1
    assert samples["opsd_rank_phase", "r1", "3", "data"] == 0
    assert samples["opsd_gpu_job_info", "5", "4242", "r1", "3"] == 1
    assert samples["opsd_rank_page_errors", "r1"] == 0


def test_counters_of_a_rank_exist_before_its_first_step(run: Path, collector: RanksCollector) -> None:
    """Alerts on increases need the zero."""
    rank = reporter(run)
    samples = values(read(collector))
    assert samples["opsd_rank_tokens_total", "r1", "0"] == 0
    assert {samples["opsd_rank_phase_seconds_total", "r1", "0", phase] for phase in rank_page.PHASES} == {0.0}
    assert ("opsd_rank_loss", "r1", "0") not in samples
    rank.close()


def test_a_loss_that_was_not_reported_is_no_sample(run: Path, collector: RanksCollector) -> None:
    """NaN would look like a diverged run."""
    rank = reporter(run)
    rank.step(tokens=1)
    samples = values(read(collector))
    assert ("opsd_rank_loss", "r1", "0") not in samples
    assert samples["opsd_rank_step", "r1", "0"] == 1


def test_the_age_of_a_stuck_rank_grows(run: Path, collector: RanksCollector, clock: Clock) -> None:
    """And its throughput sinks, so that a stalled rank does not show its last good number for ever."""
    rank = reporter(run)
    for _ in range(3):
        rank.step(tokens=1000)
    with rank.phase("collective"):
        before = values(read(collector))
        clock.ahead = 100.0
        after = values(read(collector))
    key = ("opsd_rank_last_change_age_seconds", "r1", "0")
    assert before[key] < 50 < 100 <= after[key]
    assert after["opsd_rank_tokens_per_second", "r1", "0"] <= 3000 / 99


def test_a_dead_rank_lingers_and_then_disappears(run: Path, collector: RanksCollector, clock: Clock) -> None:
    """How it ended must be seen, but the pages of last week's job must not stay."""
    code = f"from opsd.client import Reporter; Reporter({str(run / 'rank-0000.page')!r}).step(tokens=5)"
    subprocess.run([sys.executable, "-c", code], check=True)
    reading = read(collector)
    (fact,) = ranks(reading)
    assert fact.process is None
    assert not fact.live
    assert values(reading)["opsd_rank_up", "r1", "0"] == 0
    assert ("opsd_rank_phase_age_seconds", "r1", "0") not in values(reading)
    clock.ahead = 120.0
    assert told_of("r1", read(collector)) == []


def test_ranks_of_a_living_launcher_stay(run: Path, collector: RanksCollector, clock: Clock) -> None:
    """A rank that died while its launcher restarts the run is still one of its ranks."""
    code = f"from opsd.client import Reporter; Reporter({str(run / 'rank-0000.page')!r})"
    subprocess.run([sys.executable, "-c", code], check=True)
    write_run(run, os.getpid())
    clock.ahead = 3600.0
    assert len(ranks(read(collector))) == 1


def test_a_run_is_seen_with_its_state(run: Path, collector: RanksCollector) -> None:
    """The launcher lives if the process with its pid was started when it says."""
    write_run(run, os.getpid(), state="restarting")
    reading = read(collector)
    (fact,) = runs(reading)
    assert (fact.alive, fact.state, fact.generation, fact.job, fact.world_size) == (True, "restarting", 2, "4242", 8)
    samples = values(reading)
    assert samples["opsd_run_state", "r1", "restarting"] == 1
    assert samples["opsd_run_state", "r1", "running"] == 0
    assert samples["opsd_run_generation", "r1"] == 2
    assert samples["opsd_run_up", "r1"] == 1


def test_every_state_of_a_launcher_is_known() -> None:
    """A run that waits for its nodes and a spare are seen as well."""
    assert set(RUN_STATES) == set(get_args(State))


def test_the_ranks_of_a_node_that_has_become_a_spare_disappear(
    run: Path, collector: RanksCollector, clock: Clock
) -> None:
    """Its launcher lives on and starts none of them again; the run stays on the page."""
    code = f"from opsd.client import Reporter; Reporter({str(run / 'rank-0000.page')!r})"
    subprocess.run([sys.executable, "-c", code], check=True)
    write_run(run, os.getpid(), state="spare")
    clock.ahead = 120.0
    reading = read(collector)
    assert [fact.state for fact in runs(reading)] == ["spare"]
    assert ranks(reading) == []
    assert values(reading)["opsd_run_state", "r1", "spare"] == 1


def test_another_process_with_the_launchers_pid_is_not_the_launcher(run: Path, collector: RanksCollector) -> None:
    """Pids are used again."""
    write_run(run, os.getpid(), launcher_start=1)
    (fact,) = runs(read(collector))
    assert not fact.alive


def test_a_run_whose_launcher_ended_disappears(run: Path, collector: RanksCollector, ended_pid: int) -> None:
    """Its folder stays in shared memory for a day, its series do not."""
    write_run(run, ended_pid, launcher_start=1)
    assert len(runs(read(collector))) == 1
    os.utime(run / "run.json", (1.0, 1.0))
    assert runs(read(collector)) == []


@pytest.mark.parametrize("damage", ["truncated", "other version", "foreign", "another rank"])
def test_a_page_that_cannot_be_used_is_counted(run: Path, collector: RanksCollector, damage: str) -> None:
    """It hides neither itself nor the other ranks."""
    good, bad = reporter(run, 0), run / "rank-0001.page"
    reporter(run, 1)
    data = bytearray(bad.read_bytes())
    if damage == "truncated":
        del data[100:]
    elif damage == "other version":
        data[8] = 99
    elif damage == "foreign":
        data[:8] = b"whatever"
    else:
        data = bytearray((run / "rank-0000.page").read_bytes())
    bad.write_bytes(data)
    reading = read(collector)
    assert [fact.rank for fact in ranks(reading)] == [0]
    assert values(reading)["opsd_rank_page_errors", "r1"] == 1
    good.close()


def test_symbolic_links_are_not_followed(tmp_path: Path, run: Path, collector: RanksCollector) -> None:
    """Neither to another folder nor to another page."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    reporter(elsewhere, 0)
    (run.parent / "r2").symlink_to(elsewhere)
    (run / "rank-0000.page").symlink_to(elsewhere / "rank-0000.page")
    reading = read(collector)
    assert ranks(reading) == []
    assert {s.labels for s in reading.samples if s.metric is not LEFT_OUT} == {("r1",)}


def test_workers_of_a_rank_come_with_their_state(run: Path, collector: RanksCollector, ended_pid: int) -> None:
    """A loader that is gone is told from one that works."""
    rank = reporter(run)
    rank.add_worker(os.getpid(), "data")
    rank.add_worker(ended_pid, "persist")
    (fact,) = ranks(read(collector))
    assert fact.workers == ((os.getpid(), "data"), (ended_pid, "persist"))
    assert fact.worker_process[0] in ("R", "S", "D")
    assert fact.worker_process[1] is None


def test_a_folder_that_vanishes_is_forgotten(run: Path, collector: RanksCollector) -> None:
    """A run that was cleaned up leaves nothing behind."""
    reporter(run)
    assert ranks(read(collector))
    for path in run.iterdir():
        path.unlink()
    run.rmdir()
    assert told_of("r1", read(collector)) == []


def test_without_the_root_there_is_no_run(tmp_path: Path) -> None:
    """That is known, and not unknown: a crash of before the node was booted would stay open until the next run."""
    assert RanksCollector(tmp_path / "none").collect().facts == ()


def test_phase_totals_go_on_through_a_restart_and_make_up_for_steps_not_seen() -> None:
    """The ring of a page holds 63 steps; faster ranks are extrapolated."""
    totals, rank = PhaseTotals(), FakeRank(0)
    for second in range(100):
        rank.step(float(second + 1), 1.0, forward=0.6, data=0.4)
    assert totals.update(rank.page)["forward"] == pytest.approx(60.0)
    assert totals.update(rank.page)["forward"] == pytest.approx(60.0)
    restarted = FakeRank(0, born=500.0)
    restarted.step(501.0, 1.0, forward=1.0)
    assert totals.update(restarted.page)["forward"] == pytest.approx(61.0)


def test_throughput_is_that_of_the_recent_steps() -> None:
    """Tokens over the time they took, the step that is running left out until it is late."""
    rank = FakeRank(0)
    for second in range(20):
        rank.step(float(second + 1), 1.0)
    assert tokens_per_second(rank.page, 20.5) == pytest.approx(1.0)
    assert tokens_per_second(rank.page, 31.0) == pytest.approx(0.5)
    assert tokens_per_second(FakeRank(1).page, 31.0) is None


def test_the_last_step_is_known_if_the_program_says_it(run: Path, collector: RanksCollector) -> None:
    """For the time that is left; unknown for programs that do not say it, and for pages of older writers."""
    told, _untold = (client.Reporter(run / f"rank-000{rank}.page", rank=rank, world_size=2) for rank in range(2))
    told.planned(250)
    reading = collector.collect()
    assert isinstance(reading, Reading)
    assert [fact.planned for fact in reading.facts if isinstance(fact, RankFact)] == [250, None]


def test_routers_come_from_trainers_that_have_some(run: Path, collector: RanksCollector) -> None:
    """Load, its limit, entropy and dropped share; nothing of a dense model, and nothing that is no number."""
    sparse, _dense, broken = (
        client.Reporter(run / f"rank-000{rank}.page", rank=rank, world_size=3) for rank in range(3)
    )  # fmt: skip
    sparse.router(load=2.5, limit=8.0, entropy=0.75, dropped=0.125)
    broken.router(load=float("nan"), limit=8.0, entropy=0.75)
    reading = collector.collect()
    assert isinstance(reading, Reading)
    values = {
        (sample.metric.name, sample.labels[-1]): sample.value
        for sample in reading.samples if sample.metric.name.startswith("opsd_rank_router_")
    }  # fmt: skip
    assert values == {
        ("opsd_rank_router_load_ratio", "0"): 2.5,
        ("opsd_rank_router_load_limit_ratio", "0"): 8.0,
        ("opsd_rank_router_entropy_ratio", "0"): 0.75,
        ("opsd_rank_router_dropped_ratio", "0"): 0.125,
    }


def test_mfu_comes_with_its_denominator(run: Path, collector: RanksCollector, clock: Clock) -> None:
    """Tokens a second times operations per token over the peak; nothing from a trainer that has told neither."""
    told, untold = (client.Reporter(run / f"rank-000{rank}.page", rank=rank, world_size=2) for rank in range(2))
    told.model(flops_per_token=2e9, peak_flops=1e12)
    for page in (told, untold):
        page.step(tokens=1000)
    reading = collector.collect()
    assert isinstance(reading, Reading)
    values = {(sample.metric.name, sample.labels[-1]): sample.value for sample in reading.samples}
    rate = values["opsd_rank_tokens_per_second", "0"]
    assert values["opsd_rank_mfu_ratio", "0"] == pytest.approx(rate * 2e9 / 1e12)
    assert values["opsd_rank_peak_flops_per_second", "0"] == 1e12
    assert ("opsd_rank_tokens_per_second", "1") in values
    assert ("opsd_rank_mfu_ratio", "1") not in values
