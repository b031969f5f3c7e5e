"""Builds the simulated ``libnvidia-ml.so.1`` with the machine's C compiler."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

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
