"""GPUs through the DCGM host engine, where it runs on the node without dcgm-exporter: by DCGM's own Python bindings.

The engine watches the counters already; a reader gets what it has. Its bindings are in no package index; they come with
DCGM, in a separate folder.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from opsd.collectors.base import Metric, Sample
from opsd.collectors.lib.listener import UntrustedError, check_owner, connect

FOLDERS: Final = (
    Path("/usr/share/datacenter-gpu-manager-4/bindings/python3"),
    Path("/usr/local/dcgm/bindings/python3"),
)
"""The paths in the packages of DCGM 4 and 3."""
PORT: Final = 5555
LOCAL: Final = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
INTERVAL_US: Final = 1_000_000
KEEP_S: Final = 60.0


class EngineError(Exception):
    """The host engine runs and cannot be read; the message says why in one sentence."""


class Reader(Protocol):
    """What is used of DCGM's class ``DcgmReader``: values by GPU and field, and what the GPUs are called."""

    m_gpuIdToUUId: Mapping[int, Any]
    m_gpuIdToBusId: Mapping[int, Any]
    m_dcgmSystem: Any

    def Init(self) -> None: ...

    def GetLatestGpuValuesAsFieldIdDict(self) -> Mapping[int, Mapping[int, Any]]: ...


def find_bindings(folders: Sequence[Path] = FOLDERS) -> Path | None:
    """The folder with the bindings, None if DCGM is not installed. One that others may write is none."""
    for folder in folders:
        try:
            info = (folder / "DcgmReader.py").stat()
        except OSError:
            continue
        if info.st_uid in (0, os.getuid()) and not stat.S_IMODE(info.st_mode) & 0o022:
            return folder
    return None


def runs(uids: frozenset[int], address: tuple[str, int] = ("localhost", PORT), timeout_s: float = 0.5) -> bool:
    """True if a process of ``uids`` listens where the host engine does. Raises UntrustedError if it is another's."""
    try:
        connect(*address, uids, timeout_s).close()
    except OSError:
        return False
    return True


def check_connections(uids: frozenset[int], port: int = PORT) -> None:
    """Raise UntrustedError if this process has a connection to a ``port`` of this node that is not held by ``uids``.

    The bindings connect by themselves, perhaps to another listener than the one that was looked at before.
    """
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if path.is_socket():
                with socket.socket(fileno=os.dup(int(path.name))) as one:
                    if one.family in LOCAL and one.getpeername()[:2] == (LOCAL[one.family], port):
                        check_owner(one, uids, time.monotonic())


def new_reader(folder: Path, names: Sequence[str], hostname: str = "localhost") -> tuple[Reader, dict[int, str]]:
    """A connected reader of the fields ``names``, as far as this DCGM has them, and the names by DCGM's numbers.

    Raises EngineError.
    """
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # behind everything else: its modules import each other by bare names
    try:
        fields = importlib.import_module("dcgm_fields")
        numbers = {getattr(fields, name): name for name in names if hasattr(fields, name)}
        reader: Reader = importlib.import_module("DcgmReader").DcgmReader(
            hostname=hostname, fieldIds=list(numbers), updateFrequency=INTERVAL_US, maxKeepAge=KEEP_S,
            fieldGroupName=f"opsd_{os.getpid()}",
        )  # fmt: skip
        reader.Init()
    except Exception as error:  # the bindings raise classes of their own for every status of DCGM
        raise EngineError(f"the DCGM host engine cannot be read: {type(error).__name__}: {error}") from error
    return reader, numbers


class HostEngine:
    """Reads ``metrics`` (named as DCGM's fields) once the engine runs; ``make`` connects to it."""

    def __init__(
        self,
        metrics: Mapping[str, Metric],
        *,
        folders: Sequence[Path] = FOLDERS,
        uids: frozenset[int] = frozenset({0}),
        running: Callable[[], bool] | None = None,
        make: Callable[[Path, Sequence[str]], tuple[Reader, dict[int, str]]] = new_reader,
        hostname: str = os.uname().nodename,
    ) -> None:
        # Profiling fields need a licence of their own and fail as a group; the driver is asked for what they tell.
        self._metrics = {name: metric for name, metric in metrics.items() if not name.startswith("DCGM_FI_PROF_")}
        self._folders = folders
        self._uids = uids
        self._running = running or partial(runs, uids)
        self._make = make
        self._hostname = hostname
        self._reader: tuple[Reader, dict[int, str]] | None = None

    def read(self) -> tuple[Sample, ...] | None:
        """The engine's newest values; None if there is no engine. Raises EngineError, and UntrustedError."""
        folder = find_bindings(self._folders)
        if folder is None or not self._running():
            self._reader = None
            return None
        if self._reader is None:
            self._reader = self._make(folder, list(self._metrics))
        reader, names = self._reader
        self._check_connections()
        try:
            samples = tuple(self._samples(reader, names))
        except Exception as error:  # see new_reader
            self._reader = None
            raise EngineError(f"the DCGM host engine cannot be read: {type(error).__name__}: {error}") from error
        if not samples:
            self._reader = None
            raise EngineError("the DCGM host engine runs and tells nothing of any GPU")
        return samples

    def _check_connections(self) -> None:
        try:
            check_connections(self._uids)
        except UntrustedError:
            self._reader = None
            raise

    def _samples(self, reader: Reader, names: Mapping[int, str]) -> Iterator[Sample]:
        for gpu, values in reader.GetLatestGpuValuesAsFieldIdDict().items():
            identity = reader.m_dcgmSystem.discovery.GetGpuAttributes(gpu).identifiers
            labels = (
                str(gpu), _text(reader.m_gpuIdToUUId[gpu]), _text(reader.m_gpuIdToBusId[gpu]), f"nvidia{gpu}",
                _text(identity.deviceName), self._hostname, self._hostname,
            )  # fmt: skip
            for number, value in values.items():
                if number in names and isinstance(value, int | float):
                    yield Sample(self._metrics[names[number]], float(value), labels)


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
