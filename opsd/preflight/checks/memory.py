"""Memory bandwidth of every NUMA node: all its cores copy buffers larger than any cache.

The copy is libc's memmove through ctypes, which releases the GIL. Every byte copied counts as two bytes moved, as in
STREAM's Copy kernel; libc's non-temporal stores for large buffers make that correct.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from typing import Final

from opsd.preflight.base import Check, Context, Measure, Measurement, Outcome, Peers, Progress
from opsd.preflight.checks.numa import numa_nodes

_BUFFER: Final = 64 << 20
"""Per core: larger than a core's share of any present last-level cache."""
_MEMORY_SHARE: Final = 0.25


def run(context: Context, progress: Progress) -> Outcome:
    """Copy for ``context.seconds`` on every NUMA node in turn."""
    allowed = os.sched_getaffinity(0)
    nodes = {node: sorted(cores & allowed) for node, cores in numa_nodes(context.sys).items() if cores & allowed}
    measurements = []
    for done, (node, cores) in enumerate(nodes.items()):
        progress(done / len(nodes), "")
        measurements.append(
            Measurement("bandwidth", _copy_on(cores, context.seconds / len(nodes)), f"NUMA node {node}")
        )
    return Outcome(tuple(measurements))


def _copy_on(cores: list[int], seconds: float) -> float:
    """Bytes per second read and written by one thread on each of ``cores``."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    share = int(free * _MEMORY_SHARE / (2 * len(cores)))
    size = max(mmap.PAGESIZE, min(_BUFFER, share) // mmap.PAGESIZE * mmap.PAGESIZE)
    ready = threading.Barrier(len(cores))
    copied: list[float] = []

    def copy(core: int) -> None:
        os.sched_setaffinity(0, {core})
        source, target = mmap.mmap(-1, size), mmap.mmap(-1, size)
        from_address, to_address = (ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in (source, target))
        ctypes.memset(from_address, 1, size)  # the first touch places the pages on this NUMA node
        ctypes.memset(to_address, 1, size)
        ready.wait()
        began, count = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - began) < seconds:
            ctypes.memmove(to_address, from_address, size)
            count += 1
        copied.append(2 * size * count / elapsed)

    threads = [threading.Thread(target=copy, args=(core,), daemon=True) for core in cores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(copied)


CHECK = Check(
    name="memory",
    title="Memory bandwidth of every NUMA node",
    run=run,
    seconds={"quick": 2, "standard": 10, "burn-in": 60, "spare": 10},
    measures=(
        Measure(
            "bandwidth", "bytes_per_second", "copy bandwidth", better="higher", peers=Peers(0.10, 0.25), noise=0.10
        ),
    ),
    needs=frozenset({"exclusive"}),
    advice="compare `dmidecode -t memory` with a healthy node: a missing or downclocked DIMM halves a channel",
)
