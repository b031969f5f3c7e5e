"""The heap: what was freed goes back to the system."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent

import pytest

HOLES = """
    import ctypes, gc, re
    from opsd.agent import heap

    def resident():
        return int(re.search(r"VmRSS:\\s*(\\d+)", open("/proc/self/status").read())[1]) / 1024

    assert heap.settle()
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [libc.malloc(32_000) for _ in range(3000)]
    for block in blocks:
        ctypes.memset(block, 1, 32_000)
    for number, block in enumerate(blocks):
        if number % 10:
            libc.free(block)
    full, trim = resident(), heap.Trim()
    assert trim.if_due(1000.0) and not trim.if_due(1000.0 + heap.TRIM_EVERY_S - 1)
    print(full - resident())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="malloc_trim is glibc's")
def test_holes_in_the_heap_go_back_to_the_system() -> None:
    """Where one block in ten lives on, glibc by itself keeps all of the others."""
    run = subprocess.run([sys.executable, "-c", dedent(HOLES)], capture_output=True, text=True, check=True)
    assert float(run.stdout) > 40
