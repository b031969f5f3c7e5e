"""What the judge of hangs goes by: processes, GPUs, stacks, and who holds the others up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.attribution import RankState, attribute_hang
from opsd.collectors.lib.nvml.driver import DeviceUse
from opsd.launch.hangs.activity import BUSY_SHARE, MOVED_BYTES, Activity, ActivityTracker, Usage, compare, read_usage
from opsd.launch.hangs.capture import Frame, Stack, Thread, parse_stack
from opsd.launch.hangs.gpu_probe import report, samples_of
from opsd.launch.hangs.gpus import GpuState, GpuUse, Sample, parse_uses, state_of
from opsd.launch.hangs.hang import Hang, HangDetector
from opsd.launch.hangs.limits import HangLimits
from tests.fakes.clock import eventually
from tests.fakes.ranks import FakeRank

# Whether a rank's processes do anything, from proc(5).


IDLE = Usage(10.0, 1000, 500, frozenset({7, 8}))


def test_a_process_that_does_nothing_is_idle_since_it_did_something() -> None:
    """Threads that poll a little are nothing."""
    usages = [IDLE, replace(IDLE, cpu_s=11.0), replace(IDLE, cpu_s=11.02), replace(IDLE, cpu_s=11.04)]
    tracker = ActivityTracker(2.0, read=lambda pid: usages.pop(0))
    assert [tracker.look(7, now).active for now in (0.0, 1.0, 2.0, 4.0, 6.0)] == [0.0, 0.0, 2.0, 2.0, 2.0]


def test_what_cannot_be_read_counts_as_active() -> None:
    """Nobody is killed for what is not seen."""
    assert compare(IDLE, None, 2.0, Activity(0.0, 0.0), 9.0).active == 9.0
    assert compare(None, IDLE, 2.0, Activity(0.0, 0.0), 9.0).active == 9.0


def test_processes_that_come_and_go_are_activity() -> None:
    """A program that starts others is at work, even if those end between two looks."""
    assert compare(IDLE, replace(IDLE, pids=frozenset({7, 9})), 2.0, Activity(0.0, 0.0), 9.0).active == 9.0


def test_a_stopped_child_counts_if_nothing_else_moves() -> None:
    """``bash train.sh`` whose Python is stopped does not go on."""
    stopped = replace(IDLE, stopped=frozenset({8}))
    assert compare(IDLE, stopped, 2.0, Activity(0.0, 0.0), 9.0).stopped_child == 8
    assert compare(IDLE, replace(stopped, cpu_s=12.0), 2.0, Activity(0.0, 0.0), 9.0).stopped_child is None


@given(st.floats(0, 2), st.integers(0, 1 << 24), st.floats(0, 2), st.integers(0, 1 << 24))
def test_more_work_is_never_less_activity(cpu_s: float, moved: int, more_cpu_s: float, more_moved: int) -> None:
    """Whatever is used more, the rank does not count as idle for longer."""
    usage = replace(IDLE, cpu_s=IDLE.cpu_s + cpu_s, moved=IDLE.moved + moved)
    more = replace(usage, cpu_s=usage.cpu_s + more_cpu_s, moved=usage.moved + more_moved)
    before = Activity(0.0, 0.0)
    assert compare(IDLE, more, 2.0, before, 9.0).active >= compare(IDLE, usage, 2.0, before, 9.0).active


def test_a_tree_of_processes_is_read(tmp_path: Path) -> None:
    """CPU time, bytes and state of a program and of what it has started."""
    child = "import time, sys; x = bytearray(1 << 22); open(sys.argv[1], 'wb').write(x); time.sleep(100)"
    source = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}, sys.argv[1]])"
    process = subprocess.Popen([sys.executable, "-c", source, str(tmp_path / "x")], start_new_session=True)
    try:
        assert eventually(lambda: (usage := read_usage(process.pid)) is not None and usage.written >= 1 << 22, 30)
        usage = read_usage(process.pid)
        assert usage is not None
        assert len(usage.pids) == 2
        assert usage.cpu_s > 0
        (grandchild,) = usage.pids - {process.pid}
        os.kill(grandchild, signal.SIGSTOP)
        assert eventually(lambda: read_usage(process.pid).stopped == {grandchild}, 10)  # type: ignore[union-attr]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert read_usage(process.pid) is None


def test_thresholds_are_those_of_helper_threads() -> None:
    """NCCL's watchdog wakes ten times a second and uses less; any training uses more."""
    still = replace(IDLE, cpu_s=IDLE.cpu_s + BUSY_SHARE * 2.0 * 0.9, moved=IDLE.moved + MOVED_BYTES - 1)
    assert compare(IDLE, still, 2.0, Activity(0.0, 0.0), 9.0).active == 0.0


def test_a_trickle_is_work_if_the_main_thread_takes_part() -> None:
    """A pipe with some lines a second is; a thread that logs while the main thread waits for a lock is not."""
    before = replace(IDLE, main={7: (50, 1000), 8: (5, 0)})

    def active(waits: int, moved: int) -> bool:
        after = replace(before, main={7: (50 + waits, 1000 + moved), 8: (5, 0)})
        return compare(before, after, 2.0, Activity(0.0, 0.0), 9.0).active == 9.0

    assert active(waits=2, moved=20)
    assert not active(waits=0, moved=20)
    assert not active(waits=2, moved=0), "a loop that polls"


TRICKLE = """
import os, sys, threading, time
r, w = os.pipe()
def write():
    while True:
        os.write(w, b"x")
        time.sleep(0.1)
if sys.argv[1] == "read":
    os.fork() or write()
    while True:
        os.read(r, 1)
threading.Thread(target=write).start()
lock = threading.Lock()
lock.acquire()
lock.acquire()
"""


@pytest.mark.parametrize(("what", "active"), [("read", True), ("lock", False)])
def test_a_main_thread_that_reads_a_byte_at_a_time(what: str, *, active: bool) -> None:
    """As the kernel counts it."""
    process = subprocess.Popen([sys.executable, "-c", TRICKLE, what], start_new_session=True)
    try:
        assert eventually(lambda: _moves(process.pid), 60)
        before = read_usage(process.pid)
        time.sleep(0.5)
        found = compare(before, read_usage(process.pid), 2.0, Activity(0.0, 0.0), 9.0)
        assert found.active == (9.0 if active else 0.0)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _moves(pid: int) -> bool:
    """Whether it has done with its imports and moves bytes."""
    before = read_usage(pid)
    time.sleep(0.3)
    after = read_usage(pid)
    if before is None or after is None:
        return False
    return after.cpu_s - before.cpu_s < 0.02 and after.moved > before.moved and after.pids == before.pids


# What the GPUs of ranks say about a hang: work is progress, a kernel that spins is none.


WORKS = GpuUse((3,), GpuState.WORKS, 99, 41)

SPINS, STILL = GpuUse((3,), GpuState.SPINS, 100, 0), GpuUse((3,), GpuState.IDLE, 0, 0)


def after(seconds: float, *gpus: GpuUse, source: str = "observed") -> Hang | None:
    """What is found ``seconds`` after both ranks of a warm run stood still in forward, with these GPUs."""
    judge, now = HangDetector(HangLimits()), 100.0
    ranks = [FakeRank(number, born=now, since=now, source=source) for number in range(2)]
    for _ in range(20):
        now += 0.2
        for rank in ranks:
            rank.step(now, 0.2, forward=0.2)
    for rank in ranks:
        rank.enter("forward", now)
    begun = now
    while now < begun + seconds:
        now += 0.5
        stall = judge.check([rank.observed(now) for rank in ranks], now)
        if stall is not None and stall.due and (hang := judge.verdict(stall, {}, dict(enumerate(gpus)))):
            return hang
    return None


@pytest.mark.parametrize("source", ["observed", "client"])
def test_a_rank_whose_gpu_works_is_not_hung_for_minutes(source: str) -> None:
    """A kernel of eight minutes, in programs that report phases and in those that do not; not for ever."""
    assert after(480.0, WORKS, WORKS, source=source) is None
    hang = after(1000.0, WORKS, WORKS, source=source)
    assert hang is not None
    assert hang.stuck_s == pytest.approx(900.0, abs=2.0)


def test_others_wait_for_a_rank_whose_gpu_works() -> None:
    """One computes; the kernel of the other spins until it comes."""
    assert after(480.0, WORKS, SPINS) is None


@pytest.mark.parametrize("gpu", [SPINS, STILL])
def test_a_gpu_that_spins_or_stands_still_excuses_nothing(gpu: GpuUse) -> None:
    """NVML calls a GPU busy on which NCCL only waits."""
    hang = after(70.0, gpu, gpu)
    assert hang is not None
    assert hang.stuck_s == pytest.approx(60.0, abs=1.0)


def test_the_rank_whose_gpu_stands_still_is_named() -> None:
    """All pages and processes look alike: the others' kernels wait for it."""
    hang = after(70.0, SPINS, STILL)
    assert hang is not None
    assert hang.rank == 1
    assert "GPU 3 runs no kernel" in hang.evidence


SAMPLES = st.lists(st.builds(Sample, st.integers(0, 100), st.integers(0, 100)), min_size=1, max_size=6)


@given(SAMPLES, SAMPLES)
def test_a_longer_look_never_takes_work_back(samples: list[Sample], more: list[Sample]) -> None:
    """Nor does it make a GPU idle on which something ran."""
    before, after_more = state_of(samples), state_of(samples + more)
    assert list(GpuState).index(after_more) >= list(GpuState).index(before)


def test_kernels_that_begin_and_end_are_work() -> None:
    """Small ones leave the memory controller idle, too; one that waits runs without a break."""
    assert state_of([Sample(40, 0), Sample(100, 0)]) is GpuState.WORKS
    assert state_of([Sample(99, 0), Sample(100, 0)]) is GpuState.SPINS
    assert state_of([Sample(99, 0), Sample(100, 1)]) is GpuState.WORKS


def test_what_others_do_on_a_shared_gpu_is_not_a_ranks_work() -> None:
    """Samples of its processes count; without them nothing is known."""
    shared = DeviceUse(frozenset({1, 9}), 90, 50, {9: (90, 50)})
    assert samples_of(frozenset({1}), [shared]) == [(0, 0)]
    assert samples_of(frozenset({9}), [shared]) == [(90, 50)]
    assert samples_of(frozenset({1}), [shared._replace(processes=None)]) == []
    assert samples_of(frozenset({2}), [shared]) == []


def test_a_gpu_of_one_rank_speaks_for_it() -> None:
    """Where the driver has no samples of processes, as with MIG, and where these are late."""
    alone = DeviceUse(frozenset({1}), 90, 50, None)
    assert samples_of(frozenset({1, 2}), [alone, alone._replace(processes={})]) == [(90, 50), (90, 50)]


def test_the_busiest_of_several_gpus_decides() -> None:
    """A rank may hold more than its own."""
    looks = {gpu: [DeviceUse(frozenset({1}), kernels, work, None)] for gpu, kernels, work in ((0, 0, 0), (5, 97, 30))}
    (entry,) = report({1: frozenset({1}), 2: frozenset({2})}, looks)
    assert parse_uses(json.dumps([entry])) == {1: GpuUse((0, 5), GpuState.WORKS, 97, 30)}


def test_a_probe_that_was_killed_says_nothing() -> None:
    """Its output may end anywhere."""
    text = json.dumps([{"pid": 7, "gpus": [3], "state": "spins", "kernels": 100, "work": 0}])
    assert parse_uses(text) == {7: SPINS}
    assert all(parse_uses(text[:length]) == {} for length in range(len(text)))


# Stacks: py-spy's output becomes frames, and frames say what a rank is doing.


def dump(**names: list[tuple[str, str, int]]) -> str:
    """The output of ``py-spy dump --json`` for threads with the given frames; the thread "main" is the main one."""
    return json.dumps(
        [
            {
                "pid": 7,
                "os_thread_id": 7 if thread == "main" else 8,
                "thread_name": thread,
                "active": True,
                "owns_gil": False,
                "frames": [{"name": name, "filename": file, "line": line} for name, file, line in frames],
            }
            for thread, frames in names.items()
        ]
    )


def test_main_thread_comes_first() -> None:
    """Whatever the order of py-spy, the main thread is the one that is judged."""
    stack = parse_stack(dump(loader=[("get", "queue.py", 3)], main=[("step", "train.py", 5), ("main", "train.py", 9)]))
    assert stack is not None
    assert [str(frame) for frame in stack.main] == ["step (train.py:5)", "main (train.py:9)"]
    assert "thread loader" in str(stack)


def test_frames_of_the_launcher_are_left_out() -> None:
    """People see their program's frames only."""
    stack = parse_stack(
        dump(main=[("step", "train.py", 5), ("_run", "/x/opsd/launch/ranks/worker.py", 99), ("a", "libc", 0)])
    )
    assert stack is not None
    assert [frame.name for frame in stack.main] == ["step"]


@pytest.mark.parametrize("text", ["", "Error: Permission denied", "[]", "[{}]", '{"pid": 1}', dump(main=[])[:40]])
def test_garbage_is_no_stack(text: str) -> None:
    """What py-spy says when it fails or is cut off is not a stack."""
    assert parse_stack(text) is None


def frames(*pairs: tuple[str, str]) -> Stack:
    """A stack of the main thread alone."""
    return Stack((Thread("MainThread", False, False, tuple(Frame(name, file, 1) for name, file in pairs)),))


@pytest.mark.parametrize(
    ("stack", "collective", "busy"),
    [
        (frames(("wait", "x.py"), ("all_reduce", "torch/distributed/distributed_c10d.py")), "all_reduce", None),
        (frames(("gloo::AllreduceRing", "libtorch_cpu.so")), "gloo::AllreduceRing", None),
        (
            frames(
                ("reduce_scatter_single", "/s/torch/distributed/distributed_c10d.py"),
                ("FSDPParamGroup.post_backward", "/s/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py"),
                ("DisableContext.__call__.<locals>._fn", "/s/torch/_dynamo/eval_frame.py"),
            ),
            "reduce_scatter_single",
            None,
        ),
        (frames(("compile_fx", "/s/torch/_inductor/compile_fx.py"), ("step", "train.py")), None, "setup"),
        (frames(("barrier", "/s/c10d.py"), ("save", "/s/torch/distributed/checkpoint/x.py")), "barrier", None),
        (frames(("_save", "/s/torch/serialization.py"), ("step", "train.py")), None, "checkpoint"),
        (frames(("evaluate", "/s/mine.py")), None, "evaluation"),
        (frames(("forward", "/s/mine.py")), None, None),
        (frames(("forward", "m.py"), ("run_eval", "/s/mine.py")), None, "evaluation"),
        (frames(("Model.generate", "/s/mine.py")), None, "evaluation"),
        (frames(("losses", "m.py"), ("decorate_context", "/s/torch/utils/_contextlib.py")), None, "evaluation"),
        (frames(("step", "muon.py"), ("decorate_context", "/s/torch/utils/_contextlib.py")), None, None),
        (frames(("write", "x.py"), ("json_dump", "/s/mine.py")), None, "checkpoint"),
        (frames(("read", "/u/socket.py"), ("urlopen", "/usr/lib/urllib/request.py")), None, "setup"),
        (frames(("gc_collect_main", "/usr/bin/python3"), ("backward", "/s/mine.py")), None, "setup"),
        (frames(("checkpoint", "/s/torch/utils/checkpoint.py"), ("forward", "m.py")), None, None),
        (frames(("save", "/s/opsd/launch/observe/calls.py"), ("train", "m.py")), None, None),
        (Stack((Thread("M", True, True, (Frame("Engine::evaluate_function", "libtorch.so", 0),)),)), None, None),
        (Stack(()), None, None),
    ],
)
def test_what_a_stack_says(stack: Stack, collective: str | None, busy: str | None) -> None:
    """Waiting in a collective, compiling, saving and evaluating are told apart from other work."""
    assert stack.in_collective == collective
    assert stack.busy_as == busy


@pytest.mark.parametrize("innermost", ["clock_nanosleep", "nanosleep", "time_sleep"])
@pytest.mark.parametrize("owns_gil", [True, False])
def test_a_sleep_that_keeps_the_gil_is_no_sleep_on_purpose(innermost: str, owns_gil: bool) -> None:
    """A C function that sleeps with the GIL stops all threads; Python's own sleep gives it back."""
    stack = Stack((Thread("MainThread", False, owns_gil, (Frame(innermost, "libc.so.6", 0),)),))
    assert stack.asleep is not owns_gil


def test_only_waits_for_a_process_excuse() -> None:
    """Locks, collectives and the workers of a DataLoader are judged by their own limits."""
    assert frames(("read", "libc.so.6"), ("Queue.get", "multiprocessing/queues.py")).waits_for_process
    assert frames(("wait4", "libc.so.6"), ("Popen.wait", "subprocess.py")).waits_for_process
    for pool in ("multiprocessing/pool.py", "concurrent/futures/_base.py"):
        wait = (("futex", "libc.so.6"), ("Condition.wait", "/lib/python3.11/threading.py"))
        assert frames(*wait, ("wait", f"/lib/python3.11/{pool}"), ("map", "x.py")).waits_for_process
        assert not frames(*wait, ("wait", f"/home/u/{pool}")).waits_for_process
    assert not frames(("poll", "libc.so.6"), ("_try_get_data", "/s/torch/utils/data/dataloader.py")).waits_for_process
    assert not frames(("pthread_cond_wait", "libc.so.6"), ("acquire", "threading.py")).waits_for_process
    assert not frames(("read", "libc.so.6"), ("all_reduce", "distributed_c10d.py")).waits_for_process


# Which rank holds a hung job up.


WAITING = RankState(0, "collective", 20.0, "S", 41)


def job(*changes, count=4):
    """Ranks that wait in one collective, except for ``changes``: (rank, fields)."""
    ranks = [replace(WAITING, rank=number) for number in range(count)]
    for number, fields in changes:
        ranks[number] = replace(ranks[number], **fields)
    return ranks


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"process": "T"}, "stopped by a signal"),
        ({"process": "Z"}, "a zombie"),
        ({"process": None}, "its process is gone"),
        ({"process": "D"}, "cannot be interrupted"),
        ({"step": 40}, "it has completed step 40"),
        ({"phase": "backward"}, "it is in phase backward, the others wait for it in collective"),
        ({"phase": "data", "stuck_s": 20.2}, "it is in phase data"),
        ({"phase": "checkpoint"}, "it is in phase checkpoint"),
    ],
)
def test_the_rank_that_differs_is_named_with_the_reason(fields, said):
    """Whatever makes one rank differ from those that wait names it, and says so."""
    verdict = attribute_hang(job((2, fields)))
    assert verdict.rank == 2
    assert said in verdict.reason
    assert verdict.confidence >= 0.8


def test_a_stopped_process_counts_for_more_than_a_lower_step():
    """The kernel's word on a process is better evidence than how far its rank has come."""
    assert attribute_hang(job((1, {"process": "T"}), (3, {"step": 40}))).rank == 1


def test_a_rank_ahead_of_the_collective_is_not_to_blame():
    """Who has left the collective already waits for nobody and is waited for by nobody."""
    verdict = attribute_hang(job((0, {"phase": "optimizer"}), (2, {"phase": "forward"})))
    assert verdict.rank == 2


def test_forward_and_backward_alternate_so_the_earlier_change_decides():
    """Under gradient accumulation a rank in forward is not necessarily behind one in backward."""
    ranks = [RankState(0, "forward", 20.0, "R", 5), RankState(1, "backward", 26.0, "R", 5)]
    verdict = attribute_hang(ranks)
    assert verdict.rank == 1
    assert verdict.reason == "its page stopped changing first"


def test_ranks_that_all_wait_alike_leave_the_culprit_open():
    """If everybody here waits in the collective the cause may be elsewhere, and the confidence says so."""
    verdict = attribute_hang(job())
    assert verdict.confidence <= 0.2
    assert verdict.reason == "no rank stands out"


def test_the_only_rank_is_to_blame_unless_it_waits_for_other_nodes():
    """One rank on this node: stuck in its own work it is the culprit, in a collective it may be a victim."""
    assert attribute_hang([replace(WAITING, phase="backward")]).confidence == 0.9
    assert attribute_hang([WAITING]).confidence == 0.2
    assert attribute_hang([replace(WAITING, process="T")]).confidence == 0.9


STATES = st.builds(
    RankState,
    rank=st.integers(0, 15),
    phase=st.sampled_from(["other", "setup", "data", "forward", "backward", "collective", "optimizer", "checkpoint"]),
    stuck_s=st.floats(0, 1e4),
    process=st.sampled_from(["R", "S", "D", "T", "t", "Z", None]),
    step=st.integers(-1, 100),
)


@given(st.lists(STATES, min_size=1, max_size=16, unique_by=lambda state: state.rank), st.randoms())
def test_the_verdict_does_not_depend_on_the_order_of_the_ranks(ranks, random):
    """One of the ranks is named, evidence covers all of them with the culprit first, in whatever order they come."""
    verdict = attribute_hang(ranks)
    shuffled = list(ranks)
    random.shuffle(shuffled)
    assert verdict.rank in {state.rank for state in ranks}
    assert 0.0 < verdict.confidence <= 1.0
    assert len(verdict.evidence) == len(ranks)
    assert verdict.evidence[0].startswith(f"rank {verdict.rank}:")
    assert attribute_hang(shuffled).reason == verdict.reason
