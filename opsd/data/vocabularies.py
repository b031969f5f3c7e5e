"""The cost of a vocabulary in a model, by the plan of a run."""

from __future__ import annotations

from dataclasses import dataclass

from opsd.data.tokenizers import Compared
from opsd.plan.hardware import hardware_of
from opsd.plan.plan import plan_for_gpus
from opsd.plan.reliability import HABITS
from opsd.plan.search import CannotPlan
from opsd.plan.source import read, tokens_of
from opsd.trainer import counts


@dataclass(frozen=True, slots=True)
class Cost:
    """A model with the ids of a tokenizer, on the text that the first tokenizer needs ``run.steps`` for.

    ``problem`` says why there is no plan; the figures of it are None then.
    """

    embeddings: int
    share: float
    tokens: float
    gpu_hours: float | None
    memory_gib: float | None
    problem: str = ""


def costs(source: str, gpus: int, compared: list[Compared]) -> list[Cost]:
    """The cost of each tokenizer in the run ``source``, a preset or a TOML file. Raises ConfigError."""
    config = read(source, (), None, gpus)
    wanted = float(tokens_of(config))
    text = wanted * compared[0].bytes_per_token
    found = []
    for each in compared:
        model = config.model.model_copy(update={"vocab": each.ids})
        own = config.model_copy(update={"model": model})
        tokens = text / each.bytes_per_token if each.bytes_per_token else wanted
        embeddings = counts.embedding_parameters(model)
        share = embeddings / counts.parameters(model)
        try:
            plan = plan_for_gpus(own, "h100", gpus, tokens, hardware_of("h100", model.dtype), HABITS)
            found.append(Cost(embeddings, share, tokens, plan.gpu_hours, plan.best.memory.total / (1 << 30)))
        except CannotPlan as error:
            found.append(Cost(embeddings, share, tokens, None, None, str(error)))
    return found
