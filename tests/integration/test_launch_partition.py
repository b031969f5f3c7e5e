"""A run whose nodes or network are not as they should be: no network, wrong clocks, damaged data, read-only folders."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from opsd import exitcodes
from opsd.spares import pool
from opsd.spares.pool import SpareState
from tests.fakes.launched import TRAIN
from tests.fakes.nodes import Nodes
from tests.fakes.tmpfs import tmpfs

ENDLESS = TRAIN + "\ntrain(100000, step_s=0.02)\n"
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")
TWO = ("--nnodes=2", "--spares=1")


@pytest.fixture
def a_minute_ahead() -> dict[str, str]:
    """The environment of a node whose clock is wrong; what it measures by the monotonic one is right."""
    if not FAKETIME.exists():
        pytest.skip("not installed: libfaketime (see tests/debian-packages.txt)")
    return {"LD_PRELOAD": str(FAKETIME), "FAKETIME": "+60s", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}


@pytest.fixture
def make_read_only() -> Iterator[Callable[[Path], None]]:
    """Puts an empty file system that cannot be written in the place of a folder, as a server that has failed does."""
    with ExitStack() as stack:
        yield lambda folder: stack.enter_context(tmpfs(folder, "ro"))


class Network:
    """A network of its own, which can be taken away from all that are on it."""

    def __init__(self) -> None:
        command = ["unshare", "--net", "sh", "-c", "ip link set lo up && echo up && exec sleep infinity"]
        self._holder = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        self.up = self._holder.stdout.readline() == b"up\n"
        self.within = ("nsenter", f"--net=/proc/{self._holder.pid}/ns/net")

    def set(self, state: str) -> None:
        subprocess.run([*self.within, "ip", "link", "set", "lo", state], check=True)

    def close(self) -> None:
        self._holder.kill()
        self._holder.communicate()


@pytest.fixture
def network() -> Iterator[Network]:
    """The network of a test's nodes."""
    if os.geteuid() != 0:
        pytest.skip("a network of its own needs root")
    with closing(Network()) as network:
        if not network.up:
            pytest.skip("a network of its own is not permitted here")
        yield network


@pytest.mark.parametrize(
    "outage_s", [pytest.param(8.0, marks=pytest.mark.slow), pytest.param(45.0, marks=pytest.mark.long)]
)
def test_an_outage_of_the_network_costs_nothing(tmp_path: Path, network: Network, outage_s: float) -> None:
    """All launchers are cut off from each other, and see in the folder that nobody has gone on without them."""
    with Nodes(tmp_path, ENDLESS, "--nnodes=3", count=3, within=network.within) as nodes:
        nodes.until(lambda: [nodes.state(name)["state"] for name in nodes.names] == ["running"] * 3)
        network.set("down")
        time.sleep(outage_s)
        assert [nodes.state(name)["state"] for name in nodes.names] == ["running"] * 3
        network.set("up")
        time.sleep(5.0)
        assert [nodes.state(name)["state"] for name in nodes.names] == ["running"] * 3
        assert [event["event"] for event in nodes.events() if event["event"] in ("finished", "resumed")] == []
        assert [event["nodes"] for event in nodes.events("generation_started")] == [["n1", "n2", "n3"]]


def test_clocks_a_minute_apart(tmp_path: Path, a_minute_ahead: dict[str, str]) -> None:
    """The node is not blamed for it, a loss is noticed as ever, and the run's events are of the leader's clock."""
    pause = TRAIN.replace("time.sleep(step_s)", "select.select([], [], [], step_s)")  # libfaketime spoils the former
    source = f"import select\n{pause}\ntrain(100000, at=5, do=lambda: not restarts and rank == 1 and 1 / 0)\n"
    began = time.time()
    with Nodes(tmp_path, source, *TWO, count=3, environ={"n2": a_minute_ahead}) as nodes:
        nodes.until(lambda: nodes.events("resumed"))
        (failed,) = nodes.events("rank_exited")
        assert (failed["node"], failed["culprit"]) == ("n2", True)
        nodes.kill("n2")
        nodes.until(lambda: len(nodes.events("resumed")) == 2)
        assert [event["lost"] for event in nodes.events("node_lost")] == ["n2"]
        assert nodes.events("generation_started")[-1]["nodes"] == ["n1", "n3"]
        leaders = {event["node"] for event in nodes.events("generation_started")}
        ahead_s = 60.0 if "n2" in leaders else 0.0  # on a busy machine the second may be elected first
        assert all(began <= event["t"] <= time.time() + ahead_s for event in nodes.events())


def test_a_spare_with_damaged_data_is_never_used(tmp_path: Path) -> None:
    """It says why, and the run is given back to Slurm rather than go on with it."""
    settings, folder = tmp_path / "opsd.toml", tmp_path / "state"
    settings.write_text(f'agent.state_dir = "{folder}"\nspare = {{source = "/fsx", folder = "/scratch"}}\n')
    pool.write(folder, SpareState(lacks={"data": "shard-00007.tokens was damaged and has been removed"}))
    with Nodes(tmp_path, ENDLESS, *TWO, count=3, environ={"n3": {"OPSD_CONFIG": str(settings)}}) as nodes:
        nodes.until(lambda: nodes.events("spare_refused"))
        assert nodes.events("spare_refused")[0]["refused"] == "n3"
        nodes.kill("n2")
        assert {name: nodes.processes[name].wait(60) for name in ("n1", "n3")} == {
            "n1": exitcodes.REQUEUE, "n3": exitcodes.REQUEUE,
        }  # fmt: skip
        assert len(nodes.events("generation_started")) == 1
        assert "not used as a spare: data: shard-00007.tokens was damaged and has been removed" in nodes.said("n3")


def test_a_shared_folder_that_becomes_read_only(tmp_path: Path, make_read_only: Callable[[Path], None]) -> None:
    """A run cannot begin another generation there: the leader ends, and says which folder it is."""
    with Nodes(tmp_path, ENDLESS, "--nnodes=2", count=2) as nodes:
        nodes.until(lambda: all(nodes.state(name)["state"] == "running" for name in nodes.names))
        make_read_only(nodes.run / "generations")
        assert nodes.ask("n1", cmd="restart") == {"ok": True}
        nodes.until(lambda: any(process.poll() is not None for process in nodes.processes.values()))
        ended = [process.poll() for process in nodes.processes.values()]
        said = nodes.said("n1") + nodes.said("n2")
    assert exitcodes.FAILED in ended
    assert f"cannot be claimed in {tmp_path}/run/generations: Read-only file system" in said
    assert "Traceback" not in said


def test_a_run_does_not_start_in_a_folder_that_is_read_only(
    tmp_path: Path, make_read_only: Callable[[Path], None]
) -> None:
    """One sentence with the folder, before anything has been started."""
    make_read_only(tmp_path / "run")
    with Nodes(tmp_path, ENDLESS, "--nnodes=2", count=2) as nodes:
        assert set(nodes.wait().values()) == {exitcodes.USAGE}
        for name in nodes.names:
            (sentence,) = nodes.said(name).splitlines()
            assert f"{tmp_path}/run" in sentence and "Read-only file system" in sentence
