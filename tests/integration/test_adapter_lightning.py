"""The callback for PyTorch Lightning, in the real one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from opsd import exitcodes
from opsd.checkpoints.claims import Claim, Fence, create
from opsd.client import Reporter, events_path
from opsd.rank_page import read_page, write_request
from tests.fakes.adapter_ranks import tokens_of_ranks

lightning = pytest.importorskip("lightning", reason="lightning is not installed")

from opsd.adapters.lightning import RankPageCallback  # noqa: E402

pytestmark = pytest.mark.slow  # the library alone takes seconds to import


class Line(lightning.LightningModule):  # type: ignore[name-defined, misc]
    """Learns y = x; a batch has 4 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def _loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return ((self.layer(batch[0]) - batch[0]) ** 2).mean()

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return self._loss(batch)

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("val_loss", self._loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class SplitLine(Line):
    """The same with two layers, whose channels are split over the ranks."""

    def configure_model(self) -> None:
        self.layer = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.Linear(2, 1))
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        parallelize_module(self.layer, self.device_mesh["tensor_parallel"], plan)


def fit(
    tmp_path: Path,
    reporter: Reporter | None,
    folder: str | None = "saved",
    fence: Fence | None = None,
    others: tuple[lightning.pytorch.Callback, ...] = (),
    weights_only: bool = False,
    module: type[Line] = Line,
    **settings: object,
) -> lightning.Trainer:
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.rand(64, 1)), batch_size=4)
    saver = lightning.pytorch.callbacks.ModelCheckpoint(
        folder and tmp_path / folder,
        every_n_train_steps=3,
        save_top_k=-1,
        save_weights_only=weights_only,
    )
    settings = {"logger": False, "max_steps": 6} | settings
    trainer = lightning.Trainer(
        accelerator="cpu", log_every_n_steps=1, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, num_sanity_val_steps=1,
        callbacks=[saver, *others, RankPageCallback(reporter, tokens=lambda batch: len(batch[0]), fence=fence)],
        **settings,
    )  # fmt: skip
    trainer.fit(module(), data, data, ckpt_path="last")
    return trainer


def test_a_training_fills_its_page(tmp_path: Path) -> None:
    """Steps, tokens over accumulated batches, losses, phases, saves and validations of a real Trainer are there."""
    path = tmp_path / "rank-0000.page"
    fit(tmp_path, Reporter(path), accumulate_grad_batches=2, val_check_interval=6)
    page = read_page(path)
    assert (page.state, page.steps_reported, page.committed_step) == ("finished", 6, 6)
    assert [step.step for step in page.steps] == [1, 2, 3, 4, 5, 6]
    assert page.tokens == 6 * 2 * 4
    assert 0 < page.steps[-1].loss < 10
    assert page.steps[-1].learning_rate == 0.01
    assert all(page.steps[-1].phase(name) > 0 for name in ("data", "forward", "backward", "optimizer"))
    assert page.steps[3].phase("checkpoint") > 0
    assert page.steps[3].phase("evaluation") > 0
    events = [json.loads(line) for line in events_path(path).read_text().splitlines()]
    assert [(event["event"], event["step"]) for event in events] == [("evaluation", 3), ("evaluation", 6)]
    assert events[0]["results"]["val_loss"] > 0


def test_a_stop_is_a_save_and_an_orderly_end(tmp_path: Path) -> None:
    """Asked to stop, the Trainer saves the step it is at and ends; it goes on from there."""
    path = tmp_path / "rank-0000.page"
    reporter = Reporter(path)
    write_request(path, "checkpoint_and_stop")
    fit(tmp_path, reporter)
    page = read_page(path)
    assert (page.state, page.steps_reported, page.committed_step) == ("finished", 1, 1)
    fit(tmp_path, Reporter(path))
    assert [step.step for step in read_page(path).steps] == [2, 3, 4, 5, 6]


def test_checkpoints_that_the_next_start_will_not_find_are_warned_of(tmp_path: Path) -> None:
    """By default they lie with the logger's files, in a folder of each start."""
    logger = lightning.pytorch.loggers.CSVLogger(tmp_path)
    with pytest.warns(UserWarning, match="ModelCheckpoint has no folder"):
        fit(tmp_path, Reporter(tmp_path / "page"), None, logger=logger, max_steps=1)


class OvertakenAt(lightning.pytorch.Callback):  # type: ignore[name-defined, misc]
    """The run goes on elsewhere while this trainer is at ``step``."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step

    def on_train_batch_start(self, trainer: lightning.Trainer, *args: object) -> None:
        if trainer.global_step == self.step:
            assert create(self.folder, Claim(2, "a start", "n2 8"))


@pytest.mark.parametrize("weights_only", [False, True])
def test_what_has_been_overtaken_saves_no_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], weights_only: bool
) -> None:
    """The first checkpoint is written; before the second the run has gone on elsewhere: exit code 76 and a sentence."""
    assert create(tmp_path, Claim(1, "a start", "n1 7"))
    with pytest.raises(SystemExit) as end:
        fit(
            tmp_path, Reporter(tmp_path / "rank-0000.page"), fence=Fence(tmp_path, 1), weights_only=weights_only,
            others=(OvertakenAt(tmp_path, 4),),
        )  # fmt: skip
    assert end.value.code == exitcodes.FENCED
    assert "generation 2 of the run has begun elsewhere; generation 1 may not write" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["epoch=0-step=3.ckpt"]
    assert read_page(tmp_path / "rank-0000.page").committed_step in (3, None if weights_only else 3)


def test_stages_after_one_another_look_once_each(tmp_path: Path) -> None:
    """Fit and validate set the callback up twice; the trainer saves by hand as ever."""
    trainer = fit(tmp_path, Reporter(tmp_path / "rank-0000.page"), fence=Fence(tmp_path, 1))
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.rand(8, 1)), batch_size=4)
    trainer.validate(Line(), data)
    trainer.save_checkpoint(tmp_path / "by_hand.ckpt")
    assert (tmp_path / "by_hand.ckpt").exists()


@pytest.mark.parametrize(
    ("layout", "batches"),
    [("strategy='ddp'", 2), ("strategy=ModelParallelStrategy(1, 2), module=SplitLine", 1)],
    ids=["data parallel", "tensor parallel"],
)
def test_ranks_count_their_own_tokens(tmp_path: Path, layout: str, batches: int) -> None:
    """Two ranks: the sum of the pages is what was trained on, whether each has batches of its own or both have one."""
    pages = tokens_of_ranks(tmp_path, ["-c", RANK.format(folder=str(tmp_path), layout=layout)])
    assert pages == [6 * 2 * 4 * batches // 2] * 2


RANK = """
from pathlib import Path
from lightning.pytorch.strategies import ModelParallelStrategy
from test_adapter_lightning import SplitLine, fit
fit(Path({folder!r}), None, accumulate_grad_batches=2, devices=2, {layout})
"""
