"""`opsd checkpoint`: list, verify, prune, upload and audit."""

from __future__ import annotations

import argparse
import enum
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from opsd import exitcodes
from opsd.checkpoints import manifest
from opsd.checkpoints.manifest import MANIFEST
from opsd.checkpoints.retention import PRUNED
from opsd.commands.checkpoint import checkpoint
from opsd.trainer.duplicate_shards import Finding, examine, matrix_of
from opsd.trainer.tensors import Chunk, FormatError, Stored, stored_tensors
from tests.fakes.checkpoints import flip, make, run, swap_for_folder

# opsd checkpoint: list, verify, prune and upload by hand.


def test_list_shows_every_state(tmp_path: Path) -> None:
    """The list has complete, rejected, damaged, incomplete and half removed checkpoints, oldest first."""
    root = tmp_path / "checkpoints"
    for step in (10, 20, 30, 40, 50):
        make(root, step)
    folder = {step: manifest.folder_of(root, step) for step in (10, 20, 30, 40, 50)}
    os.rename(folder[10] / MANIFEST, folder[10] / PRUNED)
    manifest.reject(folder[20])
    (folder[30] / MANIFEST).write_text("{")
    (folder[40] / MANIFEST).unlink()
    for path in (tmp_path, root):
        listed = json.loads(run("list", path, "--json").output)["checkpoints"]
        assert [(entry["step"], entry["state"]) for entry in listed] == [
            (10, "removed"), (20, "rejected"), (30, "damaged"), (40, "incomplete"), (50, "complete"),
        ]  # fmt: skip
    assert listed[-1]["manifest"]["sample"] == 200
    table = run("list", tmp_path).output.splitlines()
    assert len(table) == 6
    assert "dp2" in table[-1]


def test_a_run_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by opsd report; what lies in the working directory comes first."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "opsd/runs/first/checkpoints", 10)
    assert " 10 " in run("list", "first").output
    make(tmp_path / "first/checkpoints", 20)
    assert " 20 " in run("list", "first").output
    assert "does not exist" in str(run("list", "second").exception)


def test_prune_by_hand_follows_the_rules_of_the_trainer(tmp_path: Path) -> None:
    """A dry run says what would go and why the others stay, and the real one does just that."""
    root = tmp_path / "checkpoints"
    for step in (10, 20, 25, 30, 40):
        make(root, step)
    (manifest.folder_of(root, 10) / "awaiting-evaluation").touch()
    rules = (tmp_path, "--keep", 2, "--keep-every", 20)
    dry = run("prune", *rules, "--dry-run")
    assert [line.split(", ")[0] for line in dry.output.splitlines()] == [
        "step 10: kept: awaiting evaluation", "step 20: kept: every 20 steps one is kept",
        "step 25: would be removed", "step 30: kept: among the newest", "step 40: kept: among the newest",
    ]  # fmt: skip
    assert manifest.steps(root) == [10, 20, 25, 30, 40]
    assert "step 25: removed" in run("prune", *rules).output
    assert manifest.steps(root) == [10, 20, 30, 40]
    again = run("prune", *rules)
    assert again.return_value == exitcodes.OK
    assert "nothing to remove" in again.output


def test_prune_by_hand_counts_those_that_are_whole(tmp_path: Path) -> None:
    """With a file of the newest missing the one before is the last good one: it stays, and the reasons are said."""
    for step in (10, 20, 30):
        make(tmp_path, step)
    (manifest.folder_of(tmp_path, 30) / "rank-0001.safetensors").unlink()
    result = run("prune", tmp_path, "--keep", 1)
    assert "step 30: kept: rank-0001.safetensors is missing" in result.output
    assert "step 20: kept: among the newest" in result.output
    assert manifest.steps(tmp_path) == [20, 30]


def test_upload_by_hand(tmp_path: Path) -> None:
    """What the other place does not have is copied and verified; a dry run sends nothing."""
    root, there = tmp_path / "checkpoints", tmp_path / "there"
    make(root, 10)
    (make(root, 20) / "awaiting-upload").touch()
    assert "step 20: would be uploaded" in run("upload", tmp_path, there, "--dry-run").output
    assert manifest.steps(there) == []
    assert run("upload", tmp_path, f"file://{there}").return_value == exitcodes.OK
    assert manifest.verify(manifest.folder_of(there, 20)).tier == "remote"
    assert not (manifest.folder_of(root, 20) / "awaiting-upload").exists()
    (manifest.folder_of(root, 10) / "awaiting-upload").touch()
    assert run("upload", tmp_path, there).output == "step 10: already there\nstep 20: already there\n"
    assert not (manifest.folder_of(root, 10) / "awaiting-upload").exists()


def test_a_damaged_checkpoint_is_not_uploaded_and_the_others_are(tmp_path: Path) -> None:
    """What is wrong with it is said, and the exit code says that something was."""
    for step in (10, 20):
        make(tmp_path / "here", step)
    flip(manifest.folder_of(tmp_path / "here", 10) / "rank-0000.safetensors")
    done = opsd("upload", tmp_path / "here", tmp_path / "there")
    assert done.returncode == exitcodes.FAILED
    assert "step 10: CheckpointError: " in done.stderr
    assert "step 20: uploaded" in done.stdout
    assert manifest.steps(tmp_path / "there") == [20]


def opsd(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "opsd", "checkpoint", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("url", "sentence", "code"),
    [
        ("nosuch://x", "nosuch://x cannot be used", exitcodes.USAGE),
        ("file:///proc/nowhere", "opsd: file:///proc/nowhere: ", exitcodes.FAILED),
    ],
)
def test_an_upload_that_cannot_be_done_says_why(tmp_path: Path, url: str, sentence: str, code: int) -> None:
    """An unknown protocol or a storage that refuses is one sentence, and the checkpoint stays."""
    make(tmp_path, 10)
    done = opsd("upload", tmp_path, url)
    assert (done.returncode, sentence in done.stderr, "Traceback" in done.stderr) == (code, True, False)
    assert manifest.steps(tmp_path) == [10]


def test_a_file_that_cannot_be_removed_is_a_failure(tmp_path: Path) -> None:
    """And not a wrong command line: others may have been removed already."""
    for step in (10, 20):
        make(tmp_path, step)
    stuck = manifest.folder_of(tmp_path, 10) / "rank-0000.safetensors"
    swap_for_folder(stuck)
    done = opsd("prune", tmp_path, "--keep", 1)
    assert done.returncode == exitcodes.FAILED
    assert done.stderr == f"opsd: not all old checkpoints could be removed: {stuck}: Is a directory\n"


def test_a_part_of_a_save_that_failed_is_not_called_removed(tmp_path: Path) -> None:
    """Its writer may still be at work, so it stays for an hour."""
    for step in (10, 20):
        make(tmp_path, step)
    part = manifest.folder_of(tmp_path, 10) / f"rank-0001.0123abcd-1.{'0' * 32}.safetensors"
    part.write_bytes(bytes(5000))
    done = opsd("prune", tmp_path, "--keep", 1)
    assert part.exists()
    assert "  5 kB of a save that failed stay for 60 min" in done.stdout


def test_list_of_nothing_says_so(tmp_path: Path) -> None:
    """A folder without checkpoints is not an empty table."""
    assert run("list", tmp_path).output == f"no checkpoints under {tmp_path}\n"


def test_verify_says_which_is_damaged(tmp_path: Path) -> None:
    """All checkpoints of a run, or one of them, are verified; a damaged one is named and decides the exit code."""
    for step in (10, 20):
        make(tmp_path, step)
    good = run("verify", tmp_path)
    assert good.return_value == exitcodes.OK
    assert good.output.count(": ok, 2 files") == 2
    flip(manifest.folder_of(tmp_path, 10) / "rank-0001.safetensors")
    bad = run("verify", tmp_path)
    assert bad.return_value == exitcodes.FAILED
    assert "step 10: DAMAGED" in bad.output
    assert "rank-0001.safetensors" in bad.output
    assert "step 20: ok" in bad.output
    assert run("verify", manifest.folder_of(tmp_path, 20)).return_value == exitcodes.OK
    assert run("verify", manifest.folder_of(tmp_path, 10)).return_value == exitcodes.FAILED


def test_verify_of_nothing_is_not_a_success(tmp_path: Path) -> None:
    """A folder without checkpoints fails the check."""
    result = run("verify", tmp_path)
    assert result.return_value == exitcodes.FAILED
    assert "no complete checkpoint" in result.output


@contextmanager
def meanwhile(action: Callable[[], object]) -> Iterator[None]:
    """``action`` is done by another thread, and must have been by the end of the block."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    yield
    thread.join(20)
    assert not thread.is_alive()


def test_a_checkpoint_that_is_removed_meanwhile_is_not_damaged(tmp_path: Path) -> None:
    """Neither to who verifies it, nor to who lists it: a trainer that goes on removes old ones at any moment."""
    folder = make(tmp_path, 10)
    entry, pipe = manifest.read(folder), folder / "rank-0000.safetensors"
    pipe.unlink()
    os.mkfifo(pipe)
    (folder / MANIFEST).unlink()
    manifest.commit(folder, replace(entry, files=(replace(entry.files[0], size=0),)))

    def prune_while_read() -> None:
        with open(pipe, "w"):  # is open once verify reads the file, after the manifest
            os.rename(folder / MANIFEST, folder / PRUNED)

    with meanwhile(prune_while_read):
        verified = run("verify", tmp_path)
    assert (verified.return_value, verified.output) == (exitcodes.OK, "step 10: removed meanwhile\n")


def test_a_checkpoint_that_goes_while_it_is_listed_is_not_damaged(tmp_path: Path) -> None:
    """Each is there or being removed, whenever the list looks."""
    folders = [make(tmp_path, step, files=1) for step in range(1, 200)]

    def remove_one_after_the_other() -> None:
        for folder in folders:
            os.rename(folder / MANIFEST, folder / PRUNED)

    with meanwhile(remove_one_after_the_other):
        listed = [json.loads(run("list", tmp_path, "--json").output)["checkpoints"] for _ in range(3)]
    assert {entry["state"] for entries in listed for entry in entries} <= {"complete", "removed"}


def test_a_list_goes_on_beside_a_trainer_that_writes(tmp_path: Path) -> None:
    """Drafts come and go while sizes are added up."""
    folder, stop = make(tmp_path, 10), threading.Event()

    def write_drafts() -> None:
        while not stop.is_set():
            for number in range(20):
                (folder / f"draft-{number}").touch()
            for number in range(20):
                (folder / f"draft-{number}").unlink()

    with meanwhile(write_drafts):
        try:
            assert all(run("list", tmp_path, "--json").return_value == exitcodes.OK for _ in range(100))
        finally:
            stop.set()


# `opsd checkpoint audit`: copies are named in every form of checkpoint, and independent shards are not.


torch.set_num_threads(1)


def stored(values: torch.Tensor, name: str = "w", ranks: int = 0) -> Stored:
    shape = tuple(values.shape)
    return Stored(name, shape, [Chunk((0,) * len(shape), shape, lambda: values)], ranks)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def copies(stored: Stored) -> Finding | None:
    values = matrix_of(stored)
    return None if values is None else examine(stored, values)


def findings(path: Path) -> list[Finding]:
    return [finding for each in stored_tensors(path) if (finding := copies(each))]


def audit(*arguments: object) -> Result:
    return CliRunner().invoke(checkpoint, ["audit", *map(str, arguments)], standalone_mode=False)


def test_a_checkpoint_that_was_never_committed_is_refused(tmp_path: Path) -> None:
    """Half of its ranks may be missing, so that it says nothing of copies."""
    (folder := tmp_path / "step-000000000008").mkdir()
    save_file({"w": drawn(8, 8)}, folder / f"rank-0000.0123abcd-1.{'0' * 32}.safetensors")
    assert "no complete checkpoint: step 8 is incomplete" in str(audit(tmp_path).exception)


@pytest.mark.parametrize(("dimension", "shards"), [(0, 2), (0, 3), (0, 4), (0, 6), (1, 2), (1, 5), (1, 8)])
def test_copies_are_found_along_either_dimension(dimension: int, shards: int) -> None:
    """A matrix put together from one shard several times is named, with the number of shards."""
    whole = torch.cat([drawn(48, 40)] * shards, dimension)
    finding = copies(stored(whole))
    assert finding is not None
    assert (finding.dimension, finding.shards, finding.copies) == (dimension, shards, tuple(range(shards)))
    assert finding.correlation == 1.0


def test_copies_that_drifted_apart_are_found() -> None:
    """Equal shards that were trained on, so that their bits differ, are still alike."""
    shard = drawn(48, 40)
    finding = copies(stored(torch.cat((shard, shard + drawn(48, 40, seed=1) / 50))))
    assert finding is not None
    assert 0.99 < finding.correlation < 1


def test_two_copies_among_four_are_found() -> None:
    """Not all shards need to be alike."""
    first, second, third = (drawn(48, 40, seed=seed) for seed in range(3))
    finding = copies(stored(torch.cat((first, second, first, third))))
    assert finding is not None
    assert (finding.shards, finding.copies) == (4, (0, 2))


@pytest.mark.parametrize(
    "values",
    [
        drawn(64, 64),
        torch.ones(64, 64),
        torch.zeros(64, 64),
        torch.cat((drawn(64, 64), torch.zeros(64, 64))),
        drawn(64, 64).square() + drawn(1, 64, seed=1).square() * 50,
        drawn(64, 64) + drawn(64, 1, seed=1) * 100 + drawn(1, 64, seed=2) * 100,
        torch.arange(4096).view(64, 64),
        drawn(64),
        drawn(2, 2),
    ],
    ids=["drawn", "ones", "zeros", "padded", "second-moment", "offsets", "integers", "vector", "tiny"],
)
def test_independent_shards_are_left_alone(values: torch.Tensor) -> None:
    """Random, constant and padded tensors, moments, and what has rows in common are no copies."""
    assert copies(stored(values)) is None


def repeated_heads() -> torch.Tensor:
    """Four heads of keys, each repeated for three heads of queries."""
    return drawn(4, 16, 48).repeat_interleave(3, dim=0).flatten(0, 1)


def sinusoids() -> torch.Tensor:
    angles = torch.arange(256)[:, None] / 10_000 ** (torch.arange(32) / 32)
    return torch.cat((angles.sin(), angles.cos()), dim=1)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("layers.0.self_attn.k_proj.weight", repeated_heads()),
        ("h.3.attn.value.weight", repeated_heads()),
        ("wte.weight", torch.cat((drawn(192, 32), drawn(1, 32, seed=1).expand(64, -1)))),
        ("lm_head.weight", torch.cat((drawn(100, 32), torch.zeros(28, 32)))),
        ("embed_positions.weight", sinusoids()),
        ("h.0.attn.bias", torch.ones(64, 64).tril()),
    ],
    ids=["GQA made MHA", "values too", "unused tokens", "padded tokens", "sinusoids", "causal mask"],
)
def test_copies_that_are_no_fault(name: str, values: torch.Tensor) -> None:
    """Each was an alarm on somebody's good checkpoint."""
    assert copies(stored(values, name)) is None


def test_heads_that_are_all_copies_are_a_fault() -> None:
    """Repeated heads leave groups that differ; shards of keys that are all equal were drawn from one seed."""
    finding = copies(stored(drawn(32, 48).repeat(4, 1), "self_attn.k_proj.weight"))
    assert finding is not None
    assert finding.copies == (0, 1, 2, 3)


def save_ranks(folder: Path, names: tuple[str, ...], seeds: tuple[int, ...], extra: object = None) -> None:
    """A file of ``torch.save`` for each rank, with one matrix of the model, and what else people save."""
    for name, seed in zip(names, seeds, strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        weights = {"layers.0.mlp.weight": drawn(32, 16, seed=seed), "layers.0.norm.weight": torch.ones(32)}
        torch.save({"model": weights, "args": extra, "rng": [torch.get_rng_state()]}, folder / name)


class Rung(enum.Enum):
    """A class that the reader of the checkpoint does not have."""

    FIRST = 1


LAYOUTS = {
    "Megatron-LM": ("iter_10/mp_rank_00/model_optim_rng.pt", "iter_10/mp_rank_01/model_optim_rng.pt"),
    "Megatron-LM, pipeline": ("i/mp_rank_00_001/model_optim_rng.pt", "i/mp_rank_01_001/model_optim_rng.pt"),
    "DeepSpeed": ("global_step5/mp_rank_00_model_states.pt", "global_step5/mp_rank_01_model_states.pt"),
    "Llama of Meta": ("consolidated.00.pth", "consolidated.01.pth"),
    "folders of ranks": ("rank_0/model.pt", "rank_1/model.pt"),
    "files of ranks": ("model_rank0.pt", "model_rank1.pt"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pickles_of_ranks(tmp_path: Path, layout: str) -> None:
    """One file a rank, with equal keys: equal shards are named, others are not, and nothing is overwritten."""
    extra = argparse.Namespace(rung=Rung.FIRST, numbers=numpy.arange(3))
    save_ranks(tmp_path / "bad", LAYOUTS[layout], (0, 0), extra)
    save_ranks(tmp_path / "good", LAYOUTS[layout], (0, 1), extra)
    assert not findings(tmp_path / "good")
    (finding,) = findings(tmp_path / "bad")
    assert finding.tensor.endswith("layers.0.mlp.weight")
    assert (finding.shards, finding.copies) == (2, (0, 1))


def test_pipeline_stages_are_not_shards(tmp_path: Path) -> None:
    """Stages number their layers from 0 each: equal keys, but not the same tensor."""
    save_ranks(tmp_path, ("i/mp_rank_00_000/m.pt", "i/mp_rank_00_001/m.pt"), (0, 0))
    assert not findings(tmp_path)


def test_checkpoints_side_by_side_are_not_shards(tmp_path: Path) -> None:
    """Equal keys in the checkpoints of two steps are two tensors, each with its own copies."""
    save_ranks(tmp_path, ("step_10/model.pt", "step_20/model.pt"), (0, 0))
    assert not findings(tmp_path)
    assert len(list(stored_tensors(tmp_path))) == 6


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before torch 1.6"])
def test_whole_tensors_by_torch_save(tmp_path: Path, zipped: bool) -> None:
    """Hugging Face's .bin, Lightning's .ckpt and plain files of a program, nested as they like."""
    shard = drawn(32, 16)
    content = {"epoch": 3, "state_dict": {"bad.weight": torch.cat((shard, shard)), "good.weight": drawn(64, 16)}}
    torch.save(content, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    assert [finding.tensor for finding in findings(tmp_path)] == ["state_dict.bad.weight"]
    assert len(list(stored_tensors(tmp_path))) == 2


@pytest.mark.parametrize(
    "name",
    [
        "iter_10/mp_rank_00/model_optim_rng.pt", "global_step100/mp_rank_00_model_states.pt",
        "runs/llama-tp8/step_10/model.pt",
    ],
    ids=["Megatron-LM of one rank", "DeepSpeed of one rank", "a run named after its layout"],
)  # fmt: skip
def test_a_number_is_no_rank_without_others(tmp_path: Path, name: str) -> None:
    """One file has the whole tensors, whatever its name: it was an all-clear, with nothing compared."""
    (tmp_path / name).parent.mkdir(parents=True)
    torch.save({"model": {"w": torch.cat([drawn(32, 16)] * 2)}}, tmp_path / name)
    (finding,) = findings(tmp_path)
    assert (finding.shards, finding.copies) == (2, (0, 1))
    other = tmp_path / "runs/llama-tp4/step_10/model.pt"
    other.parent.mkdir(parents=True)
    torch.save({"model": {"w": drawn(64, 16)}}, other)
    assert len(findings(tmp_path)) == 1


def test_matrices_of_experts(tmp_path: Path) -> None:
    """Each expert of a tensor may be put together from shards; experts of two ranks may be equal."""
    whole = torch.stack([drawn(32, 16, seed=seed) for seed in range(4)])
    assert copies(stored(whole)) is None
    finding = copies(stored(torch.cat((whole, whole))))
    assert finding is not None
    assert (finding.tensor, finding.shards, finding.copies) == ("w", 2, (0, 1))
    finding = copies(stored(torch.cat((whole, drawn(16, 16).repeat(2, 1)[None]))))
    assert finding is not None
    assert (finding.tensor, finding.shards, finding.copies) == ("w.4", 2, (0, 1))


def test_an_all_clear_needs_something_compared(tmp_path: Path) -> None:
    """ZeRO-3 leaves empty tensors in the files of the model: that is no good checkpoint, and no bad one."""
    torch.save(
        {"module": {"w": torch.empty(0), "norm": torch.ones(8)}}, tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    )
    result = audit(tmp_path)
    assert result.exception is not None
    assert "has no matrices that could be compared (2 tensors)" in str(result.exception.message)  # type: ignore[attr-defined]


def test_both_formats_in_a_folder(tmp_path: Path) -> None:
    """A pickle beside safetensors is read, but for those in which Hugging Face's Trainer has no weights."""
    save_file({"a": drawn(64, 16)}, tmp_path / "adapter.safetensors")
    torch.save({"w": torch.cat([drawn(32, 16)] * 2)}, tmp_path / "model.pt")
    for name in ("optimizer.pt", "optimizer_1.bin", "scheduler.pt", "training_args.bin", "rng_state_0.pth"):
        (tmp_path / name).write_bytes(b"no weights")
    assert [finding.tensor for finding in findings(tmp_path)] == ["w"]
    (tmp_path / "tokens.bin").write_bytes(b"no weights")
    with pytest.raises(FormatError, match=r"tokens\.bin holds objects that cannot be read"):
        list(stored_tensors(tmp_path))


def test_folders_behind_links(tmp_path: Path) -> None:
    """They are followed, each folder once: links may lead to where the walk has been."""
    (tmp_path / "elsewhere/deep").mkdir(parents=True)
    (tmp_path / "run/step-10").mkdir(parents=True)
    save_file({"w": torch.cat([drawn(32, 16)] * 2)}, tmp_path / "elsewhere/deep/m.safetensors")
    save_file({"a": drawn(64, 16)}, tmp_path / "run/step-10/m.safetensors")
    for name, target in (("latest", "step-10"), ("up", ".."), ("far", "../elsewhere")):
        (tmp_path / "run" / name).symlink_to(target)
    assert [finding.tensor for finding in findings(tmp_path / "run")] == ["w"]
    assert sorted(stored.name for stored in stored_tensors(tmp_path / "run")) == ["a", "w"]


def test_a_saved_object_runs_no_code(tmp_path: Path) -> None:
    """What a file of torch.save wants to call is not called; a class that it names is not imported."""

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "executed",)

    torch.save({"w": drawn(32, 32), "evil": Evil()}, tmp_path / "model.pt")
    with pytest.raises(FormatError, match="without executing code"):
        list(stored_tensors(tmp_path))
    assert not (tmp_path / "executed").exists()


def test_moments_are_passed_over() -> None:
    """Optimiser state may be alike for good reasons, early in a run."""
    assert copies(stored(torch.cat([drawn(32, 32)] * 2), "optimizer.exp_avg.w")) is None


def test_files_of_tensor_parallel_ranks(tmp_path: Path) -> None:
    """One safetensors file a rank, as nanotron writes them: equal ones are named."""
    for layer, seeds in (("q_proj", (0, 0)), ("k_proj", (1, 2))):
        (tmp_path / layer).mkdir()
        for rank, seed in enumerate(seeds):
            name = f"model_weight_pp-rank-0-of-1_tp-rank-{rank}-of-2.safetensors"
            save_file({"data": drawn(32, 16, seed=seed)}, tmp_path / layer / name)
    result = audit(tmp_path, "--json")
    report = json.loads(result.output)
    assert result.return_value == 1
    assert report["tensors"] == 2
    (copies,) = report["copies"]
    assert copies["tensor"].startswith("q_proj/")
    assert (copies["shards"], copies["copies"]) == (2, [0, 1])


def save_distributed(folder: Path, state: dict[str, object]) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dcp.save(state, checkpoint_id=folder)
    finally:
        dist.destroy_process_group()


def test_distributed_checkpoints(tmp_path: Path) -> None:
    """What torch.distributed.checkpoint wrote is read without executing its pickle, in half precision too."""
    shard = drawn(32, 16).bfloat16()
    save_distributed(tmp_path / "c", {"model": {"bad": torch.cat((shard, shard)), "good": drawn(64, 16)}, "step": 3})
    result = audit(tmp_path / "c")
    assert result.return_value == 1
    assert "model.bad" in result.output
    assert "model.good" not in result.output
    assert "1 of 2 tensors hold copies" in result.output
    torch.save({"ema": drawn(64, 16)}, tmp_path / "ema.pt")
    assert [finding.tensor for finding in findings(tmp_path)] == ["c:model.bad"]
    assert len(list(stored_tensors(tmp_path))) == 3


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    """Metadata that names anything but plain classes is not loaded."""

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "executed",)

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(FormatError, match="which plain metadata does not"):
        list(stored_tensors(tmp_path))
    assert not (tmp_path / "executed").exists()


def test_good_weights_are_good(tmp_path: Path) -> None:
    """Safetensors of whole tensors without copies: exit code 0 and how many were examined."""
    save_file({"a": drawn(64, 32), "b": torch.ones(64)}, tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        result = audit(path)
        assert result.return_value == 0
        assert result.output == "2 tensors: no shards are copies of each other\n"


@pytest.mark.parametrize(("content", "text"), [(None, "neither"), (b"no safetensors", "cannot be read")])
def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, content: bytes | None, text: str) -> None:
    """An empty folder and a broken file are refused by the command."""
    if content:
        (tmp_path / "m.safetensors").write_bytes(content)
    result = audit(tmp_path)
    assert result.exception is not None
    assert text in str(result.exception.message)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "content", [b"root:x:0:0:root:/root:/bin/bash\n", b"", b"PK\x03\x04 half an archive", b"\x80\x02}q"]
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: bytes) -> None:
    """The unpickler stumbles in as many ways as there are files."""
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(FormatError, match=r"a\.pt"):
        list(stored_tensors(tmp_path / "a.pt"))
