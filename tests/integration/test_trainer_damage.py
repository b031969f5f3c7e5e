"""What the trainer does not train on: damaged checkpoints and shards, settings that do not fit together."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from trainer_world import Run, flip

from opsd.checkpoints.manifest import MANIFEST, REJECTED, folder_of, read, steps
from opsd.trainer.config import CONFIG
from tests.fakes.clock import until


def refused(run: Run, *arguments: str, **settings: object) -> tuple[int | None, str]:
    """Exit code and last line of a start that must not work.

    A rank that is not ready to refuse when another one does ends with the lost connection to that one.
    """
    for log in run.folder.glob("rank-*.log"):
        log.unlink()
    codes = run.start(*arguments, **settings).wait()
    refusing = max(range(len(codes)), key=lambda rank: codes[rank] or 0)
    assert {codes[refusing], 1} >= set(codes)
    text = run.log(refusing).read_text()
    assert "Traceback" not in text, text
    return codes[refusing], text.splitlines()[-1]


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped bit": flip,
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "missing": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_damaged_checkpoint_is_set_aside(stopped_at_20: Run, undisturbed: Run, damage: str, rank: int) -> None:
    """A file of the newest checkpoint is damaged: it is named, the previous checkpoint is used, the losses agree."""
    run = stopped_at_20
    folder = folder_of(run.checkpoints, 20)
    name = read(folder).files[rank].name
    DAMAGES[damage](folder / name)
    run.finish()
    (event,) = run.events("checkpoint_rejected")
    assert (event["step"], event["file"]) == (20, name)
    assert event["why"]
    assert run.events("checkpoint_loaded")[-1]["step"] == 15
    assert (folder / REJECTED).exists()
    assert run.curve() == undisturbed.curve()


def change_digest(path: Path) -> None:
    """Flip a bit of what the state belongs to, with which the whole run would be taken for another."""
    content = path.read_bytes()
    at = content.index(b'"config_digest": "') + len(b'"config_digest": "')
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])


def put_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def put_folder(path: Path) -> None:
    path.unlink()
    (path / "theirs").mkdir(parents=True)


BAD_MANIFESTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "never completed"),
    "flipped bit": (flip, ""),
    "another digest": (change_digest, "does not match the checksum of itself"),
    "nested deeply": (lambda path: path.write_bytes(b"[" * 100_000), "is nested too deeply"),
    "a gigabyte": (lambda path: os.truncate(path, 1 << 30), "has 1073741824 bytes"),
    "a pipe": (put_pipe, "is no regular file"),
    "a folder": (put_folder, "is no regular file"),
}


@pytest.mark.parametrize("bad", BAD_MANIFESTS)
def test_a_damaged_manifest_is_not_used(stopped_at_20: Run, undisturbed: Run, bad: str) -> None:
    """Without a manifest, or with one that is damaged, a checkpoint is not loaded, and the event names the manifest."""
    damage, why = BAD_MANIFESTS[bad]
    run = stopped_at_20
    damage(folder_of(run.checkpoints, 20) / MANIFEST)
    run.finish()
    (event,) = run.events("checkpoint_rejected")
    assert event["step"] == 20
    assert why in event["why"]
    assert run.events("checkpoint_loaded")[-1]["step"] == 15
    assert run.curve() == undisturbed.curve()


def hide(path: Path) -> None:
    """Have the storage fail whenever the file is read: with ELOOP."""
    path.rename(path.with_suffix(".hidden"))
    path.symlink_to(path.name)


def show(path: Path) -> None:
    """The storage is well again."""
    path.with_suffix(".hidden").replace(path)


def test_a_storage_error_of_one_rank_condemns_no_checkpoint(stopped_at_20: Run, undisturbed: Run) -> None:
    """What a rank cannot read is passed over and stays; with nothing else left the run ends with a sentence."""
    run = stopped_at_20
    saved = steps(run.checkpoints)
    files = [folder_of(run.checkpoints, step) / read(folder_of(run.checkpoints, step)).files[1].name for step in saved]
    for path in files:
        hide(path)
    code, line = refused(run)
    assert code == 1
    assert "not every rank can read the checkpoints" in line
    assert steps(run.checkpoints) == saved
    assert [event["step"] for event in run.events("checkpoint_rejected")] == saved[::-1]
    show(files[saved.index(15)])
    run.finish()
    assert run.events("checkpoint_loaded")[-1]["step"] == 15
    assert not list(run.checkpoints.glob(f"*/{REJECTED}"))
    assert run.curve() == undisturbed.curve()


def test_never_afresh_in_silence(stopped_at_20: Run, undisturbed: Run) -> None:
    """When every checkpoint is damaged the run stops and says so, each time, until it is told to begin again."""
    run = stopped_at_20
    saved = steps(run.checkpoints)
    for step in saved:
        flip(folder_of(run.checkpoints, step) / read(folder_of(run.checkpoints, step)).files[0].name)
    for _ in range(2):
        code, line = refused(run)
        assert code == 1
        assert "damaged" in line
        assert "--fresh" in line
    assert [event["step"] for event in run.events("checkpoint_rejected")] == saved[::-1]
    run.finish("--fresh")
    assert run.curve() == undisturbed.curve()


def test_checkpoints_that_are_gone_are_not_begun_again_in_silence(stopped_at_20: Run) -> None:
    """The events of the launcher tell that there were some: a lost mount or a wrong clean-up must not cost the run."""
    run = stopped_at_20
    for step in steps(run.checkpoints):
        (folder_of(run.checkpoints, step) / MANIFEST).unlink()
    (run.folder / "events.jsonl").write_text(
        "".join(json.dumps({"event": "checkpoint_committed", "step": step}) + "\n" for step in (10, 15))
        + json.dumps({"event": "checkpoint_unproved", "step": 15})
        + "\n"
    )
    code, line = refused(run)
    assert code == 1
    assert "has no checkpoint, but this run saved step 10; bring it back" in line
    run.finish("--fresh")


def test_another_model_is_refused(stopped_at_20: Run) -> None:
    """Checkpoints of other settings are not loaded and not touched."""
    saved = steps(stopped_at_20.checkpoints)
    code, line = refused(stopped_at_20, model__ffn=64)
    assert code == 2
    assert "other settings: model.ffn was 50 and is 64;" in line
    code, line = refused(stopped_at_20, optimizer__kind="muon")
    assert code == 2
    assert "other settings: optimizer.kind was 'adamw' and is 'muon';" in line
    (stopped_at_20.folder / CONFIG).unlink()
    assert "another model, seed, optimizer, sequence length, corpus" in refused(stopped_at_20, run__seed=9)[1]
    assert steps(stopped_at_20.checkpoints) == saved


def test_settings_that_cannot_be_kept_stop_no_training(run: Run) -> None:
    """One sentence says so: something else has their name, the disk is full."""
    (run.folder / CONFIG).mkdir(parents=True)
    run.finish(run__steps=2)
    assert f"opsd: {run.folder / CONFIG}: Is a directory" in run.printed()


def test_damaged_shards_are_refused(run: Run, shards: Path, tmp_path: Path) -> None:
    """Shards that do not match their index stop the run before it begins, with the file's name."""
    copy = tmp_path / "shards"
    copy.mkdir()
    for path in shards.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    flip(copy / "shard-00000.tokens")
    run.shards = copy
    world = run.start()
    until(lambda: any(rank.exitcode == 2 for rank in world.ranks))
    world.kill()  # the other one waits to be joined
    assert "shard-00000.tokens does not match its checksum" in run.printed()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"data__batch": 3}, "not a multiple of 2 ranks x data.micro_batch 1; start 1 or 3 ranks"),
        ({"model__vocab": 100}, "model.vocab is 100"),
        ({"data__sequence": 1_000_000}, "fewer tokens than one sequence"),
        ({"data__shards": "/nowhere"}, "python -m opsd.trainer.data"),
        pytest.param(
            {"run__device": "cuda"},
            "torch finds no GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_unusable_settings_are_refused(run: Run, settings: dict[str, object], text: str) -> None:
    """What does not fit together is refused in one sentence with exit code 2."""
    code, line = refused(run, **settings)
    assert code == 2
    assert text in line
