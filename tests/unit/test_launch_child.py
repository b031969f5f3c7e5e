"""The end of a process that the launcher has started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from opsd.collectors.lib.processes import process_letter
from opsd.launch.io.loop import Loop
from opsd.launch.ranks.process import Exit, spawn
from tests.fakes.clock import until

PROGRAM = "import sys; sys.stdin.read(); sys.exit(3)"
TRACER = """
import ctypes, os, sys
libc, PTRACE_SEIZE = ctypes.CDLL(None, use_errno=True), 0x4206
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
refused = libc.ptrace(PTRACE_SEIZE, int(sys.argv[1]), None, None)
print(os.strerror(ctypes.get_errno()) if refused else "", flush=True)
sys.stdin.read()
"""


def test_a_child_that_ends_under_a_debugger_is_noticed_once_that_lets_go() -> None:
    """As py-spy may be attached at the moment of a rank's end."""
    loop, seen = Loop(), list[Exit | None]()
    reader, writer = os.pipe()
    child = spawn([sys.executable, "-c", PROGRAM], env={}, cwd=Path("/"), output=2, stdin=reader)
    os.close(reader)
    command = [sys.executable, "-c", TRACER, str(child.pid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as tracer:
        assert tracer.stdin is not None
        assert tracer.stdout is not None
        refused = tracer.stdout.readline().strip()
        os.close(writer)
        until(lambda: process_letter(child.pid) == "Z")

        def ended() -> None:
            seen.append(child.exit())
            loop.stop()

        def let_go() -> None:
            seen.append(child.exit())
            tracer.stdin.close()  # type: ignore[union-attr]

        child.watch(loop, ended)
        loop.later(0.5, let_go)
        loop.later(60.0, loop.stop)
        loop.run()
    child.reap()
    if refused:
        pytest.skip(f"no process can be traced here: {refused}")
    assert seen == [None, Exit(3)]
