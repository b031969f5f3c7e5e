"""torchtitan (0.3) under the supervision of ``opsd launch``, with torchtitan's own arguments::

    opsd launch --nproc-per-node gpu -m opsd.adapters.torchtitan --module llama3 --config llama3_8b

Who has a program of their own builds ``RankPageTrainer(config)`` where ``config.build()`` stands. Steps, losses,
phases, saves and validations go to the rank page. When the launcher asks for it, the trainer saves all of its state at
the next step boundary and ends. torchtitan then continues from its newest checkpoint.

Before each checkpoint all ranks look whether a later generation of the run has begun elsewhere; then nothing is written
and they end with exit code 76. One that is written in the background is not looked at again before it is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.metrics import BaseLogger
from torchtitan.config import ConfigManager
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

from opsd.adapters.shared import Gate, Phases, Share, any_rank
from opsd.client import Reporter
from opsd.events import Evaluation

VALIDATION = "validation_metrics/"


class RankPageTrainer(Trainer):
    """Writes the rank page of this process; without ``opsd launch`` it writes to private memory.

    Loss and gradient norm are those of the last step that torchtitan logged (``metrics.log_freq``).
    """

    def __init__(self, config: Trainer.Config, reporter: Reporter | None = None) -> None:
        self._reporter = reporter or Reporter.from_env("adapter")
        self._phases = Phases(self._reporter)
        self._saving: int | None = None
        self._tokens = Share()
        self._kept: int | None = None
        """The step of the last save, complete or not; at first the one that was loaded."""
        super().__init__(config)
        self._gate = Gate(self._reporter)
        self._save, self.checkpointer.save = self.checkpointer.save, self._save_if_open
        self._logged = self.metrics_processor.logger = _Listener(self.metrics_processor.logger, self._reporter)

    def batch_generator(self, data_iterable: Iterable[Any]) -> Iterator[Any]:
        """Batches; getting one is waiting for data."""
        batches = super().batch_generator(data_iterable)
        while True:
            self._phases.enter("data")
            batch = next(batches)
            self._phases.leave()
            yield batch

    def forward_backward_step(self, **inputs: Any) -> torch.Tensor:
        """Forward and backward, which pipelines interleave, count as forward; the optimizer follows the last one."""
        self._phases.enter("forward")
        loss: torch.Tensor = super().forward_backward_step(**inputs)
        self._phases.enter("optimizer")
        return loss

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """One step; torchtitan may save and validate next."""
        before, rates = self.ntokens_seen, self.lr_schedulers.get_metrics()
        super().train_step(data_iterator)
        self._phases.leave()
        ranks = self.parallel_dims  # context parallel ones count their own parts of a sequence
        self._tokens.add(self.ntokens_seen - before, ranks.tp * ranks.pp)
        self._reporter.step(
            tokens=self._tokens.take(), loss=self._logged.loss, grad_norm=self._logged.grad_norm,
            learning_rate=next(iter(rates.values()), float("nan")), step=self.step,
        )  # fmt: skip
        self._tell_saved()
        if is_saved := self._is_saved_now():
            self._saving = self._kept = self.step
        if self.config.validator.enable and self.validator.should_validate(self.step):
            self._phases.enter("evaluation")
        elif is_saved:
            self._phases.enter("checkpoint")

    def should_continue_training(self) -> bool:
        """Whether there are steps left and nobody has asked for a stop; if somebody has, the state is saved."""
        self._phases.leave()
        self._tell_saved()
        self._kept = self.step if self._kept is None else self._kept
        if not super().should_continue_training():
            return False
        if not any_rank(self._reporter.stop_requested, self.device):
            return True
        if self.checkpointer.enable and self._kept != self.step:
            with self._reporter.phase("checkpoint"):
                # By default torchtitan saves only the model at its last step.
                self.checkpointer.last_save_model_only = self.checkpointer.last_save_in_hf = False
                self.checkpointer.save(self.step, last_step=True)
            self._saving = self._kept = self.step
        return False

    def close(self) -> None:
        """The training has ended; a checkpoint that is still being written is waited for."""
        self.checkpointer.maybe_wait_for_saving()
        self._tell_saved()
        self._phases.leave()
        super().close()
        self._reporter.close()

    def _save_if_open(self, curr_step: int, last_step: bool = False) -> None:
        if self.checkpointer.enable and self.checkpointer._should_save(curr_step, last_step):
            self._gate.pass_through()
        self._save(curr_step, last_step)

    def _is_saved_now(self) -> bool:
        checkpointer, last = self.checkpointer, self.step == self.config.training.steps
        return bool(checkpointer.enable and checkpointer._should_save(self.step, last))

    def _tell_saved(self) -> None:
        """Report the last checkpoint once it is complete."""
        future = self.checkpointer.save_future if self.checkpointer.enable else None
        if self._saving is not None and (future is None or (future.done() and future.exception() is None)):
            self._reporter.checkpoint_committed(self._saving)
            self._saving = None


class _Listener(BaseLogger):
    """Reads what torchtitan logs, and passes it on."""

    def __init__(self, inner: BaseLogger, reporter: Reporter) -> None:
        self._inner, self._reporter = inner, reporter
        self.loss = self.grad_norm = float("nan")

    def log(self, metrics: dict[str, Any], step: int) -> None:
        if "grad_norm" in metrics:
            self.loss, self.grad_norm = metrics["loss_metrics/global_avg_loss"], metrics["grad_norm"]
        elif dist.get_rank() == 0:
            results = {name.removeprefix(VALIDATION): metrics[name] for name in metrics if name.startswith(VALIDATION)}
            self._reporter.event("evaluation", **Evaluation(step=step, results=results))
        self._inner.log(metrics, step)

    def close(self) -> None:
        self._inner.close()


def main() -> None:
    """Train what torchtitan's arguments describe."""
    init_logger()
    trainer = RankPageTrainer(ConfigManager().parse_args())
    try:
        trainer.train()
    finally:
        trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
