"""Simulated GPUs, controlled through the state file that they share with the simulated NVML library (``nvml.c``).

Start the reader (the agent, nvitop) with ``OPSD_SIMULATED_NVML`` naming the state file and the built
``libnvidia-ml.so.1`` as its library, then change the GPUs while it runs::

    library = build(folder)
    with SimulatedGpus.create(folder / "gpus.state") as gpus:
        gpus[3].load(utilization=98, power_watts=650)
        gpus[3].cooling = 0.6
"""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from opsd.simulated.gpu import MAGIC, MAX_GPUS, STATE_BYTES, VERSION, SimulatedGpu, State, make_idle

__all__ = ["DRIVERS", "STATE_ENV", "NoCompilerError", "SimulatedGpus", "SimulationError", "build"]

STATE_ENV: Final = "OPSD_SIMULATED_NVML"
DRIVERS: Final = (570, 575, 580)
"""Driver generations whose field numbers can be simulated."""


class SimulatedGpus:
    """The GPUs of one state file. Use ``create`` to make the file, ``open`` for an existing one."""

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        self.path = path
        self._mapping = mapping
        self._state = State.from_buffer(mapping)
        self._gpus = [SimulatedGpu(self._state.gpus[i], i) for i in range(self._state.count)]

    @classmethod
    def create(cls, path: Path, *, count: int = 8, driver: int = 580) -> Self:
        """Write a new state file of ``count`` idle H100 GPUs under a driver of the numbering ``driver``.

        Raises ValueError for a count or driver that cannot be simulated, OSError if the file cannot be written.
        """
        if not 0 <= count <= MAX_GPUS:
            raise ValueError(f"{count} GPUs cannot be simulated, only 0 to {MAX_GPUS}")
        if driver not in DRIVERS:
            raise ValueError(f"driver {driver} cannot be simulated, only {', '.join(map(str, DRIVERS))}")
        state = State(magic=MAGIC, version=VERSION, size=STATE_BYTES, count=count, driver=driver)
        for index in range(count):
            make_idle(state.gpus[index], index)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_bytes(bytes(state))
        draft.rename(path)
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map an existing state file. Raises SimulationError if it is not one, OSError if it cannot be read."""
        with open(path, "r+b") as file:
            if os.fstat(file.fileno()).st_size != STATE_BYTES:
                raise SimulationError(f"{path} is not a state file of simulated GPUs of this opsd release")
            mapping = mmap.mmap(file.fileno(), STATE_BYTES)
        header = State.from_buffer_copy(mapping)
        if (header.magic, header.version, header.size) != (MAGIC, VERSION, STATE_BYTES):
            mapping.close()
            raise SimulationError(f"{path} is not a state file of simulated GPUs of layout {VERSION}")
        return cls(path, mapping)

    def __getitem__(self, index: int) -> SimulatedGpu:
        return self._gpus[index]

    def __iter__(self) -> Iterator[SimulatedGpu]:
        return iter(self._gpus)

    def __len__(self) -> int:
        return len(self._gpus)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def environment(self, library: Path) -> dict[str, str]:
        """Variables that make any NVML client see these GPUs through ``library``."""
        return {STATE_ENV: str(self.path), "LD_LIBRARY_PATH": str(library.parent)}

    def fail_init(self, code: int) -> None:
        """Make nvmlInit return ``code`` from now on, for instance 18 (driver/library mismatch); 0 makes it succeed."""
        self._state.init_error = code

    def reload_driver(self) -> None:
        """Make every client's session invalid until it calls nvmlInit again, as after a reload of the driver."""
        self._state.reloads += 1

    def close(self) -> None:
        """Close the file; it stays on disk for its other users. GPU objects taken from here before keep working."""
        self._gpus.clear()
        del self._state


LIBRARY: Final = "libnvidia-ml.so.1"

_FOLDER = Path(__file__).parent
SOURCES: Final = ("nvml.c", "fields.h", "gpm.h", "session.h", "gpu.h")


class NoCompilerError(Exception):
    """The machine has no C compiler, so the simulated NVML cannot be built."""


class SimulationError(Exception):
    """The simulated NVML cannot be built or its state file cannot be used; the message says why."""


def build(folder: Path, path: str | None = None) -> Path:
    """Compile the simulated NVML into ``folder`` and return the path of its ``libnvidia-ml.so.1``.

    A library built before from the same source is reused. ``path`` is the search path for the compiler, by default
    PATH. Raises NoCompilerError without ``cc`` or ``gcc`` there, SimulationError if the compiler fails,
    OSError if the folder cannot be written.
    """
    source = b"".join((_FOLDER / name).read_bytes() for name in SOURCES)
    library = folder / f"nvml-{hashlib.sha256(source).hexdigest()[:16]}" / LIBRARY
    if library.exists():
        return library
    compiler = shutil.which("cc", path=path) or shutil.which("gcc", path=path)
    if compiler is None:
        raise NoCompilerError("no C compiler (cc or gcc) on the PATH; install one, for instance: apt-get install gcc")
    library.parent.mkdir(parents=True, exist_ok=True)
    draft = library.with_name(f".{LIBRARY}.{os.getpid()}")
    command = [compiler, "-std=c11", "-O2", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}", "-o", str(draft)]
    result = subprocess.run(
        [*command, str(_FOLDER / SOURCES[0]), "-lm", "-lpthread"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if result.returncode != 0:
        raise SimulationError(f"{compiler} cannot compile {_FOLDER / SOURCES[0]}: {result.stderr.strip()[-2000:]}")
    draft.rename(library)
    return library
