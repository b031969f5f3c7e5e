"""Whether this trainer computes what transformers computes with the same files."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from opsd.trainer.config import ConfigError
from opsd.trainer.hf.config import settings_of
from opsd.trainer.hf.kinds import Fields
from opsd.trainer.hf.weights import config_in, fill
from opsd.trainer.model import Decoder, count_parameters
from opsd.trainer.model_settings import ModelSettings
from opsd.words import first_line, reason

TOLERANCE = 1e-4
"""Greatest difference of two logits in float32, as a share of the greatest logit, that rounding explains."""
OLDEST = 5, 23
"""The oldest transformers whose models are those of their authors, as far as they are tested here."""
TOKENS = 64
"""Length of each of the two compared sequences."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """``difference`` is the greatest difference of two logits as a share of the greatest logit."""

    difference: float
    layers: int
    of_layers: int

    @property
    def same(self) -> bool:
        """Whether rounding explains the difference."""
        return self.difference <= TOLERANCE


def compare(folder: Path, layers: int = 0) -> Comparison:
    """Compare the logits of a fixed batch, in float32 on the CPU, over the first ``layers``; 0 is as many as fit.

    Raises ConfigError if the model cannot be read, by us or by transformers, or if transformers is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "transformers is not installed, which the comparison needs: pip install transformers"
        ) from error
    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = config_in(folder)
    settings = settings_of(config)
    layers = min(settings.layers, layers or _fitting(settings))
    first = settings.model_copy(update={"layers": layers, "pattern": settings.kinds[:layers]})
    tokens = torch.randint(0, settings.vocab, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = _ours(folder, first, tokens, part=layers < settings.layers)
        gc.collect()
        theirs = _theirs(transformers, folder, layers, tokens)
    if not (ours.isfinite().all() and theirs.isfinite().all()):
        raise ConfigError(f"{folder} gives logits that are not finite")
    difference = ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30)).item()
    found = Comparison(difference, layers, settings.layers)
    demand_judge(found, transformers.__version__)
    return found


def demand_judge(found: Comparison, version: str) -> None:
    """Raises ConfigError if there is a difference from a ``version`` of transformers with known errors."""
    if not found.same and tuple(map(int, version.split(".")[:2])) < OLDEST:
        raise ConfigError(
            f"the logits differ from those of transformers {version}, which computes DeepSeek-V2 and Bamba wrongly; "
            "update it to {}.{} or newer and compare again".format(*OLDEST)
        )


def _fitting(settings: ModelSettings) -> int:
    """How many layers fit into half of the available memory, in float32."""
    without = count_parameters(settings.model_copy(update={"layers": 1, "pattern": settings.kinds[:1]}))
    each = (count_parameters(settings) - without) / max(1, settings.layers - 1)
    room = psutil.virtual_memory().available / 2 / 4
    return max(1, int((room - without) / max(each, 1)) + 1)


def _ours(folder: Path, settings: ModelSettings, tokens: torch.Tensor, *, part: bool) -> torch.Tensor:
    model = Decoder(settings)
    fill(model, folder, part=part)
    logits: torch.Tensor = model(tokens, torch.zeros(tokens.shape, dtype=torch.int32))
    return logits


def _theirs(transformers: Any, folder: Path, layers: int, tokens: torch.Tensor) -> torch.Tensor:
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if layers != config.num_hidden_layers:
            config = type(config).from_dict(_first(config.to_dict(), layers))
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
        )
        logits: torch.Tensor = model(tokens, use_cache=False).logits
    except Exception as error:  # whatever a release of theirs raises
        raise ConfigError(f"transformers cannot load {folder}: {first_line(reason(error))}") from error
    return logits


def _first(config: Fields, layers: int) -> Fields:
    """The configuration of the first ``layers``, for transformers. Its own objects refuse such changes (Bamba)."""
    cut = {**config, "num_hidden_layers": layers}
    if types := config.get("layer_types"):
        cut["layer_types"] = types[:layers]
    if (indices := config.get("attn_layer_indices")) is not None:
        cut["attn_layer_indices"] = [index for index in indices if index < layers]
    return cut
