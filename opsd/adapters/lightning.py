"""PyTorch Lightning under the supervision of ``opsd launch``::

    from opsd.adapters.lightning import RankPageCallback

    trainer = lightning.Trainer(callbacks=[RankPageCallback(), ModelCheckpoint("FOLDER", save_last=True)], ...)
    trainer.fit(model, data, ckpt_path="last")

Steps, losses, phases, saves and validations go to the rank page. When the launcher asks for it, the trainer saves
``last.ckpt`` at the next step boundary and ends; ``ckpt_path="last"`` goes on from there. Without a folder of their own
checkpoints are with the logger's files, in another folder at each start, and ``"last"`` finds none.

Before each checkpoint, all ranks check whether a later generation of the run has begun elsewhere;
then nothing is written and they end with exit code 76.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from opsd.adapters.shared import Gate, Phases, Share, any_rank
from opsd.checkpoints.claims import Fence
from opsd.client import Reporter
from opsd.events import Evaluation

STOPPED = "last.ckpt"
NO_FOLDER = (
    'ModelCheckpoint has no folder: each start saves into one of its own, and ckpt_path="last" begins at step 0 after '
    'a restart; pass ModelCheckpoint("FOLDER", save_last=True)'
)
LOG_EVERY = 50
"""Lightning's own default."""


class RankPageCallback(Callback):
    """Writes the rank page of this process; without ``opsd launch`` it writes to private memory.

    ``tokens`` counts those of a batch, of which ranks that compute it together (``ModelParallelStrategy``) report equal
    parts. The loss is read every ``log_every_n_steps`` steps of the trainer, because reading it waits for the GPU; a
    gradient norm is known if the module logs ``grad_norm``. ``fence`` is that of the rank's environment unless given.
    """

    def __init__(
        self,
        reporter: Reporter | None = None,
        *,
        tokens: Callable[[Any], int] | None = None,
        fence: Fence | None = None,
    ) -> None:
        self._reporter = reporter or Reporter.from_env("adapter")
        self._gate = Gate(self._reporter, fence)
        self._phases = Phases(self._reporter)
        self._count, self._tokens = tokens, Share()
        self._step = 0
        self._loss = float("nan")
        self._saving: int | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Puts the check before the strategy's save, and warns of checkpoints that the next start will not find.

        Called before ``ModelCheckpoint.setup``.
        """
        strategy = trainer.strategy
        if not isinstance(strategy.save_checkpoint, functools.partial):  # fit, validate and test each set up
            look_and_save = functools.partial(self._save, strategy.save_checkpoint)
            setattr(strategy, "save_checkpoint", look_and_save)  # noqa: B010 - an assignment to a method
        saver = trainer.checkpoint_callback
        if saver is not None and getattr(saver, "dirpath", "") is None and trainer.loggers and trainer.is_global_zero:
            warnings.warn(NO_FOLDER, stacklevel=2)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The time before the first batch is waiting for data."""
        self._step = trainer.global_step
        self._phases.enter("data")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._saved()
        if self._count:
            self._tokens.add(self._count(batch), _sharing(trainer))
        self._phases.enter("forward")

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        self._phases.enter("backward")

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Gradients are complete."""
        self._phases.enter("optimizer")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A batch is done, and a step unless gradients are still being accumulated."""
        self._phases.leave()
        if trainer.global_step == self._step:
            self._phases.enter("data")
            return
        self._step = trainer.global_step
        if self._step % (getattr(trainer, "log_every_n_steps", 0) or LOG_EVERY) == 0:
            loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
            self._loss = float("nan") if loss is None else float(loss)
        norm = float(trainer.callback_metrics.get("grad_norm", float("nan")))
        rate = next((float(group["lr"]) for o in trainer.optimizers for group in o.param_groups), float("nan"))
        tokens = self._tokens.take()
        self._reporter.step(tokens=tokens, loss=self._loss, grad_norm=norm, learning_rate=rate, step=self._step)
        if any_rank(self._reporter.stop_requested, pl_module.device):
            trainer.should_stop = True
            trainer.save_checkpoint(_folder(trainer) / STOPPED)
        self._phases.enter("data")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """A checkpoint is about to be written; it has been when the training goes on."""
        self._saving = trainer.global_step
        self._phases.enter("checkpoint")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A validation begins."""
        self._saved()
        self._phases.enter("evaluation")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and not trainer.sanity_checking:
            results = {name: float(value) for name, value in trainer.callback_metrics.items()}
            self._reporter.event("evaluation", **Evaluation(step=trainer.global_step, results=results))
        self._phases.enter("data")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The training has ended in good order."""
        self._saved()
        self._phases.leave()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Files that other callbacks saved at the end are written too."""
        self._saved()
        self._phases.leave()
        self._reporter.close()

    def _save(self, save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._gate.pass_through()
        save(*args, **kwargs)

    def _saved(self) -> None:
        if self._saving is not None:
            self._reporter.checkpoint_committed(self._saving)
            self._saving = None


def _sharing(trainer: Trainer) -> int:
    """How many ranks compute the same batch."""
    sampler: Mapping[str, int] | None = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    return trainer.world_size // sampler["num_replicas"] if sampler else 1


def _folder(trainer: Trainer) -> Path:
    """Where ``ckpt_path="last"`` looks."""
    saver = trainer.checkpoint_callback
    return Path(getattr(saver, "dirpath", None) or trainer.default_root_dir)
