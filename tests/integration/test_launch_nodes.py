"""`opsd launch` on several nodes, played on one machine: whichever node goes, the run goes on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from click.testing import CliRunner

from opsd import exitcodes
from opsd.agent.actions import Executor
from opsd.agent.swap import planned_swap
from opsd.agent.window import Window
from opsd.checkpoints.claims import newest_number
from opsd.collectors.base import Reading
from opsd.collectors.ranks import RanksCollector
from opsd.commands.swap import swap
from opsd.ports import free_port
from opsd.runbooks.base import Action
from opsd.runbooks.straggler import announced
from opsd.settings.policy import PolicySettings
from opsd.simulated.gpus import SimulatedGpus
from opsd.slurm.deferred import SlurmDrainer
from opsd.slurm.port import Node
from tests.fakes import unauthenticated
from tests.fakes.launched import TRAIN
from tests.fakes.nodes import Nodes
from tests.fakes.slurm import FakeSlurm

# ``opsd launch`` on several nodes, played on one machine: whichever node goes, the run goes on.


ENDLESS = TRAIN + "\ntrain(100000, step_s=0.02)\n"


def resumed(nodes: Nodes, times: int = 1) -> bool:
    """True once the run has made a step again so many times."""
    return len(nodes.events("resumed")) >= times


def with_spare(nodes: Nodes) -> bool:
    """True once all of n1 and n2 run ranks and n3 stands by, and everybody knows."""
    states = [nodes.state(name)["state"] for name in nodes.names]
    return states == ["running", "running", "spare"] and nodes.ask("n2", cmd="status")["spares"] == ["n3"]


def slots(nodes: Nodes) -> list[list[str]]:
    return [event["nodes"] for event in nodes.events("generation_started")]


def test_ranks_are_numbered_over_the_nodes(tmp_path: Path) -> None:
    """Torchrun's variables, one place to meet, and exit code 0 everywhere once all nodes are done."""
    source = """
        import json, os
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
                 "MASTER_ADDR", "MASTER_PORT", "OPSD_NODE", "OPSD_GENERATION")
        print("ENV", json.dumps({name: os.environ[name] for name in names}))
    """
    with Nodes(tmp_path, source, "--nnodes=2", "--nproc-per-node=2", count=2) as nodes:
        assert nodes.wait() == {"n1": exitcodes.OK, "n2": exitcodes.OK}
        logs = sorted((nodes.run / "logs/gen-0001").glob("rank-*.log"))
        seen = [json.loads(log.read_text().partition("ENV ")[2]) for log in logs]
    assert [rank["RANK"] for rank in seen] == ["0", "1", "2", "3"]
    assert [rank["OPSD_NODE"] for rank in seen] == ["n1", "n1", "n2", "n2"]
    assert {rank["WORLD_SIZE"] for rank in seen} == {"4"}
    assert len({(rank["MASTER_ADDR"], rank["MASTER_PORT"]) for rank in seen}) == 1
    assert nodes.events("finished")[-1]["exit_code"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("late", ["n1", "n3"])
def test_a_node_that_comes_late_is_waited_for(tmp_path: Path, late: str) -> None:
    """With MIN:MAX too: a run that began without it would go on without it for days."""
    nodes = Nodes(tmp_path, TRAIN + "\ntrain(5)\n", "--nnodes=2:3", count=3)
    first = [name for name in nodes.names if name != late]
    try:
        for name in first:
            nodes.start(name)
        nodes.until(lambda: all((tmp_path / name / "r").exists() for name in first))
        time.sleep(5.0)
        assert slots(nodes) == []
        nodes.start(late)
        assert set(nodes.wait().values()) == {exitcodes.OK}
        assert slots(nodes) == [["n1", "n2", "n3"]]
    finally:
        nodes.__exit__(None, None, None)


@pytest.mark.slow
def test_the_last_call_ends(tmp_path: Path) -> None:
    """Who has not come by then is not waited for."""
    nodes = Nodes(tmp_path, TRAIN + "\ntrain(5)\n", "--nnodes=1:3", "--last-call=1", count=3)
    try:
        nodes.start("n2")
        nodes.start("n3")
        assert nodes.wait() == {"n2": exitcodes.OK, "n3": exitcodes.OK}
        assert slots(nodes) == [["n2", "n3"]]
    finally:
        nodes.__exit__(None, None, None)


@pytest.mark.parametrize("victim", ["n1", "n2"])
def test_a_spare_takes_the_place_of_a_dead_node(tmp_path: Path, victim: str) -> None:
    """The leader's node or another: the run goes on in the next generation, on the spare."""
    with Nodes(tmp_path, ENDLESS, "--nnodes=2", "--spares=1", count=3) as nodes:
        nodes.until(lambda: with_spare(nodes))
        nodes.kill(victim)
        nodes.until(lambda: resumed(nodes))
        (lost,) = nodes.events("node_lost")
        assert lost["lost"] == victim
    places = ["n3" if name == victim else name for name in ("n1", "n2")]
    assert slots(nodes) == [["n1", "n2"], places]
    assert nodes.events("spare_joined")[0]["joined"] == "n3"


def test_ranks_begin_below_one_switch_and_a_swap_tells_its_hops(tmp_path: Path) -> None:
    """As the topology.conf on the nodes says: n2 stands by, and the segment is split once it has to come."""
    tree = "SwitchName=a Nodes=n[1,3]\nSwitchName=b Nodes=n2\nSwitchName=s Switches=a,b\n"
    (tmp_path / "topology.conf").write_text(tree)
    environ = {name: {"SLURM_CONF": str(tmp_path / "slurm.conf")} for name in ("n1", "n2", "n3")}
    with Nodes(tmp_path, ENDLESS, "--nnodes=2", "--spares=1", "--segment=2", count=3, environ=environ) as nodes:
        nodes.until(lambda: [nodes.state(name)["state"] for name in nodes.names] == ["running", "spare", "running"])
        nodes.until(lambda: nodes.ask("n1", cmd="status")["spares"] == ["n2"])
        nodes.kill("n3")
        nodes.until(lambda: resumed(nodes))
    assert slots(nodes) == [["n1", "n3"], ["n1", "n2"]]
    (joined,) = nodes.events("spare_joined")
    assert (joined["replaces"], joined["hops_before"], joined["hops"]) == ("n3", 1.0, 3.0)
    (split,) = nodes.events("segment_split")
    assert split["places"] == {"a": ["n1"], "b": ["n2"]}
    assert "node ranks 0 to 1 were to be in one NVLink domain" in nodes.said("n1")


def test_a_segment_stays_inside_the_domain_that_the_drivers_tell(tmp_path: Path, library: str) -> None:
    """Slurm knows one switch above all; the GPUs of n2 are in another NVLink domain, so it stands by."""
    (tmp_path / "topology.conf").write_text("SwitchName=s Nodes=n[1-3]\n")
    environ, rack = {}, {"n1": 1, "n2": 2, "n3": 1}
    for name, number in rack.items():
        with SimulatedGpus.create(tmp_path / f"{name}.gpus", count=2) as gpus:
            for gpu in gpus:
                gpu.set_domain(UUID(int=number), 7)
            environ[name] = {"SLURM_CONF": str(tmp_path / "slurm.conf"), **gpus.environment(Path(library))}
    source, flags = TRAIN + "\ntrain(5)\n", ("--nnodes=2", "--spares=1", "--segment=2")
    with Nodes(tmp_path, source, *flags, count=3, environ=environ) as nodes:
        assert set(nodes.wait().values()) == {exitcodes.OK}
    assert slots(nodes) == [["n1", "n3"]]


@pytest.mark.slow
def test_a_frozen_node_is_replaced_and_comes_back_as_a_spare(tmp_path: Path) -> None:
    """It ends the ranks that it still had, and can take the place of the next one."""
    with Nodes(tmp_path, ENDLESS, "--nnodes=2", "--spares=1", count=3) as nodes:
        nodes.until(lambda: with_spare(nodes))
        nodes.freeze("n1")
        nodes.until(lambda: resumed(nodes))
        nodes.thaw("n1")
        nodes.until(lambda: nodes.state("n1")["state"] == "spare")
        nodes.kill("n2")
        nodes.until(lambda: resumed(nodes, 2))
    assert slots(nodes)[-1] == ["n3", "n1"]


def test_a_failure_on_one_node_restarts_all(tmp_path: Path) -> None:
    """The rank at fault is named with its node; twice the same at the same step ends the run everywhere."""
    source = (
        TRAIN
        + """
def fail():
    raise ValueError("boom")

train(50, at=5 if rank == 3 else None, do=fail, step_s=0.02)
"""
    )
    with Nodes(tmp_path, source, "--nnodes=2", "--nproc-per-node=2", count=2) as nodes:
        assert nodes.wait() == {"n1": exitcodes.REPEATED, "n2": exitcodes.REPEATED}
    (finished,) = nodes.events("finished")
    assert "Rank 3 on n2 failed after step 5 with ValueError: boom" in finished["reason"]
    culprits = [event["rank"] for event in nodes.events("rank_exited") if event["culprit"]]
    assert culprits == [3, 3], "told once each time"


def test_a_hang_is_named_across_nodes(tmp_path: Path) -> None:
    """A rank that is stopped on one node, while those of the other wait for it in a collective."""
    source = (
        TRAIN
        + """
if rank == 2 and not restarts:
    train(8, at=7, do=lambda: os.kill(os.getpid(), signal.SIGSTOP), step_s=0.02)
elif not restarts:
    train(8, step_s=0.02)
    reporter = Reporter.from_env()
    with reporter.phase("collective"):
        time.sleep(600)
else:
    train(20, step_s=0.02)
"""
    )
    flags = ("--nnodes=2", "--nproc-per-node=2", "--hang-limit=2")
    with Nodes(tmp_path, source, *flags, count=2) as nodes:
        assert nodes.wait() == {"n1": exitcodes.OK, "n2": exitcodes.OK}
    (hang,) = nodes.events("hang_detected")
    assert (hang["rank"], hang["culprit_node"]) == (2, "n2")
    assert Path(hang["stacks"]).name == f"gen-{hang['generation']:04}-n2.txt"
    assert "rank 2 " in Path(hang["stacks"]).read_text(), "the stacks of the node of the culprit"


def test_a_stop_on_one_node_stops_all(tmp_path: Path) -> None:
    """A signal that reached one launcher: all ranks stop at a step boundary, and all launchers say requeue."""
    with Nodes(tmp_path, ENDLESS, "--nnodes=2", count=2) as nodes:
        nodes.until(lambda: nodes.state("n2")["state"] == "running" and nodes.state("n1")["state"] == "running")
        nodes.processes["n2"].send_signal(signal.SIGUSR1)
        assert nodes.wait() == {"n1": exitcodes.REQUEUE, "n2": exitcodes.REQUEUE}
    assert nodes.events("stopped")[0]["signal"] == "SIGUSR1"


def test_a_planned_swap_loses_no_step(tmp_path: Path) -> None:
    """Asked for on any node: the ranks stop at a step boundary, the spare takes over, the node stands by."""
    with Nodes(tmp_path, ENDLESS, "--nnodes=2", "--spares=1", count=3) as nodes:
        nodes.until(lambda: with_spare(nodes))
        status = nodes.ask("n3", cmd="status")
        assert (status["nodes"], status["spares"]) == (["n1", "n2"], ["n3"])
        assert status["head"] in nodes.names
        assert "runs no ranks" in nodes.ask("n1", cmd="swap", node="n3")["error"]
        assert nodes.ask("n3", cmd="swap", node="n1", reason="Xid 79") == {"ok": True}
        nodes.until(lambda: nodes.state("n1")["state"] == "spare" and len(slots(nodes)) == 2)
        nodes.until(lambda: nodes.state("n3")["state"] == "running")
        assert nodes.ask("n2", cmd="swap", node="n2")["error"] == "the run has no spare"
    assert slots(nodes)[-1] == ["n3", "n2"]
    assert not nodes.events("rank_exited")


def test_a_borrowed_node_goes_without_the_run(tmp_path: Path) -> None:
    """A node that was fetched from a pool and is wanted back: another takes its place at a step boundary."""
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[2-3]"}
    environ = dict.fromkeys(("n1", "n2", "n3"), job)
    with Nodes(tmp_path, ENDLESS, "--nnodes=2", "--spares=1", count=3, environ=environ) as nodes:
        nodes.until(lambda: with_spare(nodes))
        nodes.processes["n1"].send_signal(signal.SIGTERM)
        assert nodes.processes["n1"].wait(60) == exitcodes.INTERRUPTED
        nodes.until(lambda: resumed(nodes))
        assert slots(nodes)[-1] == ["n3", "n2"]
        assert not [event for event in nodes.events() if event["event"] in ("rank_exited", "finished")]
        assert "n1 goes: its own job ends (SIGTERM)" in nodes.said("n1")


def test_a_spare_is_asked_for_where_one_may_come(tmp_path: Path) -> None:
    """A run that waits for nodes says in its events that it wants one, and is swapped once it is there."""
    with Nodes(tmp_path, ENDLESS, "--nnodes=2", "--wait-for-node=60", count=3) as nodes:
        nodes.until(lambda: with_spare(nodes))
        nodes.kill("n3")
        nodes.until(lambda: nodes.ask("n2", cmd="status")["spares"] == [])
        assert nodes.ask("n2", cmd="swap", node="n2", reason="ecc")["coming"] is True
        nodes.until(lambda: nodes.events("spare_wanted"))
        (wanted,) = nodes.events("spare_wanted")
        assert (wanted["swap"], wanted["reason"]) == ("n2", "ecc")
        nodes.start("n3")
        nodes.until(lambda: with_spare(nodes))
        assert nodes.ask("n2", cmd="swap", node="n2", reason="ecc") == {"ok": True}
        nodes.until(lambda: slots(nodes)[-1] == ["n1", "n3"] and resumed(nodes))


def test_a_port_that_is_taken_is_said_in_one_sentence(tmp_path: Path) -> None:
    """What to do about it is said as well."""
    with Nodes(tmp_path, ENDLESS, "--nnodes=2", count=2) as nodes, socket.socket() as taken:
        nodes.kill("n1")
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((nodes.address("n1"), nodes.port))
        taken.listen()
        nodes.start("n1")
        assert nodes.processes["n1"].wait(30) == exitcodes.FAILED
        said = f":{nodes.port}: another program does; give all launchers of the run the same --port, one that is free"
        assert said in nodes.said("n1")
        assert "Traceback" not in nodes.said("n1")


def test_too_few_nodes_give_the_run_back(tmp_path: Path) -> None:
    """Without a spare, and without leave to go on with fewer, those that are left ask for a requeue."""
    with Nodes(tmp_path, ENDLESS, "--nnodes=3", count=3) as nodes:
        nodes.until(lambda: nodes.state("n3")["state"] == "running" and nodes.state("n1")["state"] == "running")
        nodes.kill("n2")
        codes = nodes.wait()
    assert (codes["n1"], codes["n3"]) == (exitcodes.REQUEUE, exitcodes.REQUEUE)
    assert "too few nodes" in nodes.events("finished")[-1]["reason"]


SAVING = """
import os, time
from opsd.client import Reporter

reporter = Reporter.from_env()
for step in range(100_000):
    time.sleep(0.02)
    reporter.step(step=step)
    if step % 10 == 0:
        reporter.checkpoint_committed(step)
    if reporter.stop_requested:
        break
reporter.close()
"""


def test_fewer_nodes_go_on_where_that_is_allowed(tmp_path: Path) -> None:
    """MIN:MAX: the world gets smaller, and larger again when the node is back."""
    with Nodes(tmp_path, SAVING, "--nnodes=2:3", "--grow-after=0.2", count=3) as nodes:
        nodes.until(lambda: nodes.state("n3")["state"] == "running" and nodes.state("n1")["state"] == "running")
        nodes.kill("n1")
        nodes.until(lambda: resumed(nodes))
        nodes.start("n1")
        nodes.until(lambda: len(nodes.events("generation_started")) == 3)
    assert [event["world_size"] for event in nodes.events("generation_started")] == [3, 2, 3]
    assert nodes.events("restart_requested")[-1]["reason"].startswith("the arrival of n1: ")


def test_the_last_of_two_goes_on(tmp_path: Path) -> None:
    """A half that has claimed the next generation in the common folder may go on alone."""
    with Nodes(tmp_path, ENDLESS, "--nnodes=1:2", count=2) as nodes:
        nodes.until(lambda: nodes.state("n2")["state"] == "running" and nodes.state("n1")["state"] == "running")
        nodes.kill("n1")
        nodes.until(lambda: resumed(nodes))
    assert slots(nodes)[-1] == ["n2"]


# Torchrun's lines for several nodes without Slurm: launchers that nobody has named find each other.


PROGRAM = """
import os
print("PLACE", os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["GROUP_RANK"], os.environ["MASTER_ADDR"])
"""


def launch(
    folder: Path, name: str, *flags: str, run: Path | None = None, program: str = PROGRAM, shm: str = ""
) -> subprocess.Popen[str]:
    """A launcher that takes itself for one on the node ``name``."""
    script = folder / "prog.py"
    script.write_text(program)
    command = [sys.executable, "-m", "opsd", "launch", "--node-name", name, *flags]
    command += ["--run-dir", str(run or folder / "run"), str(script)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environ |= {"OPSD_SHM": str(folder / (shm + name))}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environ, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_an_endpoint_is_enough(tmp_path: Path, backend: str) -> None:
    """By --master-addr and node ranks, or by --rdzv-endpoint: the node ranks given hold, and all ranks are there."""
    port = str(free_port())
    flags = {
        "static": ["--master-addr=127.0.0.1", f"--master-port={port}"],
        "c10d": ["--rdzv-backend=c10d", "--rdzv-id=7", f"--rdzv-endpoint=localhost:{port}"],
    }[backend]
    named = {"x": ["--node-rank=1"], "y": ["--node-rank=0"]} if backend == "static" else {"x": [], "y": []}
    started = {name: launch(tmp_path, name, "--nnodes=2", *flags, *rank) for name, rank in named.items()}
    ended = {name: process.communicate(timeout=60) for name, process in started.items()}
    assert [process.returncode for process in started.values()] == [0, 0], ended
    said = sorted(line.split() for out, _ in ended.values() for line in out.splitlines() if "PLACE" in line)
    assert [words[-4:-1] for words in said] == [["0", "2", "0"], ["1", "2", "1"]]
    if backend == "static":
        assert "PLACE 0 2 0" in ended["y"][0]


@pytest.mark.slow
def test_who_waits_alone_is_told_why(tmp_path: Path) -> None:
    """Two nodes with a folder each never meet: the sentence says what all of them must see."""
    flags = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:29400", "--join-timeout=2")
    alone = launch(tmp_path, "x", *flags)
    _, err = alone.communicate(timeout=60)
    assert alone.returncode not in (exitcodes.OK, exitcodes.REQUEUE)
    assert f"1 of 2 launchers have come to {tmp_path}/run within 2 s; all nodes must see this folder" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_other_launchers_of_the_same_names_replace_those_that_run(tmp_path: Path) -> None:
    """In other containers of the same names, while the run goes on: the older launchers end, the run goes on."""
    flags = ("--nnodes=2:3", "--rdzv-backend=c10d", "--rdzv-id=7", f"--rdzv-endpoint=localhost:{free_port()}")
    launchers: list[subprocess.Popen[str]] = []

    def start_all(containers: str) -> list[subprocess.Popen[str]]:
        program = "import time; time.sleep(600)"
        launchers.extend(launch(tmp_path, name, *flags, program=program, shm=containers) for name in "xyz")
        return launchers[-3:]

    try:
        older = start_all("older-")
        wait_for(lambda: newest_number(tmp_path / "run") == 1)
        younger = start_all("younger-")
        assert [each.wait(60) for each in older] == [exitcodes.FENCED] * 3
        wait_for(lambda: settled(tmp_path / "run"))
        assert [each.poll() for each in younger] == [None] * 3
    finally:
        for each in launchers:
            each.kill()
            each.communicate()


def settled(run: Path) -> bool:
    """Whether no generation is claimed for a while."""
    before = newest_number(run)
    time.sleep(6)
    return newest_number(run) == before


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


# Strangers at the port of a running launcher: scanners, probes, clients that have lost their way, by the thousand.


FEW_DESCRIPTORS = ("sh", "-c", 'ulimit -n 256 && exec "$@"', "sh")


@pytest.mark.slow
@pytest.mark.parametrize("sources", [1, 100])
def test_a_run_goes_on_and_restarts_beside_thousands_of_unauthenticated_connections(
    tmp_path: Path, sources: int
) -> None:
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


# A slow rank among those of several nodes is named while it trains, at its node.


IN_STEP = """
import os, socket, struct, time
from opsd.client import Reporter

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
meeting = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank == 0:
    listener = socket.create_server(meeting)
    others = [listener.accept()[0] for _ in range(world - 1)]
else:
    while True:
        try:
            others = [socket.create_connection(meeting)]
            break
        except OSError:
            time.sleep(0.05)

def all_meet():
    "All ranks wait for the last."
    for call in (("recv", "sendall") if rank == 0 else ("sendall", "recv")):
        for other in others:
            other.sendall(b"x") if call == "sendall" else other.recv(1)

reporter = Reporter.from_env()
for step in range(100000):
    with reporter.phase("forward"):
        time.sleep(SECONDS.get(rank, 0.1))
    with reporter.phase("collective"):
        all_meet()
    reporter.step()
"""


def named(nodes: Nodes, node: str) -> list[dict[str, object]]:
    """The events in which the launcher of ``node`` says that a rank of its own is slow."""
    path = nodes.folder / node / "r/events.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [record for line in lines if (record := json.loads(line))["event"] == "straggler_found"]


def announced_to_agent(nodes: Nodes, node: str) -> list[str]:
    """What the runbook of the agent of ``node`` finds in what its collector reads."""
    reading = RanksCollector(nodes.folder / node).collect()
    assert isinstance(reading, Reading)
    window = Window(node)
    window.begin(time.monotonic(), time.time())
    window.add("ranks", reading)
    return [finding.key for finding in announced(window)]


@pytest.mark.slow
def test_the_slow_rank_of_another_node_is_named(tmp_path: Path) -> None:
    """The leader's log names rank, node, cause and cost; the event is on the rank's node and on no other."""
    source = IN_STEP.replace("SECONDS", "{2: 0.16}")
    with Nodes(tmp_path, source, "--nnodes=3", "--nproc-per-node=1", count=3) as nodes:
        nodes.until(lambda: bool(nodes.events("straggler_found")) and bool(named(nodes, "n3")), 60.0)
        event, local = nodes.events("straggler_found")[0], named(nodes, "n3")[0]
        assert (event["rank"], event["culprit_nodes"], event["cause"]) == (2, ["n3"], "slow worker")
        assert 1.3 < event["slowdown"] < 1.9
        assert local["ranks"] == [2]
        assert named(nodes, "n1") == named(nodes, "n2") == []
        seen = {name: announced_to_agent(nodes, name) for name in nodes.names}
        assert seen == {"n1": [], "n2": [], "n3": ["r/rank 2"]}
        assert "slow worker" in (nodes.run / "job.log").read_text(encoding="utf-8")


# The agent's planned swap and `opsd swap` with real launchers on several nodes.


def ready(nodes: Nodes) -> bool:
    """True once n1 and n2 run ranks, and n1's launcher knows that n3 stands by."""
    running = all(nodes.state(name)["state"] == "running" for name in ("n1", "n2"))
    return running and nodes.state("n3")["state"] == "spare" and nodes.ask("n1", cmd="status")["spares"] == ["n3"]


def test_a_node_that_must_go_is_swapped_and_drained(tmp_path: Path) -> None:
    """The plan names the spare; the agent of n1 has it take over, and drains n1; no rank has died of it."""
    with Nodes(tmp_path, ENDLESS, "--nnodes=2", "--spares=1", count=3) as nodes:
        nodes.until(lambda: ready(nodes))
        shm = tmp_path / "n1"
        planned = CliRunner().invoke(swap, ["n1", "--dry-run", f"--set=ranks.root={shm}"], standalone_mode=False)
        assert (planned.return_value, "go on with n3 in the place of n1" in planned.output) == (exitcodes.OK, True)
        slurm = FakeSlurm([Node(name, "allocated") for name in nodes.names])
        drainer = SlurmDrainer(lambda: slurm, "n1", PolicySettings())
        executor = Executor(shm=shm, notify=lambda _text, _fields: None, drain_node=drainer)
        args = {"node": "n1", "control": str(shm / "r/control.sock"), "incident": "gpu_lost-1", "kind": "gpu_lost"}
        done = executor.perform(Action("swap_node", "n1", args, "GPU 2 is lost"))
        assert done == (True, "n1 is out of the run, n3 took its place; drained n1")
        nodes.until(lambda: nodes.state("n3")["state"] == "running")
        assert not nodes.events("rank_exited")
    assert slurm.by_name["n1"].reason.startswith("opsd:gpu_lost-1 gpu_lost: GPU 2 is lost")


def test_a_swap_is_done_though_the_leader_dies_of_which_it_was_asked(tmp_path: Path) -> None:
    """In the very moment in which it has agreed; one spare takes its place, the other that of the node in question."""
    with Nodes(tmp_path, ENDLESS, "--nnodes=2", "--spares=2", count=4) as nodes:
        nodes.until(lambda: all(nodes.state(name)["state"] in ("running", "spare") for name in nodes.names))
        nodes.until(lambda: len(nodes.ask("n2", cmd="status")["spares"]) == 2)
        first = nodes.ask("n2", cmd="status")
        leader = first["head"]
        node, other = next(name for name in first["nodes"] if name != leader), next(iter(first["spares"]))

        def ask(request: Mapping[str, object]) -> Mapping[str, Any]:
            answer = nodes.ask(other, **{key: str(value) for key, value in request.items()})
            if request["cmd"] == "swap" and nodes.processes[leader].poll() is None:
                assert answer == {"ok": True}
                nodes.kill(leader)
            return answer

        assert planned_swap(ask, node, "ecc", patience_s=40)
        nodes.until(lambda: set(nodes.ask(other, cmd="status")["nodes"]) == set(first["spares"]))
