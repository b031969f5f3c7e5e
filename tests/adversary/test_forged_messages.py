"""A user whose program crashes in a file of a chosen name: the kernel's log then has any text that the user likes."""

from __future__ import annotations

import platform
import signal
from pathlib import Path

import pytest

from tests.adversary.attacker import Attacker
from tests.adversary.attacks import crash_in_a_file
from tests.adversary.node import Node
from tests.fakes.clock import eventually

EVENTS = "opsd_kernel_events_total"
FAULT = "mlx5_core 0000:3b:00.0: Port module event[error]: module 0, High temperature"
LOADED = "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  580.1"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the crash is written in machine code of x86-64")
@pytest.mark.parametrize(("name", "process"), [(FAULT, "python"), (LOADED, "EDAC MC0: 9 UE")])
def test_a_crash_reports_no_broken_hardware(
    node: Node, attacker: Attacker, tmp_path_factory: pytest.TempPathFactory, name: str, process: str
) -> None:
    """A crash is all that it counts as, whatever the file and the process are called."""
    if Path("/proc/sys/debug/exception-trace").read_text().strip() != "1":
        pytest.skip("this kernel does not log crashes (debug.exception-trace)")
    own = node.shm / "files"
    attacker.run(make_folder, str(own))
    with node.agent():
        before = node.series(EVENTS)
        assert attacker.run(crash_in_a_file, str(own), name, process) == f"{-signal.SIGSEGV}\n"
        assert eventually(lambda: node.series(EVENTS)['kind="segfault"'] > before['kind="segfault"'])
        after = node.series(EVENTS)
        assert {kind for kind in after if after[kind] != before[kind]} == {'kind="segfault"'}


def make_folder(path: str) -> None:
    """A folder of the attacker's own."""
    from pathlib import Path

    Path(path).mkdir()
