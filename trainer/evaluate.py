"""``python -m opsd.trainer.evaluate RUN_FOLDER STEP``: evaluate the model of one checkpoint on the run's sets.

Appends one line to ``evaluations.jsonl`` of the run folder. A failed evaluation has empty ``results``::

    t, step     when it was evaluated in epoch seconds, and of which step
    tokens      how many the model has been trained on
    results     by name, see below; those of evaluation.harness too
    errors      standard errors of some results
    reference   results of the reference run at equal tokens, if there is one
    positions   of sets of texts: loss and number of tokens up to each position that is a power of 2

The results of a set NAME::

    NAME_loss            nats per token of a set of texts
    NAME_bits_per_byte   the same independent of the tokenizer
    NAME_accuracy        of a cloze set; also with _norm and _raw, see opsd.trainer.items
    NAME_mc_accuracy     of a set that is asked with letters

``scores/step-N/NAME.jsonl`` of the run folder has the scores of each item. Exit codes: 0 evaluated; 1 failed; 2 nothing
to evaluate; 74 the disk or the quota is full.
"""

from __future__ import annotations

import json
import math
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from opsd import durable, exitcodes
from opsd.checkpoints.manifest import CheckpointError, folder_of, verify
from opsd.evaluations import harness
from opsd.evaluations.queue import AWAITING, RESULTS, SCORES
from opsd.progress import tracked
from opsd.trainer.attention import Cache
from opsd.trainer.config import CHECKPOINTS, CONFIG, Config, ConfigError
from opsd.trainer.data.shards import DataError, Framing, find_index, place
from opsd.trainer.data.texts import read_texts
from opsd.trainer.data.tokenize import MAX_UNCOVERED, ids, load_tokenizer, uncovered
from opsd.trainer.hf.export import export_checkpoint
from opsd.trainer.hf.weights import config_in
from opsd.trainer.items import Item, Score, accuracies, read_items, standard_error, write_scores
from opsd.trainer.load import load
from opsd.trainer.model import Decoder
from opsd.trainer.model_settings import ModelSettings
from opsd.trainer.regions import region_of
from opsd.words import with_remedy

FAILED, USAGE = 1, 2


class Model:
    """The model of a checkpoint on one device, with its tokenizer."""

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, length: int, framing: Framing | None = None) -> None:
        self._decoder, self._tokenizer, self._length = decoder.eval(), tokenizer, length
        tokenizer.encode_special_tokens = True
        self._begin = ids(tokenizer, (framing or Framing()).begin)

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self._length

    @torch.no_grad()
    def log_likelihoods(self, text: str) -> torch.Tensor:
        """Log-likelihood in nats of each token of ``text``, float64.

        A text longer than a sequence is read in windows that follow each other. The last window begins earlier, so
        that it is whole (as in lm-evaluation-harness).
        """
        tokens, length = self._encode(text), self._length
        found = [torch.zeros(0, dtype=torch.float64)]
        for at in range(0, len(tokens) - 1, length):
            new = min(length, len(tokens) - 1 - at)
            window = tokens[max(0, at + new - length) : at + new + 1]
            found.append(self._read(window)[-new:])
        return torch.cat(found)[len(self._begin) - 1 :]

    def scored_bytes(self, text: str) -> int:
        """The bytes of the characters of ``text`` for which ``log_likelihoods`` has tokens, and of its white space."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return len(text.encode()) - len(uncovered(text, encoding.offsets).encode())

    @torch.no_grad()
    def continuations(self, context: str, choices: Sequence[str]) -> list[torch.Tensor]:
        """Log-likelihoods of the tokens of each of ``choices`` after ``context``, as if each were read with it.

        White space at the end of the context belongs to the choice. The rest of the context has the tokens that it has
        alone, and the choice those of the whole text from there on (as in lm-evaluation-harness). Of a text longer than
        a sequence the end is read, so that the choice has as much of its context as fits. Tokens with which all texts
        begin are read once, if all fit into a sequence and no layer has a state.
        """
        before, whole = self._encode(context.rstrip()), [self._encode(context + choice) for choice in choices]
        counts = [max(len(tokens) - len(before), bool(choice)) for tokens, choice in zip(whole, choices, strict=True)]
        texts = [before[: len(tokens) - n] + tokens[len(tokens) - n :] for tokens, n in zip(whole, counts, strict=True)]
        shared = _shared(texts)
        if shared < 1 or max(map(len, texts)) > self._length + 1 or self._decoder.settings.has_states:
            return [self._last(tokens, count) for tokens, count in zip(texts, counts, strict=True)]
        cache = Cache()
        begin = self._read(texts[0][: shared + 1], cache)
        found = [torch.cat((begin, self._read(tokens, cache.branch()))) for tokens in texts]
        return [values[len(values) - count :] for values, count in zip(found, counts, strict=True)]

    def _last(self, tokens: list[int], count: int) -> torch.Tensor:
        """Log-likelihoods of the last ``count`` of ``tokens``, with as much before them as fits into a window."""
        window = self._read(tokens[-self._length - 1 :])
        if count <= len(window):
            return window[len(window) - count :]
        return torch.cat((self._last(tokens[: -self._length], count - self._length), window))

    def _encode(self, text: str) -> list[int]:
        """The tokens of ``text`` after those that begin a document."""
        return [*self._begin, *self._tokenizer.encode(text, add_special_tokens=False).ids]

    def _read(self, ids: list[int], cache: Cache | None = None) -> torch.Tensor:
        """Log-likelihoods of the tokens ``ids``, except the first and those in the ``cache``."""
        tokens = torch.tensor(ids, device=next(self._decoder.parameters()).device)
        read = cache.length if cache else 0
        documents = torch.zeros(1, len(ids) - 1, dtype=torch.int32, device=tokens.device)
        logits = self._decoder(tokens[None, read:-1], documents, cache=cache)
        return -F.cross_entropy(logits[0].float(), tokens[read + 1 :], reduction="none").double().cpu()


def _shared(texts: Sequence[Sequence[int]]) -> int:
    """How many first tokens of all ``texts`` can be read at once: the next one is the same too, and one is left."""
    same = [len(set(tokens)) == 1 for tokens in zip(*texts, strict=False)]
    return min([*(at for at, alike in enumerate(same) if not alike), len(same) - 1]) - 1


class Positions:
    """The loss by the position of a token in its text, up to a sequence: what a longer context is worth.

    Tokens are put together by powers of 2: those at positions 1, 2, 3 and 4, 5 to 8 and so on.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._sums: dict[int, list[float]] = {}

    def add(self, likelihoods: torch.Tensor) -> None:
        """Those of a text, from its first token on; beyond a sequence the context is no longer that of the position."""
        at, end = 0, 1
        while at < min(len(likelihoods), self._length):
            part = likelihoods[at : min(end, self._length)]
            sums = self._sums.setdefault(end, [0.0, 0])
            sums[0] -= float(part.sum())
            sums[1] += len(part)
            at, end = end, 2 * end

    @property
    def losses(self) -> dict[str, list[float]]:
        """Mean loss in nats and number of tokens, by the last position."""
        return {str(end): [total / count, count] for end, (total, count) in sorted(self._sums.items())}


def perplexity(model: Model, texts: Iterator[str], name: str, positions: Positions | None = None) -> dict[str, float]:
    """Loss in nats per token and bits per byte over ``texts``. Raises DataError if there are none."""
    total, tokens, size, lost = 0.0, 0, 0, 0
    for text in texts:
        likelihoods = model.log_likelihoods(text)
        total -= float(likelihoods.sum())
        if positions is not None:
            positions.add(likelihoods)
        tokens += likelihoods.numel()
        scored = model.scored_bytes(text)
        size, lost = size + scored, lost + len(text.encode()) - scored
    if not tokens:
        raise DataError(f"the evaluation set {name} has no text")
    if lost > MAX_UNCOVERED * (size + lost):
        raise DataError(f"the tokenizer has no token for {lost / (size + lost):.1%} of the evaluation set {name}")
    return {f"{name}_loss": total / tokens, f"{name}_bits_per_byte": total / size / math.log(2)}


def scored(model: Model, items: Iterable[Item]) -> list[Score]:
    """The scores of ``items``, in their order."""
    return [
        Score.of(item, [found.tolist() for found in model.continuations(item.context, item.choices)]) for item in items
    ]


def at_equal_tokens(reference: Path, tokens: int) -> dict[str, float]:
    """Results of the run that wrote ``reference`` after ``tokens``, linearly interpolated between its evaluations.

    Only results that it has on both sides. Raises DataError if the file cannot be read.
    """
    curves: dict[str, list[tuple[int, float]]] = {}
    try:
        for line in reference.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            for name, value in record["results"].items():
                curves.setdefault(name, []).append((int(record["tokens"]), float(value)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{reference} is not the evaluations.jsonl of a run: {error!r}") from error
    found = {}
    for name, points in curves.items():
        at, values = zip(*sorted(points), strict=True)
        if at[0] <= tokens <= at[-1]:
            found[name] = float(np.interp(tokens, at, values))
    return found


def evaluate(
    config: Config, model: Model, kept: Path, positions: dict[str, Any] | None = None
) -> tuple[dict[str, float], dict[str, float]]:
    """The results of all sets of the run, and standard errors of some; ``kept`` gets the scores of each item.

    ``positions`` gets the losses by position of sets of texts. Raises DataError.
    """
    results: dict[str, float] = {}
    errors: dict[str, float] = {}
    for name, path in config.evaluation.perplexity.items():
        texts, by_position = tracked(read_texts([Path(path)]), f"evaluating {name}", "texts"), Positions(model.length)
        results |= perplexity(model, texts, name, by_position)
        if positions is not None:
            positions[name] = by_position.losses
    asked = [(name, path, False) for name, path in config.evaluation.cloze.items()]
    asked += [(name, path, True) for name, path in config.evaluation.multiple_choice.items()]
    for name, path, letters in asked:
        items = [item.as_letters if letters else item for item in read_items(Path(path))]
        scores = scored(model, tracked(items, f"evaluating {name}", "items", len(items)))
        found = accuracies(scores, name, letters=letters)
        write_scores(kept / (f"{name}_mc.jsonl" if letters else f"{name}.jsonl"), scores)
        results |= found
        errors |= {metric: standard_error(share, len(scores)) for metric, share in found.items()}
    return results, errors


def load_model(config: Config, folder: Path) -> tuple[Model, int]:
    """The model of the checkpoint in ``folder``, and the number of samples it was trained on.

    Raises CheckpointError or DataError.
    """
    manifest = verify(folder)
    device = torch.device("cuda" if torch.cuda.is_available() and config.run.device != "cpu" else "cpu")
    shape = config.data.shape_at(manifest.step)
    length = config.evaluation.sequence or shape.sequence
    with torch.device(device):
        decoder = Decoder(reading(config.model_with(shape), trained_length(config.run.initial, shape.sequence), length))
    load(folder, manifest, {f"model.{name}": region_of(value) for name, value in decoder.saved()})
    if config.model.dtype == "bfloat16":
        for parameter in decoder.parameters():  # as in training; the biases of routers stay
            parameter.data = parameter.data.to(torch.bfloat16)
    corpus = Path(config.data.shards, config.data.sources[0])
    fallback = Path(config.data.fallback, config.data.sources[0]) if config.data.fallback else None
    index = find_index(corpus, fallback)
    tokenizer = load_tokenizer(place(corpus, index.tokenizer, fallback))
    return Model(decoder, tokenizer, length, index.framing), manifest.sample


def trained_length(initial: str, sequence: int) -> int:
    """Tokens of the longest sequences that a model has seen: ``sequence``, or more if ``initial`` is known to have."""
    try:
        before = config_in(Path(initial)).get("max_position_embeddings") if initial else None
    except ConfigError:  # the folder may be gone since the start of the run
        before = None
    return max(sequence, before or 0)


def reading(model: ModelSettings, trained: int, length: int) -> ModelSettings:
    """``model``, which is trained with sequences of ``trained`` tokens, for those of ``length``.

    In longer sequences, layers that see their document have dual-chunk attention. The last quarter of ``trained``
    distances are true ones, as in section 3 of its paper.
    """
    if length <= trained or "global" not in model.kinds or model.dual_chunk:
        return model
    kinds = tuple("dual_chunk" if kind == "global" else kind for kind in model.kinds)
    return model.model_copy(update={"pattern": kinds, "dual_chunk": trained, "dual_chunk_local": trained // 4})


def ask_harness(config: Config, checkpoint: Path, kept: Path) -> harness.Results:
    """The results of the run's harness for ``checkpoint``. Raises DataError, CheckpointError or OSError."""
    with tempfile.TemporaryDirectory(prefix="opsd-evaluation-") as name:
        export_checkpoint(config, checkpoint, Path(name, "model"))
        try:
            return harness.run(config.evaluation.harness, Path(name, "model"), kept)
        except harness.HarnessError as error:
            raise DataError(f"evaluation.harness: {error}") from error


def main(arguments: Sequence[str]) -> int:
    """Evaluate one checkpoint."""
    if len(arguments) != 2 or not arguments[1].isdecimal():
        print("usage: python -m opsd.trainer.evaluate RUN_FOLDER STEP", file=sys.stderr)
        return USAGE
    run, step = Path(arguments[0]), int(arguments[1])
    try:
        config = Config.model_validate_json((run / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        print(f"opsd: {run / CONFIG} cannot be used: {error}", file=sys.stderr)
        return USAGE
    folder = folder_of(run / CHECKPOINTS, step)
    kept = run / SCORES / folder.name
    line: dict[str, Any] = {"step": step, "tokens": None, "results": {}}
    try:
        model, samples = load_model(config, folder)
        line["tokens"] = config.data.tokens(samples)
        line["positions"] = {}
        line["results"], line["errors"] = evaluate(config, model, kept, line["positions"])
        if config.evaluation.harness:
            results, errors = ask_harness(config, folder, kept)
            line["results"] |= results
            line["errors"] |= errors
        if config.evaluation.reference:
            line["reference"] = at_equal_tokens(Path(config.evaluation.reference), line["tokens"])
    except (CheckpointError, ConfigError, DataError, OSError) as error:
        line["why"] = str(error)
        print(f"opsd: {error}", file=sys.stderr)
    except Exception as error:  # memory that is used up, a model that a harness cannot have: told all the same
        line["why"] = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    try:
        durable.append(run / RESULTS, json.dumps({"t": time.time(), **line}).encode() + b"\n")
        (folder / AWAITING).unlink(missing_ok=True)
    except OSError as error:  # the checkpoint still waits for its evaluation
        print(f"opsd: the results cannot be kept: {with_remedy(error)}", file=sys.stderr)
        return exitcodes.of_error(error)
    return FAILED if "why" in line else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(FAILED))  # leaves no exported model behind
    sys.exit(main(sys.argv[1:]))
