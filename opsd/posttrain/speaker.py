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
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

Messages = list[dict[str, str]]
_NUMBERED = re.compile(r"checkpoint-(\d+)")


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
    raise SpeakerError(
        f"{folder} has no config.json, no adapter_config.json and no checkpoint-N: name the folder of a checkpoint"
    )


def _is_checkpoint(folder: Path) -> bool:
    """Of a model, or of an adapter such as LoRA, which transformers puts on its base model."""
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))


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
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
            dtype = torch.float32 if device == "cpu" else "auto"
            model: Any = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=dtype)
            model = model.to(device).eval()
        except Exception as error:  # transformers, tokenizers and safetensors may raise anything
            said = str(error).strip().partition("\n")[0] or type(error).__name__
            raise SpeakerError(f"{path} cannot be loaded by transformers: {said:.300}") from error
        return cls(f"{path.parent.name}/{path.name}" if path.parent.name else path.name, model, tokenizer)

    @property
    def has_template(self) -> bool:
        """Whether the checkpoint has the chat template of a training."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def ends(self) -> frozenset[int]:
        """The tokens at which a generation stops."""
        own = self.model.generation_config.eos_token_id
        own = [] if own is None else own if isinstance(own, list) else [own]
        return frozenset(each for each in (*own, self.tokenizer.eos_token_id) if each is not None)

    def prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The tokens after which the model answers; without a template the texts one below the other.

        Raises SpeakerError if the template refuses the messages.
        """
        if not self.has_template:
            return list(self.tokenizer("\n".join(each["content"] for each in messages) + "\n")["input_ids"])
        return self._templated(messages, add_generation_prompt=True)

    def conversation(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The tokens of messages that end in an answer, as a training sees them. Raises SpeakerError."""
        if not self.has_template:
            return [*self.prompt(messages[:-1]), *self.tokenizer(messages[-1]["content"])["input_ids"]]
        return self._templated(messages, add_generation_prompt=False)

    def _templated(self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool) -> list[int]:
        try:
            found = self.tokenizer.apply_chat_template(
                list(messages), tokenize=True, add_generation_prompt=add_generation_prompt, return_dict=False
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

        ``said`` gets the text in pieces. Raises SpeakerError if the template refuses the messages.
        """
        prompt = torch.tensor([self.prompt(messages)], device=self.model.device)
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
        """For each position from ``begin`` on, the log-probabilities of its token: (len(ids) - begin, vocabulary)."""
        given = torch.tensor([list(ids)], device=self.model.device)
        with torch.no_grad():
            logits = self.model(given, use_cache=False).logits[0, begin - 1 : len(ids) - 1]
        return torch.log_softmax(logits.float(), -1)
