"""One run whose stages make sequences longer and change positions and batch, as if each stage were a run of its own."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from test_trainer_faults import kill_and_resume
from test_trainer_layouts import LAYOUTS, SHAPE, assert_same_curve, start, weights
from trainer_world import Run

from opsd.checkpoints.manifest import MANIFEST, folder_of, read
from opsd.checkpoints.sealed import CHECKSUM, seal
from opsd.trainer.config import Config
from opsd.trainer.config import load as load_config
from opsd.trainer.counts import flops_per_token
from opsd.trainer.data.shards import open_corpus
from opsd.trainer.data.sources import open_sources, sizes
from opsd.trainer.huggingface import export
from opsd.trainer.model import Decoder

SHORT = "{start = 1}"
LONGER = '{start = %d, sequence = 64, rope_theta = 1e6, long_documents = {"." = 0.25}}'
LONGEST = "{start = 11, sequence = 128, batch = 2, yarn_factor = 2.0, yarn_positions = 64}"
BEGUN = {1: f"[{SHORT}]", 6: f"[{SHORT}, {LONGER % 6}]", 11: f"[{SHORT}, {LONGER % 6}, {LONGEST}]"}
"""The stages by the step at which the last of them begins."""
STAGES: dict[str, object] = {"data__stages": BEGUN[11], "metrics__peak_flops": 1e12}


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Run:
    """Twelve steps on one rank: five of 32 tokens, five of 64, two of 128."""
    return start(tmp_path_factory.mktemp("alone"), shards, {}, **STAGES, run__steps=12, checkpoint__every=3)


def config_of(run: Run, shards: Path, **settings: object) -> Config:
    values = SHAPE | {name.replace("__", "."): value for name, value in settings.items()} | {"data.shards": shards}
    return load_config(str(run.folder / "config.toml"), [f"{name}={value}" for name, value in values.items()])


def test_a_run_goes_on_in_any_other_layout(tmp_path: Path, shards: Path, alone: Run) -> None:
    """Resumed before, at and after a change of stage, each time spread otherwise, it is one run.

    A stage need not be known before it begins.
    """
    layouts: list[tuple[int, dict[str, int]]] = [
        (4, {"dp": 2}), (5, {"tp": 2}), (6, {"pp": 2}), (10, {"cp": 2}), (11, {"dp": 2, "tp": 2}), (12, {}),
    ]  # fmt: skip
    for step, layout in layouts:
        stages = BEGUN[max(begin for begin in BEGUN if begin <= step)]
        run = start(tmp_path, shards, layout, data__stages=stages, run__steps=step)
    assert_same_curve(run, alone)


@pytest.mark.long
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_changes_nothing(tmp_path: Path, shards: Path, alone: Run, name: str) -> None:
    """Every rank changes at the same step: losses and norms are those of one rank."""
    assert_same_curve(start(tmp_path, shards, LAYOUTS[name], **STAGES, run__steps=12), alone)


def hand_over(source: Path, target: Path, step: int, digest: str) -> None:
    """Make the checkpoint of ``step`` in another folder that of a run with ``digest``."""
    shutil.copytree(folder_of(source, step), folder_of(target, step))
    path = folder_of(target, step) / MANIFEST
    info = json.loads(path.read_text()) | {"config_digest": digest}
    path.write_text(json.dumps(seal({name: value for name, value in info.items() if name != CHECKSUM})))


@pytest.fixture(scope="session")
def by_hand(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> tuple[Run, Run]:
    """A run of the first stage alone, and one of the second that begins with its last checkpoint.

    Whatever the second run says of the first stage, it does not matter.
    """
    folder = tmp_path_factory.mktemp("by_hand")
    first = start(folder / "first", shards, {}, run__steps=5)
    own = {"data__stages": BEGUN[6], "data__sequence": 16, "model__rope_theta": 99.0, "run__steps": 10}
    config = config_of(first, shards, **own)
    sources = open_sources(config.data, config.model.vocab)
    mixture = config.data.mix(sizes(sources, config.data), config.run.seed)
    digest = config.digest(mixture, dict.fromkeys(config.data.cuts(), sources["."].index.digest), 20)
    second = Run(folder / "second", shards, SHAPE)
    hand_over(first.checkpoints, second.checkpoints, 5, digest)
    assert second.start(world=1, **own).wait() == [0], second.printed()
    return first, second


def test_it_is_a_sequence_of_runs(alone: Run, by_hand: tuple[Run, Run]) -> None:
    """Each stage a run by itself: the same bits."""
    first, second = by_hand
    curve = alone.curve()
    assert first.curve() == {step: point for step, point in curve.items() if step <= 5}
    assert second.curve() == {step: point for step, point in curve.items() if 5 < step <= 10}


@pytest.mark.parametrize(("step", "changed"), [
    (6, {"rope_theta": 1e6}), (11, {"rope_theta": 1e6, "yarn_factor": 2.0, "yarn_positions": 64}),
])  # fmt: skip
def test_a_step_is_that_of_a_plain_model(
    shards: Path, alone: Run, by_hand: tuple[Run, Run], step: int, changed: dict[str, float]
) -> None:
    """Loss and norm are those of a model with the stage's settings on samples that were read by hand."""
    config = config_of(alone, shards, **STAGES)
    shape = config.data.shape_at(step)
    decoder = Decoder(config.model.model_copy(update=changed))
    before = weights(by_hand[1], step - 1, STAGES)
    for name, value in decoder.named_parameters():
        value.data = before[f"model.{name}"]
    sources, cuts = open_sources(config.data, config.model.vocab), config.data.cuts()
    mixture = config.data.mix(sizes(sources, config.data), config.run.seed)
    at = np.arange(config.data.position(step), config.data.position(step + 1), dtype=np.uint64)
    tokens = np.empty((shape.batch, shape.sequence + 1), np.int64)
    documents = np.empty((shape.batch, shape.sequence), np.int32)
    for row, (source, sequence) in enumerate(zip(*mixture.locate(at), strict=True)):
        cut = cuts[mixture.names[source]]
        corpus = open_corpus(shards, None, cut.length, within=cut.within)
        corpus.read([int(sequence)], tokens[row : row + 1], documents[row : row + 1])
    ids = torch.from_numpy(tokens)
    loss = decoder(ids[:, :-1], torch.from_numpy(documents), ids[:, 1:], config.optimizer.z_loss)
    loss.sum().backward()
    norm = math.sqrt(sum(value.grad.double().square().sum().item() for value in decoder.parameters()))
    assert alone.curve()[step] == pytest.approx((loss[0].item(), norm), rel=1e-5)


def test_what_is_counted(shards: Path, alone: Run) -> None:
    """Tokens and FLOP are those of each stage, in the metrics, the mixture and the position of the checkpoint."""
    config = config_of(alone, shards, **STAGES)
    lines = alone.metrics()
    assert [line["tokens"] for line in lines[3:6]] == [4 * 4 * 32, 5 * 4 * 32, 5 * 4 * 32 + 4 * 64]
    assert lines[-1]["tokens"] == 5 * 4 * 32 + 5 * 4 * 64 + 2 * 2 * 128
    for line, length in ((lines[4], 32), (lines[5], 64), (lines[11], 128)):
        assert line["mfu"] == pytest.approx(line["tokens_per_s"] * flops_per_token(config.model, length) / 1e12)
    mixed = alone.events("data_mixture")[-1]
    assert mixed["step"] == 12
    assert mixed["tokens"] == {".": lines[mixed["step"] - 1]["tokens"]}
    assert read(folder_of(alone.checkpoints, 12)).sample == 5 * 4 + 5 * 4 + 2 * 2


def test_an_export_has_the_last_positions(tmp_path: Path, shards: Path, alone: Run) -> None:
    """The configuration is that of the stage in which the checkpoint was made."""
    sets = SHAPE | {name.replace("__", "."): value for name, value in STAGES.items()}
    sets |= {"data.shards": shards, "run.folder": alone.folder}
    arguments = [str(alone.folder / "config.toml"), str(tmp_path), *(f"--set={k}={v}" for k, v in sets.items())]
    result = CliRunner().invoke(export, arguments)
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["max_position_embeddings"] == 128
    assert written["rope_parameters"]["rope_theta"] == 1e6
    assert (written["rope_parameters"]["rope_type"], written["rope_parameters"]["factor"]) == ("yarn", 2.0)


def test_another_batch_on_the_way_is_refused(tmp_path: Path, shards: Path) -> None:
    """It would move the steps at which stages begin: one sentence says where the batches so far belong."""
    run = start(tmp_path, shards, {}, run__steps=2)
    settings = {"data__stages": "[{start = 1}, {start = 5, sequence = 64}]"}
    assert run.start(world=1, **settings, run__steps=6, data__batch=2).wait() == [2]
    assert "8 samples after step 2 and would have 4" in run.log().read_text().splitlines()[-1]
    warm = {"data__batch": 2, "data__batch_warmup": "[[2, 4]]"}
    assert run.start(world=1, **settings, **warm, run__steps=6).wait() == [0], run.printed()


@pytest.mark.long
def test_killed_ranks_change_no_bit(tmp_path: Path, shards: Path) -> None:
    """Five times killed at random moments, the ranks come to the same losses."""
    stages = f"[{SHORT}, {LONGER % 12}, {LONGEST.replace('11', '25')}]"
    whole, killed = (Run(tmp_path / name, shards, {"data.stages": stages}) for name in ("whole", "killed"))
    whole.finish()
    kill_and_resume(killed, 5, random.Random(1))
    assert killed.curve() == whole.curve()
