"""Strangers at the port of a running launcher: scanners, probes, clients that have lost their way, by the thousand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes import unauthenticated
from tests.fakes.launched import TRAIN
from tests.fakes.nodes import Nodes

ENDLESS = TRAIN + "\ntrain(100000, step_s=0.02)\n"
FEW_DESCRIPTORS = ("sh", "-c", 'ulimit -n 256 && exec "$@"', "sh")


@pytest.mark.slow
@pytest.mark.parametrize("sources", [1, 100])
def test_a_run_goes_on_and_restarts_beside_thousands_of_strangers(tmp_path: Path, sources: int) -> None:
    """With 256 descriptors in all: starting ranks needs pipes, files and processes, which they must not use up."""
    with Nodes(tmp_path, ENDLESS, "--nnodes=2", count=2, within=FEW_DESCRIPTORS) as nodes:
        nodes.until(lambda: all(nodes.state(name)["state"] == "running" for name in nodes.names))
        calling = [
            subprocess.Popen(
                [sys.executable, unauthenticated.__file__, nodes.address(name), str(nodes.port), "1100", str(sources)],
                stdout=subprocess.PIPE,
            )
            for name in nodes.names
        ]
        try:
            for process in calling:
                assert process.stdout is not None and process.stdout.readline()
            for restarts in range(1, 7):
                assert nodes.ask("n1", cmd="restart") == {"ok": True}
                nodes.until(lambda restarts=restarts: len(nodes.events("resumed")) == restarts)  # type: ignore[misc]
            assert not nodes.events("node_lost")
            assert [process.poll() for process in calling] == [None, None]
        finally:
            for process in calling:
                process.kill()
                process.communicate()
        assert all(nodes.state(name)["state"] == "running" for name in nodes.names)
