"""Hugging Face Trainer, and TRL, whose trainers are built on it, under the supervision of ``opsd launch``::

    from opsd.adapters.huggingface import RankPageCallback

    trainer = Trainer(model, arguments, callbacks=[RankPageCallback()], ...)   # or SFTTrainer, DPOTrainer, ...

Steps, tokens, losses, gradient norms, saves and evaluations go to the rank page. Tokens are those of this rank's own
batches, padding included, of which ranks that share a batch (tensor or context parallel) count equal parts. When the
launcher asks for it, the trainer saves at the next step boundary and ends;
``trainer.train(resume_from_checkpoint=True)`` continues from there.

Before each checkpoint and before ``trainer.save_model()``, the callback checks whether a later generation of the run
has begun elsewhere. If so, it writes nothing and ends with exit code 76. Hugging Face calls no
callback before a save, and shows none the batches, so importing this module wraps three methods of ``Trainer``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from opsd.adapters.shared import Gate, Phases, Share, any_rank
from opsd.checkpoints.claims import Fence
from opsd.client import Reporter
from opsd.events import Evaluation


class RankPageCallback(TrainerCallback):
    """Writes the rank page of this process; without ``opsd launch`` it writes to private memory.

    ``fence`` is that of the rank's environment unless it is given.
    """

    def __init__(self, reporter: Reporter | None = None, fence: Fence | None = None) -> None:
        self._reporter = reporter or Reporter.from_env("adapter")
        self.gate = Gate(self._reporter, fence)
        self._phases = Phases(self._reporter)
        self._loss = self._norm = self._rate = float("nan")
        self._tokens = Share()

    def count(self, tokens: int, sharing: int) -> None:
        """Add a batch of ``tokens`` that ``sharing`` ranks compute together."""
        self._tokens.add(tokens, sharing)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The time before the first step is waiting for data."""
        self._reporter.planned(max(0, state.max_steps))
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
        self._reporter.step(
            tokens=self._tokens.take(),
            loss=self._loss,
            grad_norm=self._norm,
            learning_rate=self._rate,
            step=state.global_step,
        )
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
            self._reporter.event("evaluation", **Evaluation(step=state.global_step, results=metrics or {}))
        self._phases.enter("checkpoint" if control.should_save else "data")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The training has ended in good order."""
        self._phases.leave()
        self._reporter.close()


def _callbacks(trainer: Trainer) -> Iterator[RankPageCallback]:
    return (each for each in trainer.callback_handler.callbacks if isinstance(each, RankPageCallback))


def _gated(save: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(save)
    def look_and_save(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        for callback in _callbacks(trainer):
            callback.gate.pass_through()
        save(trainer, *args, **kwargs)

    return look_and_save


def _counted(step: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(step)
    def count_and_step(trainer: Trainer, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if callbacks := [*_callbacks(trainer)]:
            layout = getattr(trainer.accelerator, "parallelism_config", None)
            sharing = layout.non_data_parallel_size if layout is not None else 1
            for callback in callbacks:
                callback.count(_tokens(trainer, inputs), sharing)
        return step(trainer, model, inputs, *args, **kwargs)

    return count_and_step


def _tokens(trainer: Trainer, inputs: Any) -> int:
    """Tokens of a micro-batch, padding included; 0 where they are not known, as of prompts to be completed."""
    if not isinstance(inputs, Mapping):
        return 0
    main = getattr(trainer.model, "main_input_name", "input_ids")
    names = [main] if main in inputs else [name for name in inputs if str(name).endswith("input_ids")]
    return sum(inputs[name].numel() for name in names if isinstance(inputs[name], torch.Tensor))


setattr(Trainer, "training_step", _counted(Trainer.training_step))  # noqa: B010 -- as below
for _name in ("_save_checkpoint", "save_model"):
    setattr(Trainer, _name, _gated(getattr(Trainer, _name)))
