"""Stacks: py-spy's output becomes frames, and frames say what a rank is doing."""

from __future__ import annotations

import json

import pytest

from opsd.launch.hangs.stacks import Frame, Stack, Thread, parse_stack


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
