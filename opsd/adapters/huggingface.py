"""Hugging Face Trainer, and TRL, whose trainers are built on it, under the supervision of ``opsd launch``::

    from opsd.adapters.huggingface import RankPageCallback

    trainer = Trainer(model, arguments, callbacks=[RankPageCallback()], ...)   # or SFTTrainer, DPOTrainer, ...

Steps, losses, gradient norms, saves and evaluations go to the rank page. When the launcher asks for it, the trainer
saves at the next step boundary and ends; ``trainer.train(resume_from_checkpoint=True)`` goes on from there.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from opsd.adapters.phases import Phases, any_rank
from opsd.client import Reporter


class RankPageCallback(TrainerCallback):
    """Writes the rank page of this process; without ``opsd launch`` it writes to private memory."""

    def __init__(self, reporter: Reporter | None = None) -> None:
        self._reporter = reporter or Reporter.from_env()
        self._phases = Phases(self._reporter)
        self._loss = self._norm = self._rate = float("nan")
        self._tokens = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """What comes before the first step is waiting for data."""
        self._phases.enter("data")

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A batch is there; forward and backward cannot be told apart from outside and count as forward."""
        self._phases.enter("forward")

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Gradients are complete."""
        self._phases.enter("optimizer")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """A step is done; loss, gradient norm and learning rate are those of the last log, nan before the first."""
        self._phases.leave()
        tokens = int(state.num_input_tokens_seen)
        self._reporter.step(
            tokens=tokens - self._tokens,
            loss=self._loss,
            grad_norm=self._norm,
            learning_rate=self._rate,
            step=state.global_step,
        )
        self._tokens = tokens
        if any_rank(self._reporter.stop_requested, args.device):
            control.should_save = control.should_training_stop = True
        self._phases.enter("evaluation" if control.should_evaluate else "checkpoint" if control.should_save else "data")
        return control

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Remember what only the log says."""
        if logs and "loss" in logs:
            self._loss, self._norm, self._rate = (
                float(logs.get(name, float("nan"))) for name in ("loss", "grad_norm", "learning_rate")
            )

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A checkpoint has been written."""
        self._reporter.checkpoint_committed(state.global_step)
        self._phases.enter("data")

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """An evaluation is done."""
        if state.is_world_process_zero:
            self._reporter.event("evaluation", step=state.global_step, results=metrics or {})
        self._phases.enter("checkpoint" if control.should_save else "data")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The training has ended in good order."""
        self._phases.leave()
        self._reporter.close()
