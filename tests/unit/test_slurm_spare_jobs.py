"""Spares that are fetched: by whom, when, how often, and what their job is."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from opsd.commands.slurm_attend import attend_command, pool_options
from opsd.lemons import DAY_S
from opsd.slurm.allocation import allocation
from opsd.slurm.port import Job, Node, Partition, Reservation, SlurmRejected, SlurmUnavailable
from opsd.slurm.spare_jobs import DEFER_S, FOLDER, RETRY_S, SpareJob, SpareRequester, cancel_spares
from tests.fakes.clock import FakeClock
from tests.fakes.requeue import running
from tests.fakes.slurm import FakeSlurm
from tests.fakes.tree import tmpfs
from tests.unit.test_lemons import comments_of, fleet

ENVIRON = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURMD_NODENAME": "n1", "SLURM_JOB_PARTITION": "train",
    "SLURM_JOB_ACCOUNT": "lab",
}  # fmt: skip
JOB = allocation(ENVIRON)
SPARE = SpareJob(("--partition=spares",), ("/opt/opsd",), ("--nnodes", "3", "train.py", "a b"), {"LC_ALL": "C.UTF-8"})
LOST = {"event": "node_lost", "node": "n1", "lost": "n2", "ranks": True}


class FakePool(FakeSlurm):
    """Job 7 and the jobs that are submitted; ``refuses`` how often before it takes one."""

    def __init__(self, job: Job) -> None:
        super().__init__(())
        self.known = {7: job}
        self.submitted: list[tuple[str, Sequence[str]]] = []
        self.cancelled: list[int] = []
        self.refuses: list[Exception] = []
        self.nodes_of_pool: tuple[str, ...] = ()

    def partitions(self) -> Sequence[Partition]:
        return [Partition("spares", self.nodes_of_pool, 1, "OFF"), Partition("train", tuple(self.by_name), 1, "OFF")]

    def reservations(self) -> Sequence[Reservation]:
        return [Reservation("kept", "active", self.nodes_of_pool, 0, "", (), frozenset(), None, None)]

    def jobs(self, ids: Sequence[int] = (), *, node: str = "") -> Sequence[Job]:
        return [job for number, job in self.known.items() if not ids or number in ids]

    def submit(self, script: str, options: Sequence[str] = ()) -> int:
        if self.refuses:
            raise self.refuses.pop(0)
        self.submitted.append((script, options))
        self.known[7 + len(self.submitted)] = replace(self.known[7], id=7 + len(self.submitted), state="pending")
        return 7 + len(self.submitted)

    def cancel(self, job: int) -> None:
        self.cancelled.append(job)


class Scene:
    """The run's folder, the pool, and who reads of what happens."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock, self.said = folder, FakeClock(), list[str]()
        self.pool, self.wall = FakePool(running("n1", "n2", "n3")), 1000.0

    def on(self, node: str, spare: SpareJob = SPARE) -> SpareRequester:
        """The fetcher of a node."""
        return SpareRequester(
            self.folder, node, replace(JOB, node=node), spare, lambda: self.pool,
            clock=self.clock.monotonic, wall=lambda: self.wall, say=self.said.append,
        )  # fmt: skip

    def happens(self, **event: object) -> None:
        """The leader writes it down."""
        with (self.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps({"t": self.clock.monotonic(), **event}) + "\n")


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """A run that goes on."""
    return Scene(tmp_path)


def test_the_node_of_the_leader_asks_and_nobody_else(scene: Scene) -> None:
    """One job for one loss, however many read of it."""
    leader, other = scene.on("n1"), scene.on("n3")
    scene.happens(**LOST)
    for requester in (other, leader):
        requester.look()
    scene.clock.advance(DEFER_S + 1)
    for requester in (other, leader):
        requester.look()
    assert len(scene.pool.submitted) == 1
    assert len(list((scene.folder / FOLDER).glob("*.json"))) == 1


def test_a_spare_is_fetched_on_a_full_disk(tmp_path: Path) -> None:
    """Once for each loss; the requester used to end with the first."""
    with tmpfs(tmp_path / "disk", "size=64k") as disk:
        scene = Scene(disk)
        leader = scene.on("n1")
        for lost in ("n2", "n3"):
            scene.happens(**{**LOST, "lost": lost})
        (disk / FOLDER).mkdir()
        with open(disk / "filler", "wb") as file, pytest.raises(OSError, match="No space left"):
            file.write(bytes(1 << 20))
        leader.look()
        assert len(scene.pool.submitted) == 2


def test_another_one_asks_if_the_leader_is_gone(scene: Scene) -> None:
    """It died after it had written of the loss."""
    other = scene.on("n3")
    scene.happens(**LOST)
    other.look()
    assert not scene.pool.submitted
    scene.clock.advance(DEFER_S)
    other.look()
    assert len(scene.pool.submitted) == 1


@pytest.mark.parametrize(
    ("event", "asked"),
    [
        (LOST, 1), ({**LOST, "ranks": False}, 0), ({"event": "spare_wanted", "node": "n1", "swap": "n2"}, 1),
        ({"event": "spare_refused", "node": "n1", "refused": "n9"}, 1), ({"event": "spare_joined", "node": "n1"}, 0),
    ],
)  # fmt: skip
def test_what_a_spare_is_asked_for(scene: Scene, event: dict[str, object], asked: int) -> None:
    """For ranks that have no node, not for a spare that is lost; another one for one that must not be used."""
    requester = scene.on("n1")
    scene.happens(**event)
    requester.look()
    assert len(scene.pool.submitted) == asked


def test_a_refused_spare_is_not_asked_for_again(scene: Scene) -> None:
    """Its node is excluded from then on."""
    requester = scene.on("n1")
    for name in ("n8", "n9"):
        scene.happens(event="spare_refused", node="n1", refused=name)
        requester.look()
    assert [[o for o in options if o.startswith("--exclude")] for _, options in scene.pool.submitted] == [
        ["--exclude=n8"], ["--exclude=n8,n9"],
    ]  # fmt: skip


@pytest.mark.parametrize("options", [("--partition=spares",), ("--reservation=kept", "--partition=train")])
def test_a_lemon_is_the_last_that_is_asked_for(scene: Scene, options: tuple[str, ...]) -> None:
    """By the history of all nodes; if no other one of the pool is free, it is taken."""
    names, bad, faults = fleet(1, lemons=10)
    lemon = max(bad, key=lambda name: sum(fault.node == name for fault in faults))
    pool, scene.wall = scene.pool, 30 * DAY_S
    pool.by_name |= {name: Node(name, "idle") for name in names}
    pool.by_comment = comments_of(names, faults)
    requester = scene.on("n1", replace(SPARE, pool=options))
    for others in ((next(name for name in names if name not in bad),), ()):
        pool.nodes_of_pool = (lemon, *others)
        scene.happens(**LOST, lost_again=len(others))
        requester.look()
    excluded = [[o for o in options if o.startswith("--exclude=")] for _, options in pool.submitted]
    assert excluded == [[f"--exclude={lemon}"], []]


@pytest.mark.parametrize("change", [{"state": "completing"}, {"restarts": 1}])
def test_who_cancels_the_job_wants_no_spare(scene: Scene, change: dict[str, object]) -> None:
    """Launchers that end one after the other look like losses."""
    requester = scene.on("n1")
    scene.pool.known[7] = replace(scene.pool.known[7], **change)  # type: ignore[arg-type]
    scene.happens(**LOST)
    requester.look()
    assert not scene.pool.submitted


def test_a_spare_ends_with_the_job_that_it_is_for(scene: Scene) -> None:
    """It has as much time as is left; a pool that allows less gets no limit asked of it."""
    scene.pool.known[7] = replace(scene.pool.known[7], ends_at=1000.0 + 7265.0)
    requester = scene.on("n1")
    scene.happens(**LOST)
    requester.look()
    scene.clock.advance(1)
    scene.pool.refuses = [SlurmRejected("time limit")]
    scene.happens(**LOST)
    requester.look()
    assert ["--time=121" in options for _, options in scene.pool.submitted] == [True, False]


def test_a_controller_that_is_away_is_asked_again(scene: Scene) -> None:
    """By the same one, or by another."""
    requester = scene.on("n1")
    scene.pool.refuses = [SlurmUnavailable("away")]
    scene.happens(**LOST)
    requester.look()
    assert not scene.pool.submitted
    scene.clock.advance(RETRY_S)
    requester.look()
    assert len(scene.pool.submitted) == 1


def test_what_happened_before_is_nothing_to_this_start(scene: Scene) -> None:
    """The log of events outlives a requeue."""
    scene.happens(**LOST)
    requester = scene.on("n1")
    requester.look()
    assert not scene.pool.submitted


def test_spares_that_still_wait_are_sent_away_at_the_end(scene: Scene) -> None:
    """Those that run end with the run; those of another start are not ours."""
    requester = scene.on("n1")
    for _ in range(2):
        scene.happens(**LOST)
        requester.look()
        scene.clock.advance(1)
    scene.pool.known[9] = replace(scene.pool.known[9], state="running")
    cancel_spares(scene.pool, scene.folder, replace(JOB, restarts=1))
    assert scene.pool.cancelled == []
    cancel_spares(scene.pool, scene.folder, JOB, scene.said.append)
    assert scene.pool.cancelled == [8]


def test_a_borrowed_node_is_a_launcher_of_the_runs_job(tmp_path: Path) -> None:
    """Bash runs its script: nothing of its own job is left but the node and where Slurm's configuration is.

    A log that cannot be written does not keep it from its work.
    """
    shown = tmp_path / "opsd"
    shown.write_text('#!/bin/sh\nenv | grep -E "^(SLURM|LC_ALL)" | sort\nprintf "%s\\n" "$@"\n')
    shown.chmod(0o755)
    script, _ = replace(SPARE, opsd=(str(shown),)).job(JOB, (), None, f"{tmp_path}/none/log")
    own = {"PATH": "/usr/bin:/bin", "SLURMD_NODENAME": "n9", "SLURM_JOB_ID": "8", "SLURM_CONF": "/etc/s", "LC_ALL": "C"}
    done = subprocess.run(["bash"], input=script, env=own, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "LC_ALL=C.UTF-8", "SLURMD_NODENAME=n9", "SLURM_CONF=/etc/s", "SLURM_JOB_ID=7", "SLURM_JOB_NODELIST=n1,n2,n3",
        "SLURM_RESTART_COUNT=0", "launch", "--nodes", "n1,n2,n3,n9", "--nnodes", "3", "train.py", "a b",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("pool", "options"),
    [
        ("spares", ("--partition=spares", "--account=lab")),
        ("same", ("--partition=train", "--account=lab", "--qos=large")),
        ("reservation:opsd", ("--reservation=opsd", "--partition=train", "--account=lab", "--qos=large")),
    ],
)  # fmt: skip
def test_a_pool_is_a_partition_or_a_reservation(pool: str, options: tuple[str, ...]) -> None:
    """The spares are paid for as the job is, and in its own queue they are let in as it is."""
    assert pool_options(pool, replace(JOB, qos="large")) == options


def test_the_options_of_a_spares_launcher_survive_the_way_through_srun() -> None:
    """The same options, and the same command for the own launcher."""
    argv = attend_command(["a", "b"], "spares", Path("/r"), ["--nnodes", "3", "--", "x"], ["a", "b", "launch"])
    told = argv[argv.index("--") + 1 :]
    assert told == ("a", "b", "--nnodes", "3", "--", "x", "a", "b", "launch")
    assert {"--opsd=2", "--told=4", "--pool=spares", "--run-dir=/r"} <= set(argv)
