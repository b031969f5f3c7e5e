"""Cost of a rank-page update, and a test that it makes no system call."""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import struct
import time
from collections.abc import Callable
from pathlib import Path

from opsd.bench import memory_folder
from opsd.client import Reporter

ROUNDS, CALLS = 9, 50_000
_EXIT_CALL = {"x86_64": 60, "aarch64": 93}
"""System call number of exit(2), as the filter also forbids exit_group, which os._exit calls."""


def run() -> dict[str, float | int | str]:
    """Microseconds per phase change and per step report; medians of nine rounds of 50,000 calls.

    It is compared with a JSON heartbeat file replaced by rename, the standard library's alternative.
    """
    with memory_folder() as folder:
        reporter = Reporter(folder / "rank-0000.page")
        phase = reporter.phase("forward")

        def change() -> None:
            for _ in range(CALLS // 2):
                with phase:
                    pass

        def step() -> None:
            for _ in range(CALLS):
                reporter.step(tokens=4096, loss=2.0, grad_norm=1.0)

        def heartbeat() -> None:
            for number in range(CALLS // 100):
                _heartbeat_file(Path(folder), number)

        phase_us = _microseconds(change, CALLS)
        step_us = _microseconds(step, CALLS)
        file_us = _microseconds(heartbeat, CALLS // 100)
        return {
            "ours_phase_us": phase_us,
            "ours_step_us": step_us,
            "ours_system_calls": _system_calls(reporter),
            "heartbeat_file_us": file_us,
            "ratio_step": step_us / file_us,
        }


def _microseconds(work: Callable[[], None], calls: int) -> float:
    work()
    rounds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        rounds.append((time.perf_counter() - began) / calls * 1e6)
    return statistics.median(rounds)


def _heartbeat_file(folder: Path, step: int) -> None:
    draft = folder / "heartbeat.tmp"
    draft.write_text(f'{{"step": {step}, "phase": "forward", "t": {time.time()}}}')
    draft.replace(folder / "heartbeat.json")


def _system_calls(reporter: Reporter) -> int | str:
    """0 if the update path runs under a seccomp filter that kills the process at any system call but exit."""
    phase = reporter.phase("data")
    child = os.fork()
    if child == 0:
        libc = ctypes.CDLL(None)
        leave = _EXIT_CALL.get(platform.machine())
        if leave is None or not _forbid_calls_except(libc, leave):
            os._exit(2)
        for _ in range(1000):
            with phase:
                pass
            reporter.step(tokens=1, loss=1.0, grad_norm=1.0)
        libc.syscall(leave, 0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 2:
        return "unknown: no seccomp filter here"
    return 0 if status == 0 else "some: killed by the seccomp filter"


def _forbid_calls_except(libc: ctypes.CDLL, number: int) -> bool:
    """Install the filter `nr == number ? allow : kill` (classic BPF, seccomp(2)); False if the kernel refuses."""
    load, equal, ret, allow, kill = 0x20, 0x15, 0x06, 0x7FFF0000, 0x80000000
    program = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in ((load, 0, 0, 0), (equal, 0, 1, number), (ret, 0, 0, allow), (ret, 0, 0, kill))
    )
    code = ctypes.create_string_buffer(program)
    filter_ = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 4, ctypes.addressof(code)))
    no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    refused = libc.prctl(no_new_privileges, 1, 0, 0, 0) or libc.prctl(
        set_seccomp, filter_mode, ctypes.byref(filter_), 0, 0
    )
    return int(refused) == 0
