"""Checkpoints in shared memory, on other nodes and on other storage: what outlives a rank and a node."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from trainer_world import CONFIG, Run, flip, make_small_corpus

from opsd.checkpoints.manifest import MANIFEST, folder_of, read, steps
from opsd.client import PERSIST
from opsd.trainer import memory
from tests.fakes.clock import until
from tests.fakes.nodes import Nodes

# Checkpoints in shared memory, which outlive the rank, and on other storage, which outlive the node.


def resume(run: Run, undisturbed: Run, world: int = 2) -> dict[str, Any]:
    """Go on for ten steps beyond what has been seen; what was computed again came out the same. How it was loaded."""
    run.finish(world=world, run__steps=max(run.curve()) + 10)
    if world == 2:
        curve, expected = run.curve(), undisturbed.curve()
        assert all(curve[step] == expected[step] for step in curve.keys() & expected.keys())
    event: dict[str, Any] = run.events("checkpoint_loaded")[-1]
    return event


def kill_after_save(run: Run) -> None:
    """Kill the ranks once a checkpoint is on disk and in memory; the next is far."""
    world = run.start(run__steps=100_000, checkpoint__every=20)
    until(lambda: steps(run.checkpoints) and all(memory.read_info(run.folder, rank) for rank in (0, 1)))
    world.kill()
    assert all(memory.read_info(run.folder, rank) for rank in (0, 1))


def test_a_killed_rank_leaves_its_state_in_memory(run: Run, undisturbed: Run) -> None:
    """After SIGKILL the next start reads the newest state from memory and the losses are the same bits."""
    kill_after_save(run)
    assert resume(run, undisturbed)["tier"] == "memory"
    assert not list(run.folder.glob("*.state*"))  # a run that has ended gives the memory back


def test_memory_goes_on_where_the_disk_ends(run: Run, undisturbed: Run) -> None:
    """A state that could not be written to the disk is not lost with its ranks."""
    run.checkpoints.mkdir(parents=True)
    blockers = [folder_of(run.checkpoints, step) for step in range(20, 2000, 20)]
    for path in blockers:
        path.write_text("a file where the folder should be")
    world = run.start(run__steps=100_000, checkpoint__every=20)
    until(lambda: run.events("checkpoint_failed"))
    world.kill()
    for path in blockers:
        path.unlink()
    event = resume(run, undisturbed)
    assert (event["tier"], event["step"] % 20) == ("memory", 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_damaged_memory_is_not_used(run: Run, undisturbed: Run, rank: int) -> None:
    """A flipped bit in one rank's memory is noticed, and all ranks read from the disk."""
    kill_after_save(run)
    path = memory.state_path(run.folder, rank)
    flip(path)
    loaded = resume(run, undisturbed)
    (event,) = run.events("checkpoint_rejected")
    assert event["file"] == path.name
    assert "does not match its checksum" in event["why"]
    assert loaded["tier"] == "local"


def test_a_damaged_memory_alone_is_not_begun_with(run: Run) -> None:
    """When nothing but a damaged state is left, each start ends with a sentence until told to begin afresh."""
    kill_after_save(run)
    for folder in run.checkpoints.glob("step-*"):
        folder.rename(run.folder / folder.name)
    flip(memory.state_path(run.folder, 0))
    for _ in range(2):
        assert run.start().wait() == [1, 1]
    assert run.printed().count("in memory, is damaged; pass --fresh to begin again at step 0") >= 2
    assert run.start("--fresh").wait() == [1, 1]  # part of the initial state had been overwritten
    assert "it has been dropped, run again to begin again at step 0" in run.printed()
    run.finish("--fresh", run__steps=5)


@pytest.mark.parametrize("change", ["older", "other attempt", "gone"])
def test_states_of_two_saves_do_not_mix(run: Run, undisturbed: Run, change: str) -> None:
    """When one rank's memory is of another save, or lost with its node, the disk is read."""
    kill_after_save(run)
    path = memory.info_path(run.folder, 1)
    info = json.loads(path.read_text())
    if change == "gone":
        path.unlink()
    else:
        path.write_text(json.dumps(info | ({"step": 5} if change == "older" else {"attempt": "00000000"})))
    assert resume(run, undisturbed)["tier"] == "local"


def test_memory_of_another_layout_is_left_alone(run: Run, undisturbed: Run) -> None:
    """With another number of ranks the disk is read, which any layout can."""
    kill_after_save(run)
    assert resume(run, undisturbed, world=1)["tier"] == "local"


def test_a_kill_while_staging_leaves_no_record(run: Run, undisturbed: Run) -> None:
    """A rank killed at any moment of a save never leaves a record of a state that is half the new one."""
    for _ in range(2):
        world = run.start(checkpoint__every=1)
        step = world.step()
        until(lambda world=world, step=step: world.step() > step + 2)
        os.kill(world.ranks[1].pid or 0, signal.SIGKILL)
        world.kill()
    run.finish()
    assert run.events("checkpoint_rejected") == []
    assert run.curve() == undisturbed.curve()


def test_a_lost_disk_is_replaced_by_the_copy(run: Run, undisturbed: Run, tmp_path: Path) -> None:
    """With its checkpoints gone, a run goes on from what has been uploaded, and says so."""
    remote = {"checkpoint__remote": f"file://{tmp_path}/bucket", "checkpoint__every": 20}
    run.finish(run__steps=20, **remote)
    assert steps(tmp_path / "bucket") == [20]
    run.checkpoints.rename(tmp_path / "lost")
    run.finish(**remote)
    (loaded,) = run.events("checkpoint_loaded")
    assert (loaded["step"], loaded["tier"]) == (20, "remote")
    assert [event["step"] for event in run.events("checkpoint_uploaded")] == [20, 40]
    assert run.curve() == undisturbed.curve()


def test_a_storage_that_refuses_stops_nothing(run: Run, undisturbed: Run) -> None:
    """When nothing can be uploaded the training goes on, the failure is told, and no checkpoint is removed."""
    run.finish(checkpoint__remote="file:///proc/nowhere", checkpoint__every=10, checkpoint__keep=1)
    assert run.events("checkpoint_upload_failed")
    assert steps(run.checkpoints)[0] == 10
    assert steps(run.checkpoints)[-1] == 40
    assert run.curve() == undisturbed.curve()


def test_a_copy_that_cannot_be_read_is_not_none(run: Run, tmp_path: Path) -> None:
    """With the disk lost and the storage out of reach, a run does not begin at step 0 unless it is told to."""
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    unreadable = folder_of(bucket, 20) / MANIFEST
    unreadable.mkdir(parents=True)
    remote = {"checkpoint__remote": f"file://{bucket}", "run__steps": 5}
    assert run.start(**remote).wait() == [1, 1]
    assert f"none is available from file://{bucket}" in run.printed()
    assert "--fresh" in run.printed()
    assert not (run.folder / "metrics.jsonl").exists()
    run.finish("--fresh", **remote)


def test_a_password_of_the_storage_stays_with_the_ranks(run: Run) -> None:
    """It stands in no command line of the processes that save, and in no file of the run but its settings."""
    world = run.start(
        "--fresh", world=1, run__steps=100_000, checkpoint__every=5,
        checkpoint__remote="tape://user:s3cret@archive/run",
        evaluation__harness="true {model}", evaluation__queue="sleep 1000",
    )  # fmt: skip
    persisting = Path(f"/proc/{world.worker(0, PERSIST)}/cmdline")
    until(lambda: b"tape://archive/run" in persisting.read_bytes())  # a process is forked before it is a program
    assert b"s3cret" not in persisting.read_bytes()
    until(lambda: run.events("checkpoint_upload_failed"))
    world.kill()
    files = [path for path in run.folder.iterdir() if path.suffix in (".json", ".jsonl", ".log")]
    assert "config.json" in [path.name for path in files]
    assert not [path for path in files if b"s3cret" in path.read_bytes()]


# A run on several nodes, each with a memory of its own: what remains of its state when one of them is lost.


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Run:
    """Two nodes with a rank each were killed with step 20 on disk, in memory and in each other's memory."""
    run = Run(tmp_path_factory.mktemp("killed"), shards)
    world = run.start(nodes=2, run__steps=100_000, checkpoint__every=20)

    def is_copied() -> bool:
        found = [info.step for node in (0, 1) for info in memory.all_infos(run.memory(node))]
        return len(found) == 4 and len(set(found)) == 1 and found[0] in steps(run.checkpoints)

    until(is_copied)
    world.kill()
    assert is_copied(), "the next save was faster than this test"
    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Run:
    """Ten steps on one rank."""
    run = Run(tmp_path_factory.mktemp("undisturbed"), shards, {"data.batch": 12})
    assert run.start(world=1, run__steps=10).wait() == [0]
    return run


@pytest.fixture
def run(killed: Run, tmp_path: Path) -> Run:
    shutil.copytree(killed.folder, tmp_path / "run")
    return Run(tmp_path / "run", killed.shards)


def lose_disk(run: Run) -> None:
    run.checkpoints.rename(run.folder / "lost")


def lose_node(run: Run) -> None:
    """The last node is replaced by one that has nothing in its memory."""
    for path in run.memory(1).glob("*.state*"):
        path.unlink()


def damage_copy(run: Run) -> None:
    """The copy that the first node keeps of the lost one's state has changed."""
    lose_node(run)
    with open(memory.state_path(run.memory(0), 1), "r+b") as state:
        state.seek(-1, 2)
        last = state.read(1)
        state.seek(-1, 2)
        state.write(bytes([last[0] ^ 1]))


def swap_nodes(run: Run) -> None:
    """The nodes come back in another order, and without their copies of each other's state."""
    for node, other in ((0, 1), (1, 0)):
        memory.remove(run.memory(node), other)
    for old, new in (("node-0", "away"), ("node-1", "node-0"), ("away", "node-1")):
        (run.folder / old).rename(run.folder / new)


def resume_nodes(run: Run, **settings: object) -> dict[str, Any]:
    """Go on for ten steps; steps that were computed before came out the same. How the state was loaded."""
    until = max(run.curve()) + 10
    assert run.start(nodes=2, run__steps=until, **settings).wait() == [0, 0], run.printed()
    assert max(run.curve()) == until
    event: dict[str, Any] = run.events("checkpoint_loaded")[-1]
    return event


def test_a_lost_node_is_replaced_from_its_partners_memory(run: Run) -> None:
    """Neither the memory of one node nor any disk is left, and nothing is lost; at the end memory is given back."""
    (saved,) = steps(run.checkpoints)
    lose_disk(run)
    lose_node(run)
    event = resume_nodes(run)
    assert (event["tier"], event["step"]) == ("partner", saved)
    assert not list(run.folder.glob("node-*/*.state*"))


def test_ranks_on_other_nodes_than_before(run: Run) -> None:
    """When the nodes come back in another order each rank finds its state where it is."""
    lose_disk(run)
    swap_nodes(run)
    assert resume_nodes(run)["tier"] == "partner"


def test_a_damaged_copy_is_not_used(run: Run) -> None:
    """The copy of a lost node's state is verified, and when it is damaged all ranks read the disk."""
    damage_copy(run)
    assert resume_nodes(run)["tier"] == "local"
    assert "does not match its checksum" in run.events("checkpoint_rejected")[-1]["why"]


def test_a_node_that_is_left_alone_gives_memory_back(run: Run) -> None:
    """With one node fewer, the run goes on from the disk and holds no memory for ranks that there are no more."""
    run.memory(0).rename(run.folder / "only")
    for path in (run.folder / "only").iterdir():
        path.rename(run.folder / path.name)
    world = run.start(world=1, run__steps=100_000, checkpoint__every=10_000)
    until(lambda: world.step() > max(steps(run.checkpoints)))
    world.kill()
    assert [path.name for path in run.folder.glob("*.state")] == ["rank-0000.state"]


def test_without_replicas_a_lost_node_means_the_disk(run: Run) -> None:
    """Every rank decides alike when one node's memory is gone, whatever the others have."""
    memory.remove(run.memory(0), 1)
    lose_node(run)
    assert resume_nodes(run, checkpoint__replicas="false")["tier"] == "local"
    assert not run.events("checkpoint_rejected")


def test_whole_replicas_on_each_node(tmp_path: Path, shards: Path) -> None:
    """With a whole replica on each node memory suffices, and what both hold is written to the disk once."""
    run = Run(tmp_path, shards, {"parallel.replicas": 2})
    world = run.start(nodes=2, run__steps=100_000, checkpoint__every=20)
    until(lambda: steps(run.checkpoints) and len(list(memory.all_infos(run.memory(1)))) == 2)
    world.kill()
    assert len(read(folder_of(run.checkpoints, steps(run.checkpoints)[0])).files) == 1
    assert resume_nodes(run)["tier"] == "memory"


def test_fewer_nodes_at_the_same_global_batch(tmp_path: Path, shards: Path, undisturbed: Run) -> None:
    """Four ranks on two nodes, then three on one: the same samples, and losses that agree to rounding."""
    run = Run(tmp_path, shards, {"data.batch": 12})
    for world, nodes, last in ((4, 2, 5), (3, 1, 10)):
        assert run.start(world=world, nodes=nodes, run__steps=last).wait() == [0] * world, run.printed()
        manifest = read(folder_of(run.checkpoints, last))
        assert (manifest.sample, manifest.layout) == (12 * last, {"dp": world})
    ours, theirs = run.curve(), undisturbed.curve()
    assert list(ours) == list(range(1, 11))
    for step, point in ours.items():
        assert point == pytest.approx(theirs[step], rel=1e-3)


def test_nodes_that_do_not_share_the_folder(tmp_path: Path, shards: Path) -> None:
    """A run folder that is another one on each node is refused at the start, with the ranks and the way out."""
    run = Run(tmp_path, shards)
    world = run.start(nodes=2, apart=True)
    assert world.wait() == [2, 2]
    assert "is not the same folder on all nodes" in run.printed()
    assert "not seen by rank 1; put it on storage that the nodes share" in run.printed()


# The trainer under real launchers: a node dies, a spare takes its place, and its state comes from the partner.


@pytest.mark.slow
def test_a_spare_gets_the_state_of_the_lost_node_from_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read from the disk, and the steps that are computed again come out the same."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    shards = make_small_corpus(tmp_path / "shards")
    (tmp_path / "config.toml").write_text(CONFIG)
    settings = (f"data.shards={shards}", "run.steps=100000", "checkpoint.every=0", "checkpoint.minutes=0.1")
    program = ["-m", "opsd.trainer", str(tmp_path / "config.toml"), *(f"--set={setting}" for setting in settings)]
    flags = ("--nnodes=2", "--spares=1", "--nproc-per-node=1")

    def copied() -> bool:
        held = [list(memory.all_infos(tmp_path / node / "r")) for node in ("n1", "n2")]
        return all(len(records) == 2 for records in held) and len({info.save for one in held for info in one}) == 1

    with Nodes(tmp_path, "", *flags, count=3, program=program) as nodes:
        nodes.until(lambda: nodes.events("checkpoint_committed") and copied())
        nodes.kill("n2")
        nodes.until(lambda: nodes.events("resumed"))
        (loaded,) = nodes.events("checkpoint_loaded")
        assert loaded["tier"] == "partner"
        assert nodes.events("generation_started")[-1]["nodes"] == ["n1", "n3"]
        assert nodes.events("resumed")[0]["step"] == loaded["step"] + 1
    losses: dict[int, float] = {}
    whole, _, _ = (nodes.run / "metrics.jsonl").read_text().rpartition("\n")
    for line in whole.splitlines():
        metrics = json.loads(line)
        assert losses.setdefault(metrics["step"], metrics["loss"]) == metrics["loss"]
