"""A run on several nodes, each with a memory of its own: what remains of its state when one of them is lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from trainer_world import CONFIG, Run, make_small_corpus

from opsd.checkpoints.manifest import folder_of, read, steps
from opsd.trainer import memory
from tests.fakes.clock import until
from tests.fakes.nodes import Nodes


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
