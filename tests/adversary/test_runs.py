"""A user who invents runs: nothing is believed that kernel, driver or Slurm contradict, and nobody else pays for it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adversary.attacker import NOBODY, Attacker
from tests.adversary.attacks import invent_run
from tests.adversary.node import Node
from tests.fakes.clock import eventually


@pytest.fixture
def honest() -> Iterator[Attacker]:
    """Another user of the node, who does nothing wrong."""
    user = Attacker(0)
    yield user
    user.close()


def claim(shm: str, name: str, gpu: int, job: str, pid: int) -> None:
    """A run with one rank that says to be process ``pid`` (0: this one), on that GPU, in that job."""
    import os
    import time
    from pathlib import Path

    import opsd.client

    writer = pid or os.getpid()
    start = opsd.client.process_start(writer)
    opsd.client.os.getpid = lambda: writer
    folder = Path(shm, name)
    folder.mkdir(mode=0o755)
    reporter = opsd.client.Reporter(folder / "rank-0000.page", rank=0, gpu=gpu, job=job, run=name)
    print(start, flush=True)
    while True:
        reporter.step(tokens=1, loss=2.0)
        time.sleep(0.2)


def launch(shm: str, name: str, control: str) -> None:
    """A run whose losses end in NaN after a checkpoint, unless its control socket is "quiet"; notes what its launcher,
    this process, is asked.
    """
    import json
    import math
    import os
    import socket
    from pathlib import Path

    from opsd.client import Reporter, process_start

    folder = Path(shm, name)
    folder.mkdir(mode=0o755)
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(folder / "control.sock"))
    server.listen()
    reporter = Reporter(folder / "rank-0000.page", rank=0, run=name, world_size=1)
    said = {
        "state": "running", "launcher_pid": os.getpid(), "launcher_start": process_start(os.getpid()), "job": "",
        "node": "node1", "generation": 0, "world_size": 1, "control": control or str(folder / "control.sock"),
        "folder": str(folder),
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(said))
    for loss in (2.0, 2.0, math.nan, math.nan)[: 2 if control.endswith("quiet") else 4]:
        reporter.step(tokens=1, loss=loss, grad_norm=1.0)
        reporter.checkpoint_committed(0)
    print("runs", flush=True)
    while True:
        connection, _ = server.accept()
        with connection:
            asked = connection.makefile().readline()
            connection.sendall(b'{"ok": true}\n')
        with open(folder / "asked", "a") as file:
            file.write(asked)


def asked(node: Node, run: str) -> list[str]:
    """What the launcher of ``run`` was asked to do."""
    path = node.shm / run / "asked"
    return [json.loads(line)["cmd"] for line in path.read_text().splitlines()] if path.exists() else []


def test_a_job_that_the_user_invents_is_blamed_for_nothing(node: Node, attacker: Attacker) -> None:
    """Neither in series nor in incidents: the run's name is there, the kernel and Slurm know no such job."""
    attacker.start(claim, str(node.shm), "mine", 0, "invented", 0)
    gpu = node.gpus[0]
    gpu.load(utilization=98, power_watts=650, memory_ratio=0.8)
    gpu.thermal_tau_s, gpu.cooling = 1.0, 0.45
    with node.agent():
        assert eventually(lambda: "gpu_throttle" in node.kinds())
        assert "invented" not in json.dumps(node.incidents())
        assert [labels for labels in node.series("opsd_gpu_job_info") if 'run="mine"' in labels]
        assert "invented" not in (node.get("/metrics") or "") + (node.get("/api/v1/ranks") or "")


def test_a_gpu_that_another_user_holds_is_not_the_pages(node: Node, attacker: Attacker) -> None:
    """What happens to it is not blamed on a rank that only says to be there."""
    node.gpus[0].set_processes([(os.getpid(), 1 << 30)])
    attacker.start(claim, str(node.shm), "mine", 0, "", 0)
    with node.agent():
        assert eventually(lambda: 'rank="0",run="mine"' in node.series("opsd_rank_up"))
        assert eventually(lambda: not node.series("opsd_gpu_job_info"))


def test_a_page_keeps_no_node_with_a_failed_gpu_in_service(node: Node, attacker: Attacker) -> None:
    """Where ranks work on GPUs a person decides; one that only says so is none of them, whatever GPU it names."""
    attacker.start(claim, str(node.shm), "mine", 1, "", 0)
    node.gpus[0].set_remapped_rows(failure=True)
    with node.agent():
        assert eventually(lambda: 'rank="0",run="mine"' in node.series("opsd_rank_up"))
        assert eventually(lambda: any("state=drain" in order for order in node.slurm_orders()))


def test_many_runs_keep_no_node_with_a_failed_gpu_in_service(node: Node, attacker: Attacker) -> None:
    """Each would be asked for a swap: more at once than there are actions in an hour."""
    for number in range(13):
        attacker.start(invent_run, str(node.shm), f"run-{number}")
    node.gpus[0].set_remapped_rows(failure=True)
    with node.agent("--set=agent.interval_s=0.5"):
        assert eventually(lambda: any("state=drain" in order for order in node.slurm_orders()))


def test_a_page_about_another_users_process_is_unusable(node: Node, attacker: Attacker) -> None:
    """It counts as one that cannot be read, and is no rank."""
    attacker.start(claim, str(node.shm), "mine", 0, "", os.getpid())
    with node.agent():
        assert eventually(lambda: node.series("opsd_rank_page_errors") == {'run="mine"': 1.0})
        assert not node.series("opsd_rank_up")


def test_a_run_cannot_have_the_launcher_of_another_asked(node: Node, attacker: Attacker, honest: Attacker) -> None:
    """A run's control socket is that in its own folder."""
    honest.start(launch, str(node.shm), "good", "/quiet")
    attacker.start(launch, str(node.shm), "bad", str(node.shm / "good/control.sock"))
    with node.agent():
        assert eventually(lambda: ("restart_generation", "bad") in node.actions())
        assert eventually(
            lambda: any(action["outcome"] == "failed" for i in node.incidents() for action in i["actions"])
        )
        assert asked(node, "good") == []


def test_nobody_uses_up_the_actions_of_another_user(node: Node, attacker: Attacker, honest: Attacker) -> None:
    """One restart an hour is admitted for each user's runs; the other run's is done though the first has had its."""
    for name in ("bad1", "bad2"):
        attacker.start(launch, str(node.shm), name, "")
    with node.agent("--set=policy.max_actions_per_hour=1"):
        assert eventually(lambda: asked(node, "bad1") + asked(node, "bad2") == ["restart"])
        honest.start(launch, str(node.shm), "good", "")
        assert eventually(lambda: asked(node, "good") == ["restart"])
        outcomes = [action["outcome"] for i in node.incidents() for action in i["actions"]]
        assert outcomes.count("refused") == 1


def test_the_ledger_of_a_folder_that_the_user_cannot_read_is_not_shown(node: Node, attacker: Attacker) -> None:
    """The run names it, and the agent could read it."""
    secret = node.folder / "secret"
    secret.mkdir(mode=0o700)
    (secret / "events.jsonl").write_text('{"t": 100.0, "event": "generation_started", "generation": 1}\n')
    attacker.start(invent_run, str(node.shm), "mine", {"folder": str(secret)})
    with node.agent():
        assert eventually(lambda: "No ledger" in (node.get("/job/mine") or ""))
        assert eventually(lambda: "Permission denied" in (node.get("/job/mine") or ""))


def test_own_ledgers_are_shown(node: Node, attacker: Attacker, open_folder: Path) -> None:
    """Also where only the user may read."""
    own = open_folder / "own"
    own.mkdir()
    (own / "events.jsonl").write_text('{"t": 100.0, "event": "generation_started", "generation": 1}\n')
    for path in (own / "events.jsonl", own):
        os.chown(path, NOBODY, NOBODY)
        path.chmod(0o700)
    attacker.start(invent_run, str(node.shm), "mine", {"folder": str(own)})
    with node.agent():
        assert eventually(lambda: "ETTR" in (node.get("/job/mine") or ""))
