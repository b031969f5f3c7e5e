"""Hugging Face Trainer, and TRL, whose trainers are built on it, under the supervision of ``opsd launch``::

    from opsd.adapters.huggingface import RankPageCallback

    trainer = Trainer(model, arguments, callbacks=[RankPageCallback()], ...)   # or SFTTrainer, DPOTrainer, ...

Steps, tokens, losses, gradient norms, saves and evaluations go to the rank page. Tokens are those of this rank's own
batches, padding included, of which ranks that share a batch (tensor or context parallel) count equal parts. When the
launcher asks for it, the trainer saves at the next step boundary and ends;
``trainer.train(resume_from_checkpoint=True)`` continues from there.

Before each checkpoint and before ``trainer.save_model()``, the callback checks whether a later generation of the run
has begun elsewhere. If so, it writes nothing and ends with exit code 76. Hugging Face calls no
callback before a save, and shows none the batches, so importing this module wraps methods of ``Trainer``.

``opsd launch`` attaches the callback to every ``Trainer`` of an unchanged program (``attach_to_all``). Before the first
step the callback audits the first batches as ``OPSD_AUDIT`` says (``first_batches.py``). Tokens that a trainer
generates count as well: their time is forward.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch
import transformers
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from opsd.adapters import resuming
from opsd.adapters.evaluating import SavedCheckpoints, evaluations_of, finish_at_exit, keeping_awaited
from opsd.adapters.first_batches import DATA, audit_mode, audit_trainer, refuse_resume
from opsd.adapters.shared import Gate, Phases, Share, any_rank
from opsd.checkpoints.claims import Fence
from opsd.client import Reporter
from opsd.events import Evaluation, Rollouts


class RankPageCallback(TrainerCallback):
    """Writes the rank page of this process; without ``opsd launch`` it writes to private memory.

    ``fence`` is that of the rank's environment unless it is given.
    """

    def __init__(self, reporter: Reporter | None = None, fence: Fence | None = None, *, attached: bool = False) -> None:
        """``attached``: the page begins with the training, and until then others may report."""
        self._fence, self._attached = fence, attached
        self._begin(reporter or (Reporter(None) if attached else Reporter.from_env("adapter")))
        self._loss = self._norm = self._rate = float("nan")
        self._tokens = Share()
        self._audited = False
        self._plan: resuming.Plan | None = None
        self._evaluations: SavedCheckpoints | None = None

    def _begin(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self.gate = Gate(reporter, self._fence)
        self._phases = Phases(reporter)

    def audit(self, trainer: Trainer, inputs: Any) -> None:
        """Audit the first batches, of which ``inputs`` is one, before the first step of a run.

        Raises AuditRefusedError if they are refused.
        """
        if self._audited:
            return
        mode, step = audit_mode(), trainer.state.global_step
        self._audited = True
        if mode != "off" and (step == 0 or mode == "only"):
            audit_trainer(trainer, inputs, mode, self._reporter.event)
        if trainer.args.process_index == 0:
            self._plan = resuming.plan_of(trainer)
            if mode != "off" and step > 0:
                self._compare(trainer, self._plan, step, mode)

    def _compare(self, trainer: Trainer, plan: resuming.Plan, step: int, mode: str) -> None:
        records = resuming.known(os.environ.get("OPSD_RUN_DIR"), str(trainer.args.output_dir))
        before = next((each["plan"] for each in records if each["step"] == step), None)
        if before is None:
            return
        for note in resuming.notes(before, plan):
            print(f"opsd: audit: {note}", file=sys.stderr, flush=True)
        skips = bool(trainer.args.ignore_data_skip)
        refuse_resume(resuming.problems(before, plan, step, skips_data=skips), mode)

    def count(self, tokens: int, sharing: int) -> None:
        """Add a batch of ``tokens`` that ``sharing`` ranks compute together."""
        self._tokens.add(tokens, sharing)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The time before the first step is waiting for data."""
        if self._attached:
            self._begin(Reporter.from_env("adapter"))
        self._reporter.planned(max(0, state.max_steps))
        if state.is_world_process_zero:
            self._evaluations = evaluations_of(str(args.output_dir), self._reporter)
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
        if self._evaluations is not None:
            self._evaluations.poll()
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
        if logs and state.is_world_process_zero and (told := rollouts_of(logs, state.global_step)):
            fields = Rollouts(**told)
            self._reporter.event("rollouts", **fields)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A checkpoint has been written, by all ranks."""
        any_rank(False, args.device)
        if state.is_world_process_zero and self._plan is not None:
            run, shared = os.environ.get("OPSD_RUN_DIR"), not args.save_on_each_node
            resuming.keep(run, str(args.output_dir), state.global_step, self._plan, shared=shared)
        self._reporter.checkpoint_committed(state.global_step)
        if self._evaluations is not None:
            self._evaluations.saved(state.global_step)
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
        if self._evaluations is None or self._evaluations.is_idle:
            self._reporter.close()
        else:
            self._reporter.enter("evaluation")
            finish_at_exit(self._reporter)


_ROLLOUTS = {
    "reward": "reward",
    "flat": "frac_reward_zero_std",
    "kl": "kl",
    "clipped": "clip_ratio/region_mean",
    "length": "completions/mean_length",
    "cut": "completions/clipped_ratio",
    "mismatch": "sampling/sampling_logp_difference/mean",
}
"""Fields of a ``rollouts`` event by the names in TRL's logs."""
_REWARDS = re.compile(r"rewards/[^/]+/mean")


def rollouts_of(logs: Mapping[str, Any], step: int) -> Rollouts | None:
    """The event of a log line of a training that generates, None for any other."""
    if "reward" not in logs or "frac_reward_zero_std" not in logs:
        return None
    found = {field: float(logs[name]) for field, name in _ROLLOUTS.items() if name in logs}
    told = {field: value for field, value in found.items() if math.isfinite(value)}
    unscored = sum(math.isnan(float(value)) for name, value in logs.items() if _REWARDS.fullmatch(name))
    return cast(Rollouts, {"step": step, "unscored": unscored, **told})


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
        if not (callbacks := [*_callbacks(trainer)]):
            return step(trainer, model, inputs, *args, **kwargs)
        layout = getattr(trainer.accelerator, "parallelism_config", None)
        sharing = layout.non_data_parallel_size if layout is not None else 1

        def look(batch: Any) -> None:
            for callback in callbacks:
                callback.audit(trainer, batch)
                callback.count(_tokens(trainer, batch), sharing)

        if isinstance(inputs, Mapping):
            look(inputs)
            return step(trainer, model, inputs, *args, **kwargs)
        with _when_prepared(trainer, look):
            return step(trainer, model, inputs, *args, **kwargs)

    return count_and_step


@contextmanager
def _when_prepared(trainer: Any, look: Callable[[Any], None]) -> Iterator[None]:
    """Call ``look`` with the batch that the trainer makes of its rows, as those that generate do."""
    prepare = trainer._prepare_inputs

    def prepared(inputs: Any) -> Any:
        batch = prepare(inputs)
        look(batch)
        return batch

    trainer._prepare_inputs = prepared
    try:
        yield
    finally:
        del trainer._prepare_inputs


def _tokens(trainer: Trainer, inputs: Any) -> int:
    """Tokens of a micro-batch, padding included; 0 where they are not known."""
    if not isinstance(inputs, Mapping):
        return 0
    main = getattr(trainer.model, "main_input_name", "input_ids")
    names = [main] if main in inputs else [name for name in inputs if str(name).endswith("input_ids")]
    names = names or [name for name in ("prompt_ids", "completion_ids") if name in inputs]
    return sum(inputs[name].numel() for name in names if isinstance(inputs[name], torch.Tensor))


def _with_data(init: Callable[..., None]) -> Callable[..., None]:
    """Keep the data sets that a trainer is constructed with: some replace them by packed or tokenized ones."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def keep_and_init(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if DATA not in vars(trainer):
            with suppress(TypeError):
                given = signature.bind(trainer, *args, **kwargs).arguments
                given = given.get("kwargs", {}) | given
                vars(trainer)[DATA] = given.get("train_dataset"), given.get("eval_dataset")
        init(trainer, *args, **kwargs)

    return keep_and_init


def _wrap_init(kind: type[Trainer]) -> None:
    if "__init__" in vars(kind):
        setattr(kind, "__init__", _with_data(vars(kind)["__init__"]))  # noqa: B010 -- mypy refuses the assignment
    for derived in kind.__subclasses__():
        _wrap_init(derived)


def attach_to_all() -> None:
    """Give every trainer that is constructed from now on the callback, unless the program has added one.

    A training of this run that is started again goes on from its last checkpoint, unless the program says otherwise.
    """
    init = Trainer.__init__

    @functools.wraps(init)
    def init_and_attach(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        init(trainer, *args, **kwargs)
        if not [*_callbacks(trainer)]:
            trainer.add_callback(RankPageCallback(attached=True))

    setattr(Trainer, "__init__", init_and_attach)  # noqa: B010 -- as below
    setattr(Trainer, "train", _resumed(Trainer.train))  # noqa: B010 -- as below


def _resumed(train: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(train)
    def resume_and_train(trainer: Trainer, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        given, run = resume_from_checkpoint, os.environ.get("OPSD_RUN_DIR")

        def say(sentence: str) -> None:
            if trainer.args.process_index == 0:
                print(f"opsd: {sentence}", file=sys.stderr, flush=True)

        resume_from_checkpoint = resuming.chosen(given, run, str(trainer.args.output_dir), say)
        if resume_from_checkpoint != given:
            said = (
                f"goes on from {resume_from_checkpoint}"
                if resume_from_checkpoint
                else "begins: no checkpoint is complete"
            )
            say(f"the training {said}")
        return train(trainer, resume_from_checkpoint, *args, **kwargs)

    return resume_and_train


def _wrap_derived(kind: type[Any], /, **kwargs: Any) -> None:
    super(Trainer, kind).__init_subclass__(**kwargs)
    _wrap_init(kind)


_wrap_init(Trainer)
setattr(Trainer, "__init_subclass__", classmethod(_wrap_derived))  # noqa: B010 -- as below
setattr(Trainer, "training_step", _counted(Trainer.training_step))  # noqa: B010 -- as below
for _name in ("_save_checkpoint", "save_model"):
    setattr(Trainer, _name, _gated(getattr(Trainer, _name)))
_SORTS: list[tuple[Any, str]] = [
    (transformers.trainer_utils, "sort_checkpoints"),
    (transformers.trainer, "sort_checkpoints"),
]
_SORTS.append((Trainer, "_sorted_checkpoints"))  # before transformers 5
for _place, _name in _SORTS:
    if hasattr(_place, _name):
        setattr(_place, _name, keeping_awaited(getattr(_place, _name)))
