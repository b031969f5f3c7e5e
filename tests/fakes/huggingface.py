"""A tiny model and its tokenizer as folders in the form of Hugging Face."""

from __future__ import annotations

from pathlib import Path

WORDS = ["<pad>", "<eos>", "<unk>", "one", "two", "three", "four", "five"]


def make_tokenizer(folder: Path) -> None:
    """A tokenizer of a few words in the form of Hugging Face."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(folder)


def make_model(folder: Path) -> None:
    """A model of two thousand parameters with its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    make_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
