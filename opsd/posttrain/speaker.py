"""A checkpoint that answers: model, tokenizer and the chat template that was saved with it, by transformers."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TextStreamer

Messages = list[dict[str, str]]
_NUMBERED = re.compile(r"checkpoint-(\d+)")
_SHARDED = "pytorch_model_fsdp_0"
_TOKENIZERS = ("*token*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
"""Files of which one at least makes a tokenizer."""
_DRAWING = (
    "bos_token_id", "eos_token_id", "pad_token_id", "top_k", "top_p", "min_p", "repetition_penalty",
    "no_repeat_ngram_size", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids",
)  # fmt: skip
"""What holds of a checkpoint's own generation settings: which token comes next, and not how many answers are tried."""


class SpeakerError(Exception):
    """A folder is no checkpoint that can answer; the message says why, and what to do."""


def checkpoints_in(folder: Path) -> list[Path]:
    """``folder`` if it is a checkpoint, else the checkpoints that a trainer has saved in it, oldest first.

    Raises SpeakerError if there is none.
    """
    if _is_checkpoint(folder):
        return [folder]
    named = ((_NUMBERED.fullmatch(path.name), path) for path in folder.glob("checkpoint-*"))
    numbered = [(int(match[1]), path) for match, path in named if match is not None]
    found = [path for _, path in sorted(numbered) if _is_checkpoint(path)]
    if found:
        return found
    if (folder / "checkpoints").is_dir():
        raise SpeakerError(
            f"{folder} is a run of the included trainer: export it first (python -m opsd.trainer.huggingface export)"
        )
    if sharded := [*folder.glob(f"checkpoint-*/{_SHARDED}"), *folder.glob(_SHARDED)]:
        raise SpeakerError(
            f"{sharded[-1]} holds the parts of FSDP: make one model of them first (accelerate merge-weights), and put "
            "config.json and the tokenizer of the base model beside it"
        )
    raise SpeakerError(
        f"{folder} has no config.json, no adapter_config.json and no checkpoint-N: name the folder of a checkpoint"
    )


def _is_checkpoint(folder: Path) -> bool:
    """Of a model, or of an adapter such as LoRA, which transformers puts on its base model."""
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))


def told_apart(names: Sequence[str], paths: Sequence[Path]) -> list[str]:
    """``names``, or the paths themselves if two different ones have the same name."""
    return list(names) if len(set(names)) >= len({*map(Path.resolve, paths)}) else [str(path) for path in paths]


def home_of(checkpoint: Path) -> Path:
    """The folder of the run that a checkpoint belongs to."""
    return checkpoint.parent if _NUMBERED.fullmatch(checkpoint.name) else checkpoint


class _Listener(TextStreamer):
    """Hands on pieces of text as they become certain."""

    def __init__(self, tokenizer: Any, said: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._said = said

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._said(text)


@dataclass(frozen=True, slots=True)
class Answer:
    """``ids`` without the end token; ``stopped``: the model ended by itself."""

    text: str
    ids: list[int]
    stopped: bool


@dataclass(frozen=True, slots=True)
class Speaker:
    """A checkpoint in memory."""

    name: str
    model: Any
    tokenizer: Any

    @classmethod
    def load(cls, folder: Path, device: str = "auto") -> Speaker:
        """The newest checkpoint in ``folder``. ``device`` auto is the first GPU, or the CPU. Raises SpeakerError."""
        path = checkpoints_in(folder)[-1]
        if not (path / "config.json").is_file() and importlib.util.find_spec("peft") is None:
            raise SpeakerError(f"{path} is an adapter on another model, which needs peft: install it")
        if not any(found for pattern in _TOKENIZERS for found in path.glob(pattern)):
            raise SpeakerError(
                f"{path} has no tokenizer: copy that of the base model there, and give it to the trainer "
                "(processing_class) so that it is saved with the next one"
            )
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
            dtype = torch.float32 if device == "cpu" else "auto"
            model: Any = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=dtype)
            model = model.to(device).eval()
            own = model.generation_config.to_dict()
            drawing = {name: own[name] for name in _DRAWING if name in own}
            model.generation_config = GenerationConfig(**drawing)  # type: ignore[no-untyped-call]
        except Exception as error:  # transformers, tokenizers and safetensors may raise anything
            said = str(error).strip().partition("\n")[0] or type(error).__name__
            raise SpeakerError(f"{path} cannot be loaded by transformers: {said:.300}") from error
        return cls(f"{path.parent.name}/{path.name}" if path.parent.name else path.name, model, tokenizer)

    @property
    def has_template(self) -> bool:
        """Whether the checkpoint has the chat template of a training."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def places(self) -> int | None:
        """The most tokens that the model reads, None if that is not known or not limited."""
        found = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return found if isinstance(found, int) and found > 0 else None

    @property
    def ends(self) -> frozenset[int]:
        """The tokens at which a generation stops."""
        own = self.model.generation_config.eos_token_id
        own = [] if own is None else own if isinstance(own, list) else [own]
        return frozenset(each for each in (*own, self.tokenizer.eos_token_id) if each is not None)

    def prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The tokens after which the model answers; without a template the texts one below the other.

        Raises SpeakerError if the template refuses the messages, or if the model has no place for an answer to them.
        """
        if self.has_template:
            found = self._templated(messages)
        else:
            found = list(self.tokenizer("\n".join(each["content"] for each in messages) + "\n")["input_ids"])
        if not found:
            raise SpeakerError(f"the chat template of {self.name} writes nothing for these messages")
        self._check_length(len(found) + 1)
        return found

    def _check_length(self, tokens: int) -> None:
        if self.places is not None and tokens > self.places:
            raise SpeakerError(f"messages and answer have {tokens} tokens, and {self.name} reads {self.places} at most")

    def _templated(self, messages: Sequence[dict[str, str]]) -> list[int]:
        try:
            found = self.tokenizer.apply_chat_template(
                list(messages), tokenize=True, add_generation_prompt=True, return_dict=False
            )
        except Exception as error:  # a template may refuse anything, in any way
            raise SpeakerError(f"the chat template of {self.name} refuses these messages: {error}") from error
        return [int(each) for each in found]

    def answer(
        self,
        messages: Sequence[dict[str, str]],
        *,
        most: int,
        temperature: float = 0.0,
        said: Callable[[str], None] | None = None,
    ) -> Answer:
        """The model's answer of ``most`` tokens at most; ``temperature`` 0 takes the likeliest token each time.

        ``said`` gets the text in pieces. Raises SpeakerError as ``prompt`` does.
        """
        prompt = torch.tensor([self.prompt(messages)], device=self.model.device)
        most = most if self.places is None else min(most, self.places - prompt.shape[1])
        drawn = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
        with torch.no_grad():
            whole = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=most,
                eos_token_id=sorted(self.ends) or None,
                pad_token_id=self.tokenizer.pad_token_id or next(iter(sorted(self.ends)), 0),
                streamer=_Listener(self.tokenizer, said) if said is not None else None,
                **drawn,
            )
        ids = whole[0, prompt.shape[1] :].tolist()
        stopped = bool(ids) and ids[-1] in self.ends
        ids = ids[:-1] if stopped else ids
        return Answer(self.tokenizer.decode(ids, skip_special_tokens=True), ids, stopped)

    def log_probabilities(self, ids: Sequence[int], begin: int) -> torch.Tensor:
        """For each position from ``begin`` on, the log-probabilities of its token: (len(ids) - begin, vocabulary).

        Raises SpeakerError if the model does not read as many tokens.
        """
        self._check_length(len(ids))
        given = torch.tensor([list(ids)], device=self.model.device)
        with torch.no_grad():
            logits = self.model(given, use_cache=False).logits[0, begin - 1 : len(ids) - 1]
        return torch.log_softmax(logits.float(), -1)
