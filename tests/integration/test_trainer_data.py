"""A mixture of sources in the real trainer: whatever the number of ranks, it trains on the same samples."""

from __future__ import annotations

from pathlib import Path

import pytest
from trainer_world import Run, make_small_corpus

STAGES = "[{start = 1, weights = {a = 0.75, b = 0.25}}, {start = 13, weights = {b = 1.0}}]"
STEPS = 16


def finish(run: Run, world: int, **settings: object) -> None:
    codes = run.start(world=world, data__stages=STAGES, **settings).wait()
    assert codes == [0] * world, run.log().read_text()


def test_mixtures_survive_another_world_size(tmp_path: Path) -> None:
    """Gone on with on one rank from the middle of a block, a mixture gives the losses of an undisturbed run."""
    for name in ("a", "b"):
        make_small_corpus(tmp_path / "shards" / name)
    whole, broken = (Run(tmp_path / name, tmp_path / "shards") for name in ("whole", "broken"))
    finish(whole, 2, run__steps=STEPS)
    finish(broken, 2, run__steps=15)
    finish(broken, 1, run__steps=STEPS)
    assert broken.curve().keys() == whole.curve().keys()
    for step, (loss, _) in whole.curve().items():
        assert broken.curve()[step][0] == pytest.approx(loss, rel=1e-3)


def test_a_skipped_batch_is_not_trained_on(tmp_path: Path) -> None:
    """With steps 3 to 5 in the skip list, step 3 trains on what would have been the batch of step 6."""
    shards = make_small_corpus(tmp_path / "shards")
    plain, skipping = (Run(tmp_path / name, shards) for name in ("plain", "skipping"))
    frozen = {"run__steps": 6, "optimizer__lr": 1e-300}  # the model stays what it was, so the loss tells the batch
    for run, more in ((plain, {}), (skipping, {"data__skip": "[[3, 5]]"})):
        assert run.start(world=1, **frozen, **more).wait() == [0], run.log().read_text()
    batches = {step: loss for step, (loss, _) in plain.curve().items()}
    trained = {step: loss for step, (loss, _) in skipping.curve().items()}
    assert (trained[1], trained[2], trained[3]) == (batches[1], batches[2], batches[6])
    assert trained[4] not in batches.values()
