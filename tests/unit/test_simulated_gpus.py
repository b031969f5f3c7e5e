"""The state file of the simulated GPUs and the build of their library."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from opsd.simulated import gpus
from opsd.simulated.gpus import STATE_BYTES, NoCompilerError, SimulatedGpus, SimulationError, build

needs_compiler = pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="no C compiler")


@needs_compiler
def test_the_mirror_of_the_layout_fits(tmp_path: Path) -> None:
    """C and Python agree on the size of the state file."""
    code = f"import ctypes; print(ctypes.CDLL({str(build(tmp_path))!r}).opsd_simulated_nvml())"
    size = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(size) == STATE_BYTES


@needs_compiler
def test_the_library_is_built_once_per_source(tmp_path: Path) -> None:
    """Starting the demo again does not wait for a compiler."""
    first = build(tmp_path)
    built = first.stat().st_mtime_ns
    assert build(tmp_path) == first
    assert first.stat().st_mtime_ns == built
    assert first.name == "libnvidia-ml.so.1"


def test_every_source_is_shipped_and_hashed() -> None:
    """A change of a header must lead to a new library."""
    folder = Path(gpus.__file__).parent
    assert {path.name for path in folder.glob("*.[ch]")} == set(gpus.SOURCES)


def test_without_a_compiler_that_is_said(tmp_path: Path) -> None:
    """With what to do about it."""
    with pytest.raises(NoCompilerError, match="apt-get install gcc"):
        build(tmp_path, path=str(tmp_path))


def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    """Its own words are the best hint."""
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'fatal error: math.h: No such file' >&2\nexit 1\n")
    compiler.chmod(0o755)
    with pytest.raises(SimulationError, match=r"math\.h"):
        build(tmp_path, path=str(tmp_path))


def test_changes_are_seen_by_everyone_who_has_the_file(tmp_path: Path) -> None:
    """The demo drives GPUs that it created; a test may look at them."""
    with SimulatedGpus.create(tmp_path / "gpus", count=2) as ours, SimulatedGpus.open(tmp_path / "gpus") as theirs:
        ours[1].lost = True
        ours[0].cooling = 0.5
        assert (theirs[1].lost, theirs[0].lost, theirs[0].cooling) == (True, False, 0.5)
        assert len(theirs) == 2
        assert ours[0].uuid != ours[1].uuid


def test_gpus_outlive_the_handle_they_came_from(tmp_path: Path) -> None:
    """Closing must not leave pointers into unmapped memory."""
    with SimulatedGpus.create(tmp_path / "gpus") as gpus:
        gpu = gpus[0]
    gpu.lost = True
    assert SimulatedGpus.open(tmp_path / "gpus")[0].lost


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"x" * STATE_BYTES])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    """Neither a short one nor one with another beginning is written to."""
    (tmp_path / "gpus").write_bytes(content)
    with pytest.raises(SimulationError, match="not a state file"):
        SimulatedGpus.open(tmp_path / "gpus")
    assert (tmp_path / "gpus").read_bytes() == content


def test_what_cannot_be_simulated_is_refused(tmp_path: Path) -> None:
    """With what can be."""
    with pytest.raises(ValueError, match="0 to 16"):
        SimulatedGpus.create(tmp_path / "gpus", count=17)
    with pytest.raises(ValueError, match="570, 575, 580"):
        SimulatedGpus.create(tmp_path / "gpus", driver=535)
    gpus = SimulatedGpus.create(tmp_path / "gpus")
    with pytest.raises(ValueError, match="room for 8"):
        gpus[0].set_processes([(pid, 0) for pid in range(1, 10)])
    with pytest.raises(ValueError, match="room for"):
        gpus[0].set_unsupported(["nvmlDeviceGetSomething"] * 100)
