"""What ``opsd launch`` cannot start: one sentence and a documented exit code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import opsd
from opsd import exitcodes
from tests.fakes.launched import Launched

TWO = "--nproc-per-node=2"
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))


@pytest.mark.parametrize(
    ("flags", "program", "code", "says"),
    [
        ((), ("no-such.py",), exitcodes.NOT_FOUND, "there is no file"),
        (("-m",), ("no_such_module",), exitcodes.NOT_FOUND, "there is no module no_such_module"),
        (("-m",), ("xml.no_such",), exitcodes.NOT_FOUND, "there is no module xml.no_such that can be run"),
        (("-m",), ("xml",), exitcodes.NOT_FOUND, "there is no module xml that can be run"),
        (("--no-python",), ("no-such-program",), exitcodes.NOT_FOUND, "there is no program no-such-program"),
        (("--no-python",), ("./prog.py",), exitcodes.NOT_FOUND, "there is no program ./prog.py that can be executed"),
        (("--log-dir=/proc/x",), ("prog.py",), exitcodes.USAGE, "cannot be made"),
        (("--nnodes=2",), ("prog.py",), exitcodes.USAGE, "name them with --nodes"),
        (("--nproc-per-node=0",), ("prog.py",), exitcodes.USAGE, "is not a number of ranks"),
        (("--nproc_per_node=many",), ("prog.py",), exitcodes.USAGE, "is not a number of ranks"),
        (("--tee=9",), ("prog.py",), exitcodes.USAGE, "pairs such as 0:3,1:1"),
        (("--standalone", "--nnodes=2"), ("prog.py",), exitcodes.USAGE, "is for one node"),
        (("--rdzv-endpoint=n1:0", "--nnodes=2"), ("prog.py",), exitcodes.USAGE, "one from 1 to 65535"),
        (("--node-name=../n1",), ("prog.py",), exitcodes.USAGE, "cannot name a node"),
        (("--node-name=.n1",), ("prog.py",), exitcodes.USAGE, "cannot name a node"),
        (("--rdzv-backend=etcd",), ("prog.py",), exitcodes.USAGE, "without etcd"),
        (("-m", "--no-python"), ("prog.py",), exitcodes.USAGE, "exclude each other"),
        (("--events=/proc/x",), ("prog.py",), exitcodes.USAGE, "/proc/x cannot be written"),
        ((TWO, "-m"), ("torch.distributed.run", "prog.py"), exitcodes.USAGE, "each of 2 would train the whole model"),
        ((TWO, "--no-python"), (TORCHRUN, "prog.py"), exitcodes.USAGE, "torchrun starts ranks itself"),
        ((TWO,), (TORCHRUN, "prog.py"), exitcodes.USAGE, "torchrun starts ranks itself"),
        (("--no-such-flag",), ("prog.py",), exitcodes.USAGE, "No such option"),
    ],
)
def test_bad_input(tmp_path: Path, flags: tuple[str, ...], program: tuple[str, ...], code: int, says: str) -> None:
    """What cannot be launched is refused with its exit code and one sentence that says why, without a restart."""
    with Launched(tmp_path, "", *flags, program=program) as launched:
        assert launched.wait() == code
        assert launched.err.count(says) == 1
        assert "Traceback" not in launched.err
        assert launched.err.count("  resume  ") == len(launched.events("generation_started"))
        assert len(launched.events("generation_started")) <= 1


def test_a_working_directory_that_is_gone(tmp_path: Path) -> None:
    """Somebody has removed it below the shell: the paths of the command line mean nothing."""
    within = ("sh", "-c", 'mkdir gone && cd gone && rmdir ../gone && exec "$@"', "sh")
    with Launched(tmp_path, "", within=within, env={"PYTHONPATH": str(Path(opsd.__file__).parents[1])}) as launched:
        assert launched.wait() == exitcodes.NOT_FOUND
        assert launched.err.splitlines() == ["opsd: the working directory does not exist any more"]


def test_program_that_ends_at_once(tmp_path: Path) -> None:
    """An empty program is a finished run."""
    with Launched(tmp_path, "", TWO) as launched:
        assert launched.wait() == exitcodes.OK
        assert launched.event("finished")["reason"] == "all ranks finished"


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("echo 3 10", "is Python 3.10; ranks need 3.11 or later"),
        ("echo loading... >&2; echo no libpython3.12.so >&2; exit 127", "does not start: no libpython3.12.so"),
        ("kill -SEGV $$", "does not start: exit code -11"),
    ],
)
def test_interpreter_that_cannot_run_ranks(tmp_path: Path, does: str, says: str) -> None:
    """It is refused in a sentence, before there is a run."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{does}\n")
    python.chmod(0o755)
    with Launched(tmp_path, "", env={"PYTHON_EXEC": str(python)}) as launched:
        assert launched.wait() == exitcodes.NOT_FOUND
        assert launched.err == f"opsd: the interpreter {python}, named by PYTHON_EXEC, {says}\n"


def test_interpreter_that_ends_before_it_takes_an_order(tmp_path: Path) -> None:
    """What it ended with is the failure, not the broken channel to it."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\ntest $1 = -c && echo 3 11 || exit 5\n")
    python.chmod(0o755)
    with Launched(tmp_path, "", "--nproc-per-node=4", env={"PYTHON_EXEC": str(python)}) as launched:
        assert launched.wait() == exitcodes.FAILED
        assert "with exit code 5" in launched.event("finished")["reason"]


def test_interpreter_that_does_not_exist(tmp_path: Path) -> None:
    """An interpreter for the ranks that is not there is refused like a program that is not there."""
    with Launched(tmp_path, "", env={"PYTHON_EXEC": "/no/such/python"}) as launched:
        assert launched.wait() == exitcodes.NOT_FOUND
        assert "PYTHON_EXEC" in launched.err
