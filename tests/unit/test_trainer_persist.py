"""Checkpoints of the trainer: when one is due, persisted whatever fails, audited, and read."""

from __future__ import annotations

import json
import math
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from opsd.checkpoints.claims import FOLDER, Claim, create
from opsd.checkpoints.interval import daly
from opsd.checkpoints.manifest import (
    MANIFEST,
    CheckpointError,
    FileEntry,
    Manifest,
    checksum,
    commit,
    folder_of,
    read,
    steps,
    verify,
)
from opsd.jsonl import METRICS
from opsd.trainer.checkpoint import State, file_layout
from opsd.trainer.checksums import checksum as checksum_of_values
from opsd.trainer.load import copy_file, load
from opsd.trainer.locks import LOCKS, hold_lock, wait_for_saves
from opsd.trainer.parts import PersistPlan
from opsd.trainer.regions import Region
from opsd.trainer.saving import FIRST_S, LEAST_S, Checksums, Interval, RegionChecksum, different_copies, equal_shards
from opsd.trainer.settings import CheckpointSettings
from tests.fakes.clock import until
from tests.fakes.power_loss import Faults, calls

# Persist processes: parts become a checkpoint, whatever dies, fails or is late.


STEP, SAMPLE = 20, 80


class Persister:
    """A real persist process with ``content`` staged, and this test in the place of its rank."""

    def __init__(
        self,
        root: Path,
        rank: int,
        world: int,
        content: bytes,
        attempt: str = "0000abcd",
        generation: int = 0,
        remote: str = "",
        patience_s: float = 60.0,
    ) -> None:
        self.saves = 0
        memory = os.memfd_create("test")
        os.ftruncate(memory, len(content))
        mmap.mmap(memory, len(content))[:] = content
        self.locks = hold_lock(root, rank)
        layout = {"dp": world}
        plan = PersistPlan(
            str(root), rank, world, attempt, layout, "run", 2, memory, len(content), self.locks, remote=remote,
            patience_s=patience_s,
        )  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "opsd.trainer.persist", json.dumps(asdict(plan))],
            env=os.environ
            | {"OPSD_RUN_DIR": str(root.parent), "OPSD_GENERATION": str(generation), "OPSD_REMOTE": remote},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            pass_fds=(memory, self.locks),
            start_new_session=True,
        )
        os.close(memory)

    def command(self, **command: int | str) -> None:
        assert self.process.stdin is not None
        self.saves += "save" in command
        self.process.stdin.write(json.dumps({"digest": "d", "number": self.saves, **command}).encode() + b"\n")

    def answer(self) -> dict[str, str]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.rank_dies()

    def rank_dies(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if not self.process.stdin.closed:
            os.close(self.locks)
        self.process.stdin.close()
        self.process.stdout.close()


Start = Callable[..., Persister]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Persister] = []

    def begin(rank: int, world: int, content: bytes = b"state of a rank" * 999, **more: Any) -> Persister:
        started.append(Persister(more.pop("root", tmp_path), rank, world, content, **more))
        return started[-1]

    yield begin
    for persister in started:
        persister.end()


def test_parts_of_all_ranks_become_a_checkpoint(tmp_path: Path, start: Start) -> None:
    """Once every rank's part is durable the checkpoint exists, verifies, and every process says so."""
    world = [start(rank, 3) for rank in range(3)]
    world[0].command(save=STEP, sample=SAMPLE)
    world[1].command(save=STEP, sample=SAMPLE)
    until(lambda: len(list(tmp_path.glob("step-*/rank-*"))) == 2)
    assert steps(tmp_path) == []
    world[2].command(save=STEP, sample=SAMPLE)
    assert [persister.answer() for persister in world] == [{"state": "committed"}] * 3
    manifest = verify(folder_of(tmp_path, STEP))
    assert (manifest.step, manifest.sample, manifest.layout, len(manifest.files)) == (STEP, SAMPLE, {"dp": 3}, 3)


def test_nothing_is_saved_below_a_mount_that_is_gone(tmp_path: Path, start: Start) -> None:
    """The same path would be on the disk of the node, and the checkpoint be lost with exit code 0."""
    mounted, below = tmp_path / "mounted", tmp_path / "below"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        mounted.symlink_to(elsewhere)
        alone = start(0, 1, root=mounted)
        alone.command(save=10, sample=0)
        assert alone.answer() == {"state": "committed"}
        below.mkdir()
        mounted.unlink()
        mounted.symlink_to(below)
        alone.command(save=20, sample=0)
        answer = alone.answer()
        assert (answer["state"], "no longer mounted here" in answer["why"]) == ("failed", True)
        assert [*below.iterdir()] == []
        mounted.unlink()
        mounted.symlink_to(elsewhere)
        alone.command(save=20, sample=0)
        assert alone.answer() == {"state": "committed"}


def test_nothing_is_saved_after_a_move_before_the_first_checkpoint(tmp_path: Path, start: Start) -> None:
    """The path does not lead to the run any more, whatever is there."""
    root = tmp_path / "run" / "checkpoints"
    root.mkdir(parents=True)
    first = start(0, 2, root=root)
    first.command(save=10, sample=0)
    first.command(abandon=10)
    assert first.answer() == {"state": "abandoned"}
    (tmp_path / "run").rename(tmp_path / "moved")
    first.command(save=20, sample=0)
    assert "the run's folder was moved" in first.answer()["why"]
    assert not (tmp_path / "run").exists()


def test_nothing_is_saved_in_the_place_of_a_folder_that_was_moved(tmp_path: Path, start: Start) -> None:
    """The run would be in two halves, of which neither is whole. A folder of checkpoints that was removed is made."""
    root = tmp_path / "run" / "checkpoints"
    root.mkdir(parents=True)
    alone = start(0, 1, root=root)
    alone.command(save=10, sample=0)
    assert alone.answer() == {"state": "committed"}
    shutil.rmtree(root)
    alone.command(save=20, sample=0)
    assert alone.answer() == {"state": "committed"}
    (tmp_path / "run").rename(tmp_path / "moved")
    alone.command(save=30, sample=0)
    assert "the run's folder was moved" in alone.answer()["why"]
    assert (steps(tmp_path / "moved/checkpoints"), (tmp_path / "run").exists()) == ([20], False)


def test_lines_of_steps_are_durable_before_their_checkpoint(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody repeats these steps once the checkpoint is there, so a power failure must not take their lines."""
    (root := tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (root.parent / METRICS).write_text("{}\n")
    for name, value in Faults(tmp_path, "opsd.trainer.persist", log=tmp_path / "log").environment.items():
        monkeypatch.setenv(name, value)
    alone = start(0, 1, root=root)
    alone.command(save=10, sample=0)
    assert alone.answer() == {"state": "committed"}
    made = calls(tmp_path / "log")
    synced = next(n for n, call in enumerate(made) if (call.name, call.path.name) == ("fsync", METRICS))
    assert synced < next(n for n, call in enumerate(made) if call.name == "link")


def test_old_checkpoints_go(tmp_path: Path, start: Start) -> None:
    """The first rank's process keeps as many checkpoints as it was told to."""
    alone = start(0, 1)
    for step in (10, 20, 30):
        alone.command(save=step, sample=0)
        assert alone.answer() == {"state": "committed"}
    until(lambda: steps(tmp_path) == [20, 30])


def test_a_save_outlives_its_ranks(tmp_path: Path, start: Start) -> None:
    """Ranks that die after handing over lose nothing: the processes finish, commit and end."""
    world = [start(rank, 2) for rank in range(2)]
    for persister in world:
        persister.command(save=STEP, sample=SAMPLE)
        persister.rank_dies()
    for persister in world:
        assert persister.process.wait(timeout=60) == 0
    assert verify(folder_of(tmp_path, STEP)).step == STEP


def test_a_part_that_never_comes_is_given_up(tmp_path: Path, start: Start) -> None:
    """When a rank died before handing over its part, the others remove theirs and end."""
    world = [start(rank, 2) for rank in range(2)]
    world[0].command(save=STEP, sample=SAMPLE)
    world[0].rank_dies()
    until(lambda: len(list(tmp_path.glob("step-*/rank-0000.*"))) == 1)
    assert world[0].process.poll() is None  # the other one is alive and may still deliver
    world[1].rank_dies()
    for persister in world:
        assert persister.process.wait(timeout=60) == 0
    assert [path.name for path in tmp_path.iterdir()] == [LOCKS]


def test_the_next_generation_waits_for_saves(tmp_path: Path, start: Start) -> None:
    """wait_for_saves is False while a rank or its persist process lives, and True once both have ended."""
    assert wait_for_saves(tmp_path, 1)
    alone = start(1, 2)
    assert not wait_for_saves(tmp_path, 0)
    os.kill(alone.process.pid, signal.SIGSTOP)
    alone.rank_dies()
    assert not wait_for_saves(tmp_path, 0.1)
    os.kill(alone.process.pid, signal.SIGCONT)
    assert wait_for_saves(tmp_path, 30)


def test_an_upload_is_waited_for_by_nobody_else(tmp_path: Path, start: Start) -> None:
    """It goes on after the rank's death, without the next generation waiting, and so does what was saved during it."""
    bucket = tmp_path / "bucket"
    blocked = folder_of(bucket, 10) / MANIFEST
    blocked.parent.mkdir(parents=True)
    os.mkfifo(blocked)  # the upload waits here for a reader
    alone = start(0, 1, remote=f"file://{bucket}")
    alone.command(save=10, sample=0)
    assert alone.answer() == {"state": "committed"}
    until(lambda: any(blocked.parent.glob("rank-*")))
    alone.command(save=20, sample=0)
    assert alone.answer() == {"state": "committed"}
    alone.rank_dies()
    assert wait_for_saves(tmp_path, 30)
    assert alone.process.poll() is None
    assert blocked.read_text()
    assert alone.process.wait(timeout=60) == 0
    assert verify(folder_of(bucket, 20)).tier == "remote"


def test_parts_of_two_attempts_do_not_mix(tmp_path: Path, start: Start) -> None:
    """A part left by an earlier start of the run is not taken for one of this start."""
    earlier = start(1, 2, attempt="00000001")
    earlier.command(save=STEP, sample=SAMPLE)
    until(lambda: len(list(tmp_path.glob("step-*/rank-0001.00000001-*.safetensors"))) == 1)
    earlier.process.kill()
    first = start(0, 2)
    first.command(save=STEP, sample=SAMPLE)
    until(lambda: len(list(tmp_path.glob("step-*/rank-0000.*.safetensors"))) == 1)
    assert steps(tmp_path) == []
    start(1, 2, b"other bytes").command(save=STEP, sample=SAMPLE)
    assert first.answer() == {"state": "committed"}
    assert all(".0000abcd-1." in entry.name for entry in verify(folder_of(tmp_path, STEP)).files)


def test_an_abandoned_save_is_removed(tmp_path: Path, start: Start) -> None:
    """Told that another rank failed, a process drops its part and is ready for the next save."""
    first = start(0, 2)
    first.command(save=STEP, sample=SAMPLE)
    until(lambda: len(list(tmp_path.glob("step-*/rank-0000.*.safetensors"))) == 1)
    first.command(abandon=STEP)
    assert first.answer() == {"state": "abandoned"}
    assert not folder_of(tmp_path, STEP).exists()
    first.command(save=STEP + 20, sample=SAMPLE)
    start(1, 2).command(save=STEP + 20, sample=SAMPLE, number=2)
    assert first.answer() == {"state": "committed"}


def test_of_two_copies_of_a_run_only_the_later_writes(tmp_path: Path) -> None:
    """Once the other copy has claimed a generation, this one commits nothing more and takes its part away again."""
    root = tmp_path / "checkpoints"
    root.mkdir()
    assert create(tmp_path, Claim(1, "a start", "n1 7"))
    cut_off, requeued = (
        Persister(root, 0, 1, b"state" * 999, f"0000000{generation}", generation) for generation in (1, 2)
    )
    try:
        cut_off.command(save=10, sample=0)
        assert cut_off.answer() == {"state": "committed"}
        assert create(tmp_path, Claim(2, "a start", "n2 7"))
        cut_off.command(save=20, sample=0)
        answer = cut_off.answer()
        assert answer["state"] == "failed"
        assert "generation 2 of the run has begun elsewhere" in answer["why"]
        assert not folder_of(root, 20).exists()
        requeued.command(save=20, sample=0)
        assert requeued.answer() == {"state": "committed"}
        assert ".00000002-1." in verify(folder_of(root, 20)).files[0].name
    finally:
        cut_off.end()
        requeued.end()


def test_claims_that_cannot_be_read_for_a_while_delay_a_commit(tmp_path: Path) -> None:
    """Nothing is committed until they can be; after the limit the save has failed, and the next one is tried."""
    root, claims = tmp_path / "checkpoints", tmp_path / FOLDER
    root.mkdir()
    claims.write_text("in the way")
    patient, hasty = (
        Persister(root, rank, 1, b"state" * 999, f"0000000{rank}", 1, patience_s=patience_s)
        for rank, patience_s in ((0, 600.0), (0, 0.0))
    )
    try:
        hasty.command(save=10, sample=0)
        answer = hasty.answer()
        assert answer["state"] == "failed"
        assert "whether generation 1 may write cannot be seen" in answer["why"]
        patient.command(save=20, sample=0)
        until(lambda: list(root.glob("step-*/rank-*.safetensors")))
        assert steps(root) == []
        claims.unlink()
        assert patient.answer() == {"state": "committed"}
        hasty.command(save=30, sample=0)
        assert hasty.answer() == {"state": "committed"}
    finally:
        patient.end()
        hasty.end()


def test_a_step_is_committed_once(tmp_path: Path, start: Start) -> None:
    """A second save of a committed step leaves the first one's files, and fails unless model and data are the same."""
    first, second = start(0, 1, attempt="00000001"), start(0, 1, b"other bytes", attempt="00000002")
    first.command(save=STEP, sample=SAMPLE)
    assert first.answer() == {"state": "committed"}
    second.command(save=STEP, sample=SAMPLE, digest="another model")
    answer = second.answer()
    assert answer["state"] == "failed"
    assert "another start of the run has committed another checkpoint of this step" in answer["why"]
    second.command(save=STEP, sample=SAMPLE)
    assert second.answer() == {"state": "committed"}
    assert ".00000001-1." in verify(folder_of(tmp_path, STEP)).files[0].name
    assert not list(tmp_path.glob("step-*/*.00000002-*"))


def test_a_torn_part_is_not_a_part(tmp_path: Path, start: Start) -> None:
    """A process killed while it writes leaves a draft at most, and no checkpoint."""
    persister = start(0, 1, bytes(200_000_000))
    persister.command(save=STEP, sample=SAMPLE)
    until(lambda: any(tmp_path.glob("step-*/.rank-*")))
    persister.process.send_signal(signal.SIGKILL)
    persister.process.wait()
    assert steps(tmp_path) == []


def test_a_full_disk_fails_the_save_and_nothing_else(small_disk: Path) -> None:
    """No space: the process says so, leaves the older checkpoint whole and nothing of the new one, and goes on."""
    persister = Persister(small_disk, 0, 1, bytes(400_000))
    try:
        persister.command(save=10, sample=0)
        assert persister.answer() == {"state": "committed"}
        (small_disk / "filler").write_bytes(bytes(400_000))
        persister.command(save=20, sample=0)
        answer = persister.answer()
        assert answer["state"] == "failed"
        assert "No space left on device" in answer["why"]
        assert steps(small_disk) == [10]
        verify(folder_of(small_disk, 10))
        assert not folder_of(small_disk, 20).exists()
        (small_disk / "filler").unlink()
        persister.command(save=30, sample=0)
        assert persister.answer() == {"state": "committed"}
    finally:
        persister.end()


def test_a_failed_commit_takes_nothing_with_it(tmp_path: Path, start: Start) -> None:
    """An older checkpoint of the same step survives a save that fails."""
    alone = start(0, 1)
    alone.command(save=STEP, sample=SAMPLE)
    assert alone.answer() == {"state": "committed"}
    folder = folder_of(tmp_path, STEP)
    manifest = read(folder)
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).mkdir()
    again = start(0, 1, attempt="00000002")
    again.command(save=STEP, sample=SAMPLE)
    assert again.answer()["state"] == "failed"
    (folder / MANIFEST).rmdir()
    commit(folder, manifest)
    assert verify(folder).files == manifest.files


# Reading checkpoint files: this rank's own, and those of any other layout.


def split(shape: tuple[int, ...], cuts: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and shapes of a grid of ``cuts`` nearly equal parts per dimension, empty ones included."""
    parts: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for length, count in zip(shape, cuts, strict=True):
        size = -(-length // count)
        bounds = [(min(i * size, length), min((i + 1) * size, length)) for i in range(count)]
        parts = [((*offset, low), (*sizes, high - low)) for offset, sizes in parts for low, high in bounds]
    return parts


def states(tensors: dict[str, torch.Tensor], cuts: tuple[int, int]) -> list[State]:
    """The state of every rank of a grid layout; tensors with fewer than two dimensions are held by all."""
    ranks: list[State] = [{} for _ in range(cuts[0] * cuts[1])]
    for name, tensor in tensors.items():
        grid = split(tuple(tensor.shape), cuts if tensor.dim() == 2 else (1,) * tensor.dim())
        for rank, state in enumerate(ranks):
            offset, sizes = grid[rank % len(grid)]
            window = tuple(slice(at, at + n) for at, n in zip(offset, sizes, strict=True))
            state[name] = Region(tensor[window].clone(), tuple(tensor.shape), offset)
    return ranks


def write(folder: Path, ranks: list[State]) -> Manifest:
    """A checkpoint as the persist processes write it."""
    entries = []
    for rank, state in enumerate(ranks):
        header, starts, size = file_layout(state)
        content = bytearray(size)
        content[: len(header)] = header
        for name, start in starts.items():
            local = state[name].local
            raw = bytes(local.contiguous().flatten().view(torch.uint8).numpy()) if local.numel() else b""
            content[start : start + len(raw)] = raw
        path = folder / f"rank-{rank:04d}.safetensors"
        path.write_bytes(content)
        entries.append(FileEntry(path.name, size, ""))
    return Manifest(20, 80, {"dp": len(ranks)}, "", tuple(entries), "local", 0.0)


def tensors_like(shapes: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    tensors = {f"m{i}": torch.randn(shape) for i, shape in enumerate(shapes)}
    return tensors | {"norm": torch.randn(5), "updates": torch.tensor([7.0])}


@pytest.fixture
def own(tmp_path: Path) -> tuple[Path, State]:
    """The file of the second of three ranks, and a state of zeros in its layout, one tensor of it transposed."""
    ranks = states(tensors_like([(7, 5), (300, 4)]), (3, 1))
    write(tmp_path, ranks)
    state = {name: replace(region, local=torch.zeros_like(region.local)) for name, region in ranks[1].items()}
    state["m1"] = replace(state["m1"], local=torch.zeros(state["m1"].local.shape[::-1]).T)
    return tmp_path / "rank-0001.safetensors", state


def test_a_ranks_own_file_is_copied_and_hashed(own: tuple[Path, State]) -> None:
    """In one pass, whatever the strides of the tensors; the names that the file holds are told."""
    path, state = own
    names, found = copy_file(path, state)
    assert (set(names), found) == (state.keys(), checksum(path))
    with safe_open(path, framework="pt") as file:
        for name, region in state.items():
            assert torch.equal(region.local, file.get_tensor(name)), name


@pytest.mark.parametrize("damage", ["another layout", "cut off", "no file of ours", "empty"])
def test_a_file_that_is_not_of_this_rank_is_refused(own: tuple[Path, State], damage: str) -> None:
    """By name, and without a guess at what it might be."""
    path, state = own
    content = path.read_bytes()
    if damage == "another layout":
        state["m0"] = replace(state["m0"], offset=(0, 0))
    elif damage == "cut off":
        path.write_bytes(content[:-3])
    else:
        path.write_bytes(b"" if damage == "empty" else bytes(200))
    with pytest.raises(CheckpointError, match=r"rank-0001\.safetensors (is not the state of|is truncated)"):
        copy_file(path, state)


GRIDS = st.tuples(st.integers(1, 4), st.integers(1, 3))


@settings(max_examples=60, deadline=None)
@given(shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 7)), min_size=1, max_size=3), old=GRIDS, new=GRIDS)
def test_any_layout_reads_any_other(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[tuple[int, int]],
    old: tuple[int, int],
    new: tuple[int, int],
) -> None:
    """A checkpoint written by one grid of ranks is read bit for bit by any other, uneven and empty parts included."""
    folder = tmp_path_factory.mktemp("c")
    tensors = tensors_like(shapes)
    manifest = write(folder, states(tensors, old))
    wanted = states(tensors, new)
    for rank, expected in enumerate(wanted):
        mine = {name: replace(region, local=torch.full_like(region.local, -9)) for name, region in expected.items()}
        load(folder, manifest, mine, rank)
        for name, region in expected.items():
            assert torch.equal(mine[name].local, region.local)


def test_files_are_plain_safetensors(tmp_path: Path) -> None:
    """A rank's file opens with the safetensors library, tensors aligned, with the place of each region."""
    tensors = tensors_like([(6, 4)])
    write(tmp_path, states(tensors, (2, 1)))
    with safe_open(tmp_path / "rank-0001.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(tensors)
        assert torch.equal(file.get_tensor("m0"), tensors["m0"][3:])
        assert json.loads(file.metadata()["regions"])["m0"] == {"shape": [6, 4], "offset": [3, 0]}
    assert file_layout(states(tensors, (2, 1))[0])[1]["m0"] % 64 == 0


def test_bfloat16_survives(tmp_path: Path) -> None:
    """Half-precision tensors are stored as they are."""
    tensor = torch.randn(4, 4).bfloat16()
    manifest = write(tmp_path, states({"m": tensor}, (2, 1)))
    mine = {"m": Region(torch.zeros(4, 4, dtype=torch.bfloat16), (4, 4), (0, 0))}
    load(tmp_path, manifest, mine)
    assert torch.equal(mine["m"].local, tensor)


def test_replicas_do_not_hide_a_hole(tmp_path: Path) -> None:
    """Two files with the same half of a tensor do not pass for the whole of it."""
    ranks = states({"m": torch.randn(4, 4)}, (2, 1))
    manifest = write(tmp_path, [ranks[0], ranks[0]])
    with pytest.raises(CheckpointError, match="does not hold all of m"):
        load(tmp_path, manifest, {"m": Region(torch.zeros(4, 4), (4, 4), (0, 0))})


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    """A checkpoint that lacks a tensor of the model is refused with its name."""
    manifest = write(tmp_path, states({"a": torch.ones(2, 2)}, (1, 1)))
    wanted = states({"a": torch.ones(2, 2), "b": torch.ones(2, 2)}, (1, 1))[0]
    with pytest.raises(CheckpointError, match="does not hold all of b"):
        load(tmp_path, manifest, wanted)


# When the next checkpoint is due.


@given(stall=st.floats(1e-3, 100), mttf=st.floats(2e4, 1e7))
def test_the_interval_loses_least(stall: float, mttf: float) -> None:
    """No interval that is a fifth shorter or longer takes less time for the same work."""

    def time_per_work(seconds: float) -> float:
        """Expected seconds for a second of work, restarts being free (Daly 2006, eq. 13)."""
        return mttf * math.expm1((seconds + stall) / mttf) / seconds

    best = daly(stall, mttf)
    assert time_per_work(best) <= time_per_work(best * 0.8)
    assert time_per_work(best) <= time_per_work(best * 1.2)


def test_a_slow_save() -> None:
    """A stall of 5 minutes and a failure a day call for a save every 115 minutes."""
    assert daly(300, 86400) / 60 == pytest.approx(115, abs=3)


def test_steps() -> None:
    """An interval in steps depends on nothing else."""
    interval = Interval(CheckpointSettings(every=20), 0)
    assert [step for step in range(1, 61) if interval.due(step, 1e9)] == [20, 40, 60]


def test_minutes() -> None:
    """An interval in minutes counts from the beginning of the save before."""
    interval = Interval(CheckpointSettings(minutes=2), 100)
    assert not interval.due(1, 219)
    assert interval.due(1, 220)
    interval.saved(220, 5)
    assert not interval.due(2, 339)
    assert interval.due(2, 340)


def test_measured_stalls() -> None:
    """With a mean time to failure the interval follows from the median stall, after a first save at a fixed time."""
    interval = Interval(CheckpointSettings(mttf_hours=24), 0)
    assert interval.seconds == FIRST_S
    for stall in (2.0, 2.0, 500.0):
        interval.saved(0, stall)
    assert interval.seconds == pytest.approx(daly(2.0, 86400))
    short = Interval(CheckpointSettings(mttf_hours=24), 0)
    short.saved(0, 1e-6)
    assert short.seconds == LEAST_S


# The audit of shards and copies, and its checksum.


def rank(**tensors: tuple[int, str]) -> Checksums:
    return {name: RegionChecksum((row, 0), bits) for name, (row, bits) in tensors.items()}


def test_shards_that_differ_and_copies_that_agree_are_fine() -> None:
    """What tensor parallelism should look like gives nothing."""
    ranks = [rank(query=(0, "a"), norm=(0, "n")), rank(query=(4, "b"), norm=(0, "n"))]
    assert equal_shards(ranks, {"query"}) == {}
    assert not list(different_copies(ranks))


def test_shards_drawn_from_one_seed_are_found() -> None:
    """The same bits in two places of a tensor that is drawn at random are named, with the ranks that hold them."""
    ranks = [
        rank(key=(0, "a"), query=(0, "c"), norm=(0, "1")),
        rank(key=(4, "b"), query=(4, "c"), norm=(4, "1")),
        rank(key=(8, "a"), query=(8, "c"), norm=(8, "1")),
    ]
    assert equal_shards(ranks, {"key", "query"}) == {(0, 2): ["key"], (0, 1, 2): ["query"]}


def test_copies_that_differ_are_found() -> None:
    """Of a region that two ranks hold, one has other bits."""
    ranks = [rank(norm=(0, "n")), rank(norm=(0, "n")), rank(norm=(0, "x")), rank(norm=(8, "y"))]
    assert list(different_copies(ranks)) == [("norm", [0, 1, 2])]


def test_a_tensor_that_only_some_have_is_compared_between_these() -> None:
    """The embedding is in the first and the last stage only."""
    ranks = [rank(embedding=(0, "a")), rank(), rank(embedding=(0, "b"))]
    assert list(different_copies(ranks)) == [("embedding", [0, 2])]
    assert equal_shards(ranks, {"embedding"}) == {}


@given(size=st.integers(1, 300), data=st.data())
def test_one_bit_changes_the_checksum(size: int, data: st.DataObject) -> None:
    """Any flipped bit and any two values that change places show."""
    values = torch.arange(1, size + 1, dtype=torch.float32)
    at, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 31))
    flipped = values.clone()
    flipped.view(torch.int32)[at] ^= -(2**31) if bit == 31 else 1 << bit
    assert checksum_of_values(flipped) != checksum_of_values(values)
    if size > 1:
        assert checksum_of_values(values.flip(0)) != checksum_of_values(values)
    assert checksum_of_values(values.clone().view(1, -1)) == checksum_of_values(values)


def test_half_precision_has_checksums_too() -> None:
    """Tensors of 16-bit numbers are summed up word by word."""
    values = torch.randn(9).bfloat16()
    assert len(checksum_of_values(values)) == 16
    assert checksum_of_values(values) != checksum_of_values(-values)
