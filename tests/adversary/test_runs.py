"""A user who invents, fills or mounts over runs: nothing is believed that others contradict."""

from __future__ import annotations

import json
import os
import platform
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adversary.attacker import NOBODY, Attacker
from tests.adversary.attacks import crash_in_a_file, invent_run, make_files, make_runs
from tests.adversary.node import Node
from tests.fakes.clock import eventually
from tests.fakes.tree import FUSE, silent_mount

# A user who invents runs: nothing is believed that kernel, driver or Slurm contradict, and nobody else pays for it.


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


# A user who fills the folder of runs: the runs of others are seen, and the agent stays within its means.


FILES = 60_000


@pytest.fixture
def good(node: Node) -> Attacker:
    """Another user of the node, with a run that sorts behind all others."""
    user = Attacker(0)
    user.start(invent_run, str(node.shm), "zz-good")
    return user


def sees(node: Node) -> bool:
    return node.series("opsd_rank_up").get('rank="0",run="zz-good"') == 1.0


def state_of_ranks(node: Node) -> str:
    states = node.series("opsd_collector_state")
    return next((labels for labels, value in states.items() if 'collector="ranks"' in labels and value), "")


def test_living_runs_of_a_user_do_not_hide_those_of_another(node: Node, attacker: Attacker, good: Attacker) -> None:
    """Slots are shared among users; that the limit bites is a state, a metric and a line of the log."""
    attacker.start(make_runs, str(node.shm), 300, True)
    with node.agent() as process:
        assert eventually(lambda: sees(node) and 'state="limited"' in state_of_ranks(node))
        assert node.series("opsd_ranks_left_out")['what="runs"'] > 0
        assert len(node.series("opsd_run_up")) == 64
        process.terminate()
        assert "more than there is room for" in process.communicate(timeout=60)[1]
    good.close()


def test_finished_runs_give_way_to_living_ones(node: Node, attacker: Attacker) -> None:
    """Of one user, too: sixty-four folders of the past hide nothing."""
    attacker.start(make_runs, str(node.shm), 64, False)
    attacker.start(invent_run, str(node.shm), "zz-good")
    with node.agent():
        assert eventually(lambda: sees(node))
        assert eventually(lambda: 'state="ok"' in state_of_ranks(node))


def test_files_without_number_cost_little(node: Node, attacker: Attacker, good: Attacker) -> None:
    """Neither memory nor ticks, and others' runs are seen."""
    attacker.start(make_files, str(node.shm), FILES)
    with node.agent() as process:
        assert eventually(lambda: sees(node))
        began, used = node.ticks(), cpu_s(process.pid)
        assert eventually(lambda: node.ticks() >= began + 8)
        assert cpu_s(process.pid) - used < 0.17 * 8
        assert resident_bytes(process.pid) < 128 << 20
        assert len(node.series("opsd_rank_page_errors")) <= 2
    good.close()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# A user who mounts a file system that never answers over what the agent reads in shared memory.


@pytest.fixture
def good_neighbour(node: Node) -> Iterator[Attacker]:
    """Another user of the node, with a run."""
    user = Attacker(0)
    user.start(invent_run, str(node.shm), "zz-good")
    yield user
    user.close()


@pytest.mark.skipif(not FUSE.exists(), reason="needs FUSE")
@pytest.mark.parametrize("over", ["", "run.json", "events.jsonl", "rank-0000.page", "rank-0001.page.events.jsonl"])
def test_what_a_user_mounts_over_a_run_is_not_entered(node: Node, good_neighbour: Attacker, over: str) -> None:
    """The collectors of all runs and of NCCL hung for good, for everybody."""
    bad = node.shm / "bad"
    bad.mkdir()
    os.chown(bad, NOBODY, NOBODY)
    if over:
        (bad / over).touch()
        os.chown(bad / over, NOBODY, NOBODY)
    with silent_mount(bad / over, NOBODY):
        process = node.start("agent", "--config", str(node.config))
        try:
            assert eventually(lambda: node.series("opsd_rank_up").get('rank="0",run="zz-good"') == 1.0)
            began = node.ticks()
            assert eventually(lambda: node.ticks() >= began + 4)
            assert node.series("opsd_rank_up").get('rank="0",run="zz-good"') == 1.0
            hung = [name for name, on in node.series("opsd_collector_state").items() if on and 'state="hung"' in name]
            assert hung == []
        finally:
            process.kill()
    process.communicate(timeout=60)


# A user whose program crashes in a file of a chosen name: the kernel's log then has any text that the user likes.


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
