"""The sections of a run's settings. Each checks its own consistency (``problem``)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, Strict

from opsd.trainer.model_settings import ModelSettings, Section

Schedule = Literal["1f1b", "interleaved", "zero-bubble"]


class RunSettings(Section):
    """What to run and where."""

    steps: PositiveInt
    """Steps of the optimiser after which the run ends."""
    seed: NonNegativeInt = 0
    """Of the weights and of the order of the data."""
    folder: str = ""
    """Folder of the run; empty is $OPSD_RUN_DIR, or ``runs/NAME`` with the name of the configuration."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: NonNegativeInt = 0
    """Threads of a rank on the CPU; 0 shares the node's cores among its ranks."""
    deterministic: bool = False
    """Refuse operations that have no deterministic implementation (slower on a GPU, free on the CPU)."""
    initial: str = ""
    """Folder of a Hugging Face model with the initial weights; empty draws them at random."""
    log_every: NonNegativeInt = 10
    """Steps between two lines that the first rank prints; 0 for none."""


class ParallelSettings(Section):
    """How the model is spread over ranks. Ranks / (``replicas`` x ``tp`` x ``pp`` x ``cp``) is the degree of FSDP."""

    replicas: PositiveInt = 1
    """Groups of ranks that each have the whole sharded model (HSDP)."""
    tp: PositiveInt = 1
    """Ranks that share each layer's matrices, and the sequence between them (tensor and sequence parallel)."""
    pp: PositiveInt = 1
    """Ranks that each have some of the layers (pipeline parallel)."""
    schedule: Schedule = "1f1b"
    """Order of micro-batches in a pipeline; all compute the same.

    ``interleaved`` gives ranks several stages and waits less at the ends of a step (arXiv 2104.04473), ``zero-bubble``
    computes gradients of weights where it would wait (2401.10241).
    """
    stages_per_rank: PositiveInt = 1
    """Stages of a rank, each with some layers; ``interleaved`` needs 2 or more."""
    stage_layers: Annotated[tuple[PositiveInt, ...], Strict(False)] = ()
    """Layers of each stage, in their order; empty divides what is to be computed, the output projection included."""
    cp: PositiveInt = 1
    """Ranks that share each sequence (context parallel)."""
    ep: PositiveInt = 1
    """Ranks that share the experts of each layer; each has batches of its own (expert parallel)."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations recomputed in the backward pass: all of a layer, or all but its products and its attention."""
    compile: bool = False
    """Whether layers and loss are compiled."""
    fp8: bool = False
    """Whether the layers' matrices are multiplied in 8 bits; needs torchao and a supporting GPU."""

    def problem(self, model: ModelSettings, sequence: int) -> str | None:
        """Why ``model`` cannot be spread this way, in one sentence."""
        shares = {"heads": model.heads, "kv_heads": model.kv_heads, "vocab": model.vocab}
        shares |= {"ffn": model.ffn} if model.expert_layers < model.layers else {}
        shares |= {"expert_ffn": model.expert_channels} if model.expert_layers else {}
        shares |= {"state_key_heads": model.state_key_heads or model.state_heads} if model.has_states else {}
        for name, size in shares.items():
            if size % self.tp:
                return f"parallel.tp {self.tp} does not divide model.{name} {size}"
        if self.ep > 1 and (not model.expert_layers or model.experts % self.ep):
            return f"parallel.ep {self.ep} does not divide model.experts {model.experts}"
        if self.tp > 1 and model.qk_norm and model.qk_norm_over == "all":
            return "parallel.tp does not work with model.qk_norm_over all, which needs the heads of all its ranks"
        if problem := self._pipeline_problem(model):
            return problem
        if sequence % (parts := self.tp * (2 * self.cp if self.cp > 1 else 1)):
            return f"data.sequence {sequence} is not a multiple of {parts}, which parallel.tp and parallel.cp need"
        if self.cp > 1 and model.attention == "varlen":
            return "model.attention varlen does not work with parallel.cp; set it to auto"
        if self.cp > 1 and model.has_states:
            return "parallel.cp does not work with layers of model.pattern that have a state, delta and mamba"
        if self.cp > 1 and "dual_chunk" in model.kinds:
            return "parallel.cp does not work with layers of the kind 'dual_chunk' in model.pattern"
        if self.fp8 and self.tp > 1:
            return "parallel.fp8 does not work with parallel.tp"
        return None

    @property
    def stages(self) -> int:
        """Stages of a pipeline; stage i is on rank i modulo ``pp``."""
        return self.pp * self.stages_per_rank

    def _pipeline_problem(self, model: ModelSettings) -> str | None:
        default = ParallelSettings()
        if self.pp == 1:
            names = ("schedule", "stages_per_rank", "stage_layers")
            given = next((name for name in names if getattr(self, name) != getattr(default, name)), None)
            return f"parallel.{given} needs parallel.pp above 1" if given else None
        if self.stages > model.layers:
            return f"parallel.pp {self.pp} makes {self.stages} stages, more than model.layers {model.layers}"
        if self.stage_layers and (len(self.stage_layers), sum(self.stage_layers)) != (self.stages, model.layers):
            return f"parallel.stage_layers needs {self.stages} numbers with the sum of model.layers {model.layers}"
        if self.schedule == "interleaved" and self.stages_per_rank == 1:
            return "parallel.schedule interleaved needs parallel.stages_per_rank above 1"
        if self.schedule == "1f1b" and self.stages_per_rank > 1:
            return "parallel.stages_per_rank needs parallel.schedule interleaved or zero-bubble"
        if self.schedule == "zero-bubble" and self.compile:
            return "parallel.schedule zero-bubble does not work with parallel.compile"
        if self.schedule == "zero-bubble" and self.recompute == "selective":
            return "parallel.schedule zero-bubble does not work with parallel.recompute selective; take none or full"
        return None


class OptimizerSettings(Section):
    """AdamW, or Muon with AdamW for embeddings, output projection, norms and biases."""

    kind: Literal["adamw", "muon"] = "adamw"
    """Muon orthogonalises the updates of the layers' matrices, scaled to the size of AdamW's (arXiv 2502.16982)."""
    lr: float = Field(gt=0)
    """Peak of the learning rate."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Of Muon, Nesterov's."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay of matrices other than embeddings."""
    embedding_decay: NonNegativeFloat = 0.0
    """The same of embeddings and learnt positions, also where the output projection shares them."""
    clip: float = Field(1.0, gt=0, allow_inf_nan=True)
    """Bound of the global gradient norm; inf is none."""
    z_loss: NonNegativeFloat = 0.0
    """Weight of log(Z)^2 in the loss (PaLM, section 5); 0 leaves it out."""
    balance_loss: NonNegativeFloat = 0.0
    """Weight of the loss that spreads each sequence over the experts (1 if even); 0 leaves it out."""
    router_z_loss: NonNegativeFloat = 0.0
    """Weight of log(Z)^2 of the routers' logits in the loss (ST-MoE, arXiv 2202.08906); 0 leaves it out."""
    balance_rate: NonNegativeFloat = 0.0
    """By how much each step moves the biases of ``model.router_bias``, up for experts below the mean load."""
    max_skipped: NonNegativeInt = 10
    """Updates whose gradient norm is not finite are skipped; after more than these in a row the run ends."""


class ScheduleSettings(Section):
    """The learning rate in absolute steps, so that it does not depend on the length of the run.

    Linear up to step ``warmup``. ``wsd``: constant, then by ``decay`` down to ``floor`` from ``decay_start`` to
    ``decay_end``. ``cosine``: half a cosine from ``warmup`` to ``decay_end``. ``multi-step``: constant, times ``gamma``
    from each of the ``milestones`` on.
    """

    kind: Literal["wsd", "cosine", "multi-step"] = "wsd"
    warmup: NonNegativeInt
    """Steps of linear growth from 0 to the peak."""
    decay: Literal["linear", "1-sqrt", "cosine"] = "linear"
    """Shape of the decay of wsd: 1 - x, 1 - sqrt(x) or half a cosine over the share x of its steps."""
    decay_start: NonNegativeInt = 0
    """Step at which the decay begins, of wsd."""
    decay_end: NonNegativeInt = 0
    """Step at which it ends, of wsd and cosine."""
    floor: float = Field(0.0, ge=0, le=1)
    """Share of the peak at the end of wsd and cosine."""
    milestones: Annotated[tuple[PositiveInt, ...], Strict(False)] = ()
    """Steps at which the rate is multiplied by ``gamma``, of multi-step."""
    gamma: float = Field(0.1, gt=0, le=1)
    """See ``milestones``."""

    def problem(self) -> str | None:
        """What is wrong between the settings, in one sentence."""
        if self.kind == "wsd" and not self.warmup <= self.decay_start < self.decay_end:
            return "schedule needs warmup <= decay_start < decay_end"
        if self.kind != "wsd" and self.decay != "linear":
            return f"schedule.decay {self.decay} needs schedule.kind wsd"
        if self.kind == "cosine" and not self.warmup < self.decay_end:
            return "schedule.kind cosine needs warmup < decay_end"
        if self.kind == "multi-step" and (
            not self.milestones
            or list(self.milestones) != sorted(set(self.milestones))
            or self.milestones[0] <= self.warmup
        ):
            return "schedule.kind multi-step needs milestones, ascending and after warmup"
        return None


class CheckpointSettings(Section):
    """When checkpoints are made, how many are kept, and where copies go. The last step always makes one.

    Set one of ``every``, ``minutes`` and ``mttf_hours``.
    """

    every: NonNegativeInt = 0
    """Steps between checkpoints."""
    minutes: NonNegativeFloat = 0.0
    """Minutes between checkpoints."""
    mttf_hours: NonNegativeFloat = 0.0
    """Mean time between failures of the job; with the measured stall of a save it gives the interval (Daly 2006)."""
    keep: PositiveInt = 3
    """How many of the newest checkpoints are kept."""
    keep_every: NonNegativeInt = 0
    """Checkpoints of every so-many-th step are kept permanently; 0 for none."""
    replicas: bool = True
    """Whether, on several nodes, each also keeps the newest state of another in its memory."""
    remote: str = ""
    """The target for a copy of each checkpoint: a URL that fsspec supports, s3://bucket/run, or a network folder."""

    def problem(self) -> str | None:
        """What is wrong between the settings, in one sentence."""
        given = [name for name in ("every", "minutes", "mttf_hours") if getattr(self, name)]
        if len(given) != 1:
            names = " and ".join(f"checkpoint.{name}" for name in given) or "nothing"
            return f"{names} says when to save; set exactly one of checkpoint.every, minutes and mttf_hours"
        return None


class ReplaySettings(Section):
    """How often a micro-batch of each rank is computed again to find GPUs that compute wrong values."""

    every: NonNegativeInt = 500
    """Steps between replays; 0 for none. Each costs about as much as two micro-batches of every rank."""


class MetricsSettings(Section):
    """Constants for the calculation of metrics."""

    peak_flops: NonNegativeFloat = 0.0
    """Dense FLOP/s of one device in ``model.dtype``, the denominator of MFU. 0 means unknown."""
    experts_every: PositiveInt = 100
    """After how many steps ``experts.jsonl`` gets a line with the tokens of every expert in them."""


class EvaluationSettings(Section):
    """The evaluations of every checkpoint; without a set or a harness there are none."""

    perplexity: dict[str, str] = {}  # noqa: RUF012 -- pydantic copies it
    """Files of text, or JSON lines or Parquet with it, by the name of the set."""
    cloze: dict[str, str] = {}  # noqa: RUF012 -- pydantic copies it
    """Files of JSON lines with ``context``, ``choices`` and ``answer``, by the name of the set.

    Each choice is scored as the continuation of the context.
    """
    multiple_choice: dict[str, str] = {}  # noqa: RUF012 -- pydantic copies it
    """The same files, asked otherwise: the choices are listed in the text, and their letters are scored.

    Small models answer above chance as a cloze first (arXiv 2406.08446).
    """
    sequence: NonNegativeInt = 0
    """Tokens of texts that are read at once; 0 is the length of training.

    With more than that, and than the ``max_position_embeddings`` of ``run.initial``, layers that have rotary positions
    and see their document have dual-chunk attention, so that no position is farther than in training;
    ``model.dual_chunk`` says it otherwise.
    """
    harness: str = ""
    """A command of lm-evaluation-harness or lighteval.

    ``{model}`` is the model's folder, ``{output}`` the folder of the results.
    """
    reference: str = ""
    """The evaluations.jsonl of a run to compare with at equal tokens."""
    queue: str = "{command}"
    """How the evaluation is started, for instance ``sbatch --gpus=1 --wrap={command}``; by default it runs here."""

    @property
    def wanted(self) -> bool:
        """Whether there is anything to evaluate on."""
        return bool(self.perplexity or self.cloze or self.multiple_choice or self.harness)


class TrackingSettings(Section):
    """Where the numbers of every step and evaluation go in addition to the run folder's files."""

    tensorboard: bool = False
    """Whether to write TensorBoard files into RUN_FOLDER/tracking/tensorboard."""
    wandb: str = ""
    """A project of Weights & Biases."""
    trackio: str = ""
    """A project of Trackio."""
