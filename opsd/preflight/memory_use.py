"""Memory use of the ranks of a drill: per GPU through NVML, or per process without GPUs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from opsd.collectors.base import NoData
from opsd.collectors.lib.nvml import series as nvml
from opsd.collectors.nvml import NvmlCollector, NvmlError

_INTERVAL_S: Final = 0.5
_MIB: Final = 1 << 20


class MemoryUse:
    """Samples between ``__enter__`` and ``__exit__``. ``pids`` returns the current ranks' processes.

    ``taken`` is the peak in bytes: of any device beyond its use at the start, or of any rank's resident memory; None if
    nothing was measured. ``share`` is the largest share of a GPU's memory in use, None without GPUs.
    """

    def __init__(self, pids: Callable[[], Iterable[int]], library: str | None = None, proc: str = "/proc") -> None:
        self._pids, self._proc = pids, Path(proc)
        self._collector = NvmlCollector(library, profiling=False)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._before: dict[str, float] = {}
        self.taken: float | None = None
        self.share: float | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            used = self._gpus()
            self._before = self._before or used
            taken = [value - self._before.get(gpu, 0.0) for gpu, value in used.items()]
            if not used:
                taken = [size for pid in self._pids() if (size := resident(self._proc, pid)) is not None]
            if taken:
                self.taken = max(self.taken or 0.0, *taken)

    def _gpus(self) -> dict[str, float]:
        """Bytes in use by GPU."""
        try:
            reading = self._collector.collect()
        except NvmlError:
            return {}
        if isinstance(reading, NoData):
            return {}
        used = {s.labels[0]: s.value * _MIB for s in reading.samples if s.metric is nvml.FB_USED}
        total = {s.labels[0]: s.value for s in reading.samples if s.metric is nvml.MEMORY_TOTAL}
        shares = [value / total[gpu] for gpu, value in used.items() if total.get(gpu)]
        if shares:
            self.share = max(self.share or 0.0, *shares)
        return used


def resident(proc: Path, pid: int) -> float | None:
    """The peak resident memory of a process in bytes, None if it has ended."""
    with suppress(OSError):
        for line in (proc / str(pid) / "status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return float(line.split()[1]) * 1024
    return None
