"""Failures: which rank it began with, what kind it is, and when restarting is pointless."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd import exitcodes
from opsd.launch.ranks.failure import Failure, RankError, RestartPolicy, classify, explain, first_cause, size_mismatch

KILLED = Failure(1, "signal SIGKILL", "signal", 10.0, step=5)
BUG = Failure(0, "exit code 1", "user", 10.0, step=5, error=RankError("ValueError", "bad shape 3", "train.py:7 in f"))
RESET = RankError("RuntimeError", "Connection reset by peer [127.0.0.1]:3342", "train.py:9 in step")


@pytest.mark.parametrize(
    ("exit", "error", "log", "kind"),
    [
        ("signal SIGKILL", None, "", "signal"),
        ("signal SIGSEGV", None, "gloo was here", "signal"),
        ("signal SIGABRT", None, "terminate called: ProcessGroupNCCL's watchdog got stuck", "communication"),
        ("signal SIGABRT", None, "free(): invalid pointer", "signal"),
        ("exit code 1", RankError("ValueError", "bad", ""), "Connection reset by peer", "user"),
        ("exit code 1", RESET, "", "communication"),
        ("exit code 1", RankError("DistBackendError", "NCCL error: remote process exited", ""), "", "communication"),
        ("exit code 1", RankError("AcceleratorError", "CUDA error: uncorrectable ECC error", ""), "", "hardware"),
        ("exit code 1", RankError("RuntimeError", "CUDA error: device-side assert triggered", ""), "", "user"),
        ("exit code 1", RankError("OSError", "[Errno 28] No space left on device", ""), "", "environment"),
        ("exit code 1", RankError("OSError", "[Errno 122] Disk quota exceeded", ""), "", "environment"),
        ("exit code 1", RankError("DistNetworkError", "EADDRINUSE", ""), "", "communication"),
        ("exit code 3", None, "usage: train.py", "user"),
        ("exit code 1", RankError("FileNotFoundError", "/data/ECCV24/x", ""), "", "user"),
        ("exit code 1", None, "| N/A 34C P0 70W / 700W | Volatile Uncorr. ECC 0 |", "user"),
        ("exit code 1", RankError("KeyError", "'Leios'", ""), "", "user"),
        ("exit code 1", RankError("OSError", "read failed: EIO", ""), "", "environment"),
    ],
)
def test_kinds(exit: str, error: RankError | None, log: str, kind: str) -> None:
    """The kind follows from exit, exception and, only without one, the log."""
    assert classify(exit, error, log) == kind


def test_a_mismatch_of_sizes_blames_no_rank() -> None:
    """Gloo aborts the rank that receives the wrong size, with a stack below its message, not the one that sent it."""
    message = "pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4. Received data size doesn't match expected size."
    assert size_mismatch(f"what(): {message}\nFatal Python error: Aborted\n").startswith("gloo got 8 bytes for 4: ")
    assert size_mismatch("pair.cc:553] Connection closed by peer [127.0.0.1]:35497") == ""


def test_victims_are_not_the_cause() -> None:
    """A rank that only lost its connection is not blamed, even if it was noticed first."""
    victim = Failure(0, "exit code 1", "communication", 9.0, error=RESET)
    assert first_cause([victim, KILLED]) is KILLED


@pytest.mark.parametrize(
    ("message", "peer"),
    [
        ("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:35497", True),
        ("NCCL error: remote process exited or there was a network error", True),
        ("Connection reset by peer while reading https://metrics.example.org", False),
        ("bad shape", False),
    ],
)
def test_a_lost_rank_is_told_from_a_lost_server(message: str, *, peer: bool) -> None:
    """Only a collective that broke off says that another rank has ended."""
    error = RankError("RuntimeError", message, "train.py:9 in step")
    failure = Failure(0, "exit code 1", classify("exit code 1", error, ""), 9.0, error=error)
    assert failure.lost_a_peer == peer


def test_first_of_several_causes() -> None:
    """Among true causes the earliest counts."""
    assert first_cause([KILLED, replace(BUG, t=9.9)]).rank == 0


def test_signature_leaves_numbers_out() -> None:
    """The same exception with another address or number is the same failure; another place is not."""
    assert BUG.error is not None
    other = replace(BUG, rank=3, error=replace(BUG.error, message="bad shape 4"))
    moved = replace(BUG, error=replace(BUG.error, where="train.py:8 in g"))
    assert other.signature == BUG.signature != moved.signature


def test_same_failure_three_times_without_progress_stops() -> None:
    """Three times the same failure at the same place: stop with the documented code."""
    policy = RestartPolicy(10)
    assert policy.judge(KILLED, "n1", furthest=5, committed=None) is None
    assert policy.judge(KILLED, "n1", furthest=5, committed=None) is None
    stop = policy.judge(KILLED, "n1", furthest=5, committed=None)
    assert stop is not None
    assert stop.code == exitcodes.REPEATED
    assert "3 times" in stop.reason


BROKEN = Failure(5, "exit code 1", "hardware", 10.0, step=5, error=RankError("AcceleratorError", "CUDA error", ""))


def test_hardware_that_fails_on_one_node_after_another_is_the_program() -> None:
    """Each node is tried twice at most; the third node is the last, and the first two were not held against it."""
    policy = RestartPolicy(10)
    tries = ["n1", "n1", "n2", "n2"]
    assert all(policy.judge(BROKEN, node, furthest=5, committed=None) is None for node in tries)
    assert (policy.repeats(BROKEN, "n1"), policy.repeats(BROKEN, "n2")) == (2, 2)
    later = RestartPolicy(10)
    later.restore(json.loads(json.dumps(policy.memory())))
    stop = later.judge(BROKEN, "n3", furthest=5, committed=None)
    assert stop is not None
    assert (stop.code, "on 3 nodes" in stop.reason) == (exitcodes.REPEATED, True)


def test_hardware_that_fails_on_one_node_ends_the_run_if_it_comes_back_there() -> None:
    """Nothing else could be done about it: a third start on the same node is the last."""
    policy = RestartPolicy(10)
    assert [policy.judge(BROKEN, "n1", furthest=5, committed=None) for _ in range(2)] == [None, None]
    stop = policy.judge(BROKEN, "n1", furthest=5, committed=None)
    assert stop is not None
    assert (stop.code, "3 times" in stop.reason) == (exitcodes.REPEATED, True)


def test_progress_makes_failures_different() -> None:
    """The same signal again and again is no loop as long as the run gets further in between."""
    policy = RestartPolicy(10)
    assert all(policy.judge(KILLED, "n1", furthest=step, committed=None) is None for step in range(5, 14))


def test_same_failure_limit_can_be_lifted() -> None:
    """With a limit of 0 only the number of restarts counts."""
    policy = RestartPolicy(10, same_limit=0)
    assert all(policy.judge(KILLED, "n1", furthest=5, committed=None) is None for _ in range(10))


def test_user_error_at_the_same_step_twice_stops() -> None:
    """An exception of the program at the same step twice is not tried a third time."""
    policy = RestartPolicy(10)
    assert policy.judge(BUG, "n1", furthest=5, committed=None) is None
    stop = policy.judge(replace(BUG, rank=1, t=20.0), "n1", furthest=5, committed=None)
    assert stop is not None
    assert stop.code == exitcodes.REPEATED
    assert "twice after step 5" in stop.reason


def test_user_error_at_another_step_is_tried_again() -> None:
    """The same exception elsewhere may be chance."""
    policy = RestartPolicy(10)
    assert policy.judge(BUG, "n1", furthest=5, committed=None) is None
    assert policy.judge(replace(BUG, step=9), "n1", furthest=9, committed=None) is None


def test_errors_before_the_first_step_are_apart_if_the_run_got_further() -> None:
    """A storage that could not be reached at the restarts of two days is no bug; without progress between it is."""
    policy, unreached = RestartPolicy(10), replace(BUG, step=None, reports=True)
    assert policy.judge(unreached, "n1", furthest=100, committed=None) is None
    assert policy.judge(unreached, "n1", furthest=100_000, committed=None) is None
    stop = policy.judge(unreached, "n1", furthest=100_000, committed=None)
    assert stop is not None
    assert "twice before the first step" in stop.reason


SOON, LATE = replace(BUG, step=None, soon=True), replace(BUG, step=None)


@pytest.mark.parametrize(
    ("failures", "limit", "said"),
    [
        ([SOON, SOON], 3, "failed twice soon after its start with the same error, and no step was seen"),
        ([LATE, LATE], 3, None),
        ([SOON, LATE], 3, None),
        ([SOON, replace(KILLED, step=None), SOON], 3, None),
        ([LATE, LATE, LATE], 3, "came 3 times and no step was seen"),
        ([LATE] * 6, 0, None),
        ([SOON] * 6, 0, None),
        ([BUG] * 6, 0, None),
        ([replace(LATE, reports=True)] * 2, 3, "failed twice before the first step"),
    ],
)
def test_where_steps_are_unknown_only_the_start_counts_as_one_place(
    failures: list[Failure], limit: int, said: str | None
) -> None:
    """A program that reports no step and has run for minutes may have done some."""
    policy = RestartPolicy(10, same_limit=limit)
    verdicts = [policy.judge(failure, "n1", furthest=None, committed=None) for failure in failures]
    assert not any(verdicts[:-1])
    assert (said is None) == (verdicts[-1] is None)
    if verdicts[-1] is not None and said is not None:
        assert said in verdicts[-1].reason


@pytest.mark.parametrize(
    ("failure", "when"),
    [
        (BUG, "after step 5"),
        (LATE, "before a step was seen"),
        (replace(LATE, reports=True), "before its first step"),
    ],
)
def test_how_far_the_program_had_come(failure: Failure, when: str) -> None:
    """Nobody says that no step was done where steps are unknown."""
    stop = RestartPolicy(0).judge(failure, "n1", furthest=None, committed=None)
    assert stop is not None
    assert f"Rank 0 on n1 failed {when} with ValueError" in explain(stop, failure, "n1", "", "")


def test_restarts_run_out() -> None:
    """Different failures without durable progress use up the restarts."""
    policy = RestartPolicy(2)
    failures = [replace(KILLED, exit=f"signal {name}") for name in ("SIGBUS", "SIGILL", "SIGFPE")]
    verdicts = [policy.judge(failure, "n1", furthest=None, committed=None) for failure in failures]
    assert verdicts[:2] == [None, None]
    assert verdicts[2] is not None
    assert verdicts[2].code == exitcodes.FAILED


def test_no_restarts_means_none() -> None:
    """With --max-restarts 0 the first failure is the last, and its code is that of a failure."""
    stop = RestartPolicy(0).judge(BUG, "n1", furthest=5, committed=None)
    assert stop is not None
    assert stop.code == exitcodes.FAILED


def test_committed_steps_refill_the_restarts() -> None:
    """A run of weeks may restart more often than the budget, as long as every stretch gets far enough."""
    policy = RestartPolicy(1, refill_steps=100)
    assert all(policy.judge(KILLED, "n1", furthest=at + 5, committed=at) is None for at in range(100, 5000, 100))


@given(
    st.lists(st.sampled_from([KILLED, BUG, replace(KILLED, exit="signal SIGBUS"), replace(BUG, step=6)]), min_size=9)
)
def test_never_loops(failures: list[Failure]) -> None:
    """Without durable progress, whatever the failures, the run stops after the restarts it was given."""
    policy = RestartPolicy(8)
    assert any(policy.judge(failure, "n1", furthest=6, committed=None) for failure in failures)
