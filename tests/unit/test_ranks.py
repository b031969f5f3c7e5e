"""The ranks collector over real rank pages, run folders and event files."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd import client, rank_page
from opsd.collectors.base import RankFact, Reading
from opsd.collectors.lib.gpu_owners import GpuOwners, Proof
from opsd.collectors.lib.processes import Identity
from opsd.collectors.lib.rank_series import PhaseTotals, tokens_per_second
from opsd.collectors.lib.run_files import RUN_STATES, parse_event, parse_run
from opsd.collectors.lib.run_watch import MAX_EVENTS
from opsd.collectors.ranks import LEFT_OUT, RanksCollector
from opsd.rank_page import process_start
from opsd.rundir import State
from tests.fakes.ranks import FakeRank
from tests.fakes.run_folder import Clock, ranks, read, reporter, runs, values, write_run

# The ranks collector over real rank pages and run folders.


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


# What launcher and ranks report as events, whatever a user has written into the files.


@pytest.fixture
def of_events(run: Path, clock: Clock) -> RanksCollector:
    return RanksCollector(run.parent, clock=clock)


def test_events_of_the_launcher_come_once_with_their_own_time(run: Path, of_events: RanksCollector) -> None:
    """Also those from before the agent was started; an unfinished line waits."""
    first = json.dumps({"t": 100.5, "event": "rank_exited", "rank": 1, "culprit": True, "generation": 1})
    second = json.dumps({"t": 101.5, "event": "resumed", "step": 7})
    (run / "events.jsonl").write_text(f"{first}\n{second[:9]}")
    (event,) = read(of_events).events
    assert (event.kind, event.at, event.data["run"], event.data["culprit"]) == ("rank_exited", 100.5, "r1", True)
    (run / "events.jsonl").write_text(f"{first}\n{second}\n")
    assert [(e.kind, e.at) for e in read(of_events).events] == [("resumed", 101.5)]
    assert read(of_events).events == ()


def test_events_that_a_launcher_passes_on_come_once(run: Path, of_events: RanksCollector) -> None:
    """While it lives its stream is the only source; what it no longer passed on is read from the ranks' own files."""
    rank = reporter(run, 2)
    rank.event("checkpoint_rejected", step=40, file="shard-0", why="checksum")
    own = json.loads((run / "rank-0002.page.events.jsonl").read_text())
    passed_on = own | {"rank": 2, "generation": 1, "run": "r1"}
    (run / "events.jsonl").write_text(json.dumps(passed_on) + "\n")
    write_run(run, os.getpid())
    assert [e.kind for e in read(of_events).events] == ["checkpoint_rejected"]
    rank.event("checkpoint_loaded", step=30)
    assert read(of_events).events == ()
    write_run(run, os.getpid(), launcher_start=1)
    (event,) = read(of_events).events
    assert (event.kind, event.data["rank"], event.data["step"]) == ("checkpoint_loaded", 2, 30)


def test_of_a_flood_the_newest_are_passed_on(run: Path, of_events: RanksCollector) -> None:
    """A trainer may evaluate in each step, or the agent start beside a long file; other events are all there."""
    ended = json.dumps({"t": 1.0, "event": "rank_exited", "rank": 0})
    steps = [json.dumps({"t": 2.0, "event": "evaluation", "step": step, "results": {}}) for step in range(1000)]
    (run / "events.jsonl").write_text("\n".join([ended, *steps]) + "\n")
    first, *rest = read(of_events).events
    assert first.kind == "rank_exited"
    assert [event.data["step"] for event in rest] == [*range(1000 - MAX_EVENTS, 1000)]


def test_what_small_values_take_counts(run: Path, of_events: RanksCollector) -> None:
    """3 MiB of empty lists, which are kept for minutes, are 80 MiB in memory: events that hold them are left out."""
    line = json.dumps({"event": "resumed", "t": 1.0, "x": [[]] * 30_000})
    kept = 0
    with (run / "events.jsonl").open("a") as stream:
        for _ in range(30):
            print(line, file=stream, flush=True)
            kept += len(read(of_events).events)
    assert 0 < kept < 6


def test_a_run_without_launcher_has_events_too(run: Path, of_events: RanksCollector) -> None:
    """Another launcher may set OPSD_RANK_PAGE."""
    reporter(run, 1).event("data_worker_restarted", pid=7, why="gone", sample=5)
    (event,) = read(of_events).events
    assert (event.kind, event.data["rank"], event.data["run"]) == ("data_worker_restarted", 1, "r1")


def test_an_evaluation_stays_visible(run: Path, of_events: RanksCollector) -> None:
    """Its event comes once, its results are series for as long as the run is reported."""
    reporter(run, 1).event("evaluation", step=40, tokens=1000, results={"loss": 2.5}, reference={})
    for _ in range(2):
        found = {s.metric.name: s for s in read(of_events).samples if s.metric.name.startswith("opsd_evaluation_")}
        assert found["opsd_evaluation_result"].labels == ("r1", "loss")
        assert (found["opsd_evaluation_result"].value, found["opsd_evaluation_step"].value) == (2.5, 40.0)


def test_the_data_mixture_is_what_the_run_told_last(run: Path, of_events: RanksCollector) -> None:
    """Going back to a checkpoint takes the tokens of each source back, too."""
    rank = reporter(run)
    rank.event("data_mixture", step=20, tokens={"web": 800, "code": 200}, epochs={"web": 0.4, "code": 1.5})
    assert values(read(of_events))["opsd_data_source_epochs", "r1", "code"] == 1.5
    rank.event("data_mixture", step=10, tokens={"web": 400, "code": None, 7: "x"}, epochs=[])
    samples = values(read(of_events))
    assert {key: value for key, value in samples.items() if key[0].startswith("opsd_data_source_")} == {
        ("opsd_data_source_tokens", "r1", "web"): 400
    }


@given(st.binary(max_size=200))
def test_no_line_breaks_the_collector(line: bytes) -> None:
    """The files belong to users."""
    parse_event(line, "r1", 5.0)
    assert parse_run(line, "r1", lambda pid, start: pid) is None


@pytest.mark.parametrize("odd", ["1e999", "-1e999", "NaN", "1" + "0" * 400])
def test_a_number_that_is_none_is_missing(odd: str) -> None:
    """It would make runbooks fail, which look at the events of all users."""
    event = parse_event(f'{{"event": "rank_exited", "t": 1, "step": {odd}, "rank": 3}}'.encode(), "r1", 5.0)
    assert event is not None and event.data["step"] is None and event.data["rank"] == 3


def test_values_too_deep_to_be_shown_are_no_event() -> None:
    """Python would refuse to print them."""
    for depth, known in ((10, True), (900, False)):
        line = f'{{"event": "rank_exited", "t": 1, "error": {"[" * depth}{"]" * depth}}}'
        assert (parse_event(line.encode(), "r1", 5.0) is not None) is known


nasty = st.sampled_from(
    [None, True, -1, 0, 7, 10**400, 1e300, math.nan, math.inf, "", "\ud800", "running", [], {"t": 1}]
)

names = st.sampled_from(["t", "event", "run", "rank", "launcher_pid", "launcher_start", "state", "generation", "job"])


@given(st.dictionaries(names, nasty))
def test_no_json_breaks_the_collector(record: dict[str, object]) -> None:
    """Whatever the types, the run is the folder's and the time a number."""
    complete = dict.fromkeys(("world_size", "launcher_pid", "launcher_start", "generation"), 1)
    run = parse_run(
        json.dumps({"job": "", "node": "", "control": "", "folder": ""} | complete | record).encode(),
        "r1",
        lambda pid, start: pid,
    )
    assert run is None or (run.run == "r1" and run.job.encode() is not None and run.generation < 2**48)
    event = parse_event(json.dumps({"event": "resumed"} | record).encode(), "r1", 5.0)
    assert event is None or (event.data["run"] == "r1" and 0 <= event.at <= 5.0)


@pytest.mark.parametrize("name", ["xid", "gpu_lost", "", "RANK_EXITED"])
def test_a_users_file_does_not_speak_for_the_hardware(name: str) -> None:
    """A rank may report what it likes to its launcher, but not as what the node found out."""
    assert parse_event(json.dumps({"t": 1.0, "event": name}).encode(), "r1", 5.0) is None


# What a rank page or run.json says of processes, jobs, GPUs and sockets, against what others know.


ME = os.getuid()


@pytest.fixture
def owners_of_gpus() -> GpuOwners:
    return GpuOwners()


@pytest.fixture
def own_run(tmp_path: Path) -> Path:
    folder = tmp_path / "r1"
    folder.mkdir()
    return folder


@pytest.fixture
def identities(own_run: Path, owners_of_gpus: GpuOwners) -> RanksCollector:
    return RanksCollector(own_run.parent, gpu_owners=owners_of_gpus)


@pytest.fixture
def other() -> Iterator[int]:
    """A process of another user."""
    if os.geteuid() != 0:
        pytest.skip("needs root: starts a process of another user")
    with subprocess.Popen(["sleep", "60"], user=65534, cwd="/") as process:
        yield process.pid
        process.kill()


def test_a_job_needs_slurms_word(own_run: Path, identities: RanksCollector, owners_of_gpus: GpuOwners) -> None:
    """About this very user: the page alone is no proof, and neither is the job of somebody else."""
    reporter(own_run, gpu=0, job="4242")
    write_run(own_run, os.getpid())
    for jobs, shown in (({}, ""), ({"4242": ME + 1}, ""), ({"4242": ME}, "4242")):
        owners_of_gpus.jobs = jobs
        reading = read(identities)
        assert [rank.job for rank in ranks(reading)] == [run.job for run in runs(reading)] == [shown]
        assert ("opsd_gpu_job_info", "0", shown, "r1", "0") in values(reading)


def test_the_control_group_decides_about_the_job(owners_of_gpus: GpuOwners) -> None:
    """Whatever the page says; a process that has ended was in the job it was in."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        pid, start = process.pid, process_start(process.pid) or 0
        proof = Proof(ME, owners_of_gpus, lambda _pid: Identity(ME, "77"))
        assert proof.owns(pid, start, 0.0, pid)
    assert proof.owns(pid, start, 1.0, None)
    assert proof.job("4242") == "77"
    assert proof.owns(pid, start + 1, 1.0, None) is None


def test_a_control_group_with_a_sluid_is_the_job_that_slurm_names(owners_of_gpus: GpuOwners) -> None:
    """Since 26.05; while Slurm has not told which it is, the page's claim needs Slurm's word as outside of a group."""
    proof = Proof(ME, owners_of_gpus, lambda _pid: Identity(ME, "sEKNKTV3WPV500"))
    proof.owns(os.getpid(), 1, 0.0, os.getpid())
    assert proof.job("4242") == ""
    owners_of_gpus.jobs = {"4242": ME}
    assert proof.job("4242") == "4242"
    owners_of_gpus.sluids = {"sEKNKTV3WPV500": "77"}
    assert proof.job("4242") == "77"


def test_a_gpu_is_who_holds_its(
    own_run: Path, identities: RanksCollector, owners_of_gpus: GpuOwners, other: int
) -> None:
    """A page's claim stands unless the driver lists only other users' processes, or says that nobody is on the GPU."""
    reporter(own_run, gpu=3)
    both = {3: (other, os.getpid())}
    for holders, gpu in (({}, 3), ({3: ()}, None), ({3: (other,)}, None), (both, 3)):
        owners_of_gpus.holders = holders
        assert [rank.gpu for rank in ranks(read(identities))] == [gpu]


def test_a_rank_keeps_the_gpu_that_it_had(
    own_run: Path, identities: RanksCollector, owners_of_gpus: GpuOwners, other: int
) -> None:
    """The list of the driver empties before a rank that dies is known to be dead; others on the GPU end the claim."""
    reporter(own_run, gpu=3)
    dead = {3: (1 << 22,)}
    for holders, gpu in (({3: (os.getpid(),)}, 3), (dead, 3), ({3: ()}, 3), ({3: (other,)}, None), ({3: ()}, None)):
        owners_of_gpus.holders = holders
        assert [rank.gpu for rank in ranks(read(identities))] == [gpu]


def test_the_processes_on_a_gpu_are_looked_up_once_for_all_pages() -> None:
    """250 of them, and 256 pages that name that GPU, were 64,000 looks each second."""
    asked = list[int]()

    def find_user(pid: int) -> int:
        asked.append(pid)
        return ME + pid % 2

    gpu_owners = GpuOwners(find_user)
    gpu_owners.holders = {0: (10, 11), 1: (12,)}
    assert [gpu_owners.may_hold(gpu, user) for gpu in (0, 1) for user in (ME, ME + 1, ME + 2)] == [
        True, True, False, True, False, False,
    ]  # fmt: skip
    assert gpu_owners.users_of_gpus() == {ME, ME + 1}
    assert asked == [10, 11, 12]
    gpu_owners.holders = {0: (13,)}
    assert not gpu_owners.may_hold(0, ME)


def test_the_launcher_is_the_users(own_run: Path, identities: RanksCollector, other: int) -> None:
    """A process of another user keeps no run alive."""
    write_run(own_run, other)
    assert [fact.alive for fact in runs(read(identities))] == [False]


@pytest.mark.parametrize("control", ["{root}/r2/control.sock", "{root}/r1/../r2/control.sock", "/run/x.sock", ""])
def test_the_control_socket_is_in_the_runs_own_folder(own_run: Path, identities: RanksCollector, control: str) -> None:
    """Any other is as good as none."""
    write_run(own_run, os.getpid(), control=control.format(root=own_run.parent))
    assert [fact.control for fact in runs(read(identities))] == [""]


def test_own_control_sockets_stay(own_run: Path, identities: RanksCollector) -> None:
    """The agent asks the launcher there, and knows whose run it is."""
    write_run(own_run, os.getpid())
    (fact,) = runs(read(identities))
    assert (fact.control, fact.user) == (f"{own_run}/control.sock", ME)
