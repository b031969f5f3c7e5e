"""The callback for Hugging Face's Trainer in TRL's trainers, which are built on it: the real ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from opsd import exitcodes
from opsd.checkpoints.claims import Claim, Fence, create
from opsd.client import Reporter
from opsd.rank_page import read_page, write_request
from tests.fakes.adapter_ranks import tokens_of_ranks

trl = pytest.importorskip("trl", reason="trl is not installed")

import datasets  # noqa: E402
import transformers  # noqa: E402

from opsd.adapters.huggingface import RankPageCallback  # noqa: E402

pytestmark = pytest.mark.slow  # the libraries alone take seconds to import

WORDS = ["<pad>", "<eos>", "one", "two", "three", "four"]
SETTINGS: dict[str, Any] = {
    "max_steps": 4, "per_device_train_batch_size": 2, "save_steps": 2, "logging_steps": 1, "report_to": [],
    "use_cpu": True, "bf16": False, "disable_tqdm": True, "gradient_checkpointing": False,
}  # fmt: skip


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def model() -> transformers.LlamaForCausalLM:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(WORDS), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )
    )  # fmt: skip


def sft(folder: Path, reporter: Reporter | None = None, fence: Fence | None = None) -> Any:
    data = datasets.Dataset.from_list([{"text": "one two three four"}, {"text": "two three four one"}] * 8)
    return trl.SFTTrainer(
        model(), args=trl.SFTConfig(output_dir=str(folder), **SETTINGS), train_dataset=data,
        processing_class=tokenizer(), callbacks=[RankPageCallback(reporter, fence)],
    )  # fmt: skip


def dpo(folder: Path, reporter: Reporter | None = None, fence: Fence | None = None) -> Any:
    data = datasets.Dataset.from_list([{"prompt": "one two", "chosen": "three", "rejected": "four"}] * 16)
    return trl.DPOTrainer(
        model(), ref_model=model(), args=trl.DPOConfig(output_dir=str(folder), **SETTINGS), train_dataset=data,
        processing_class=tokenizer(), callbacks=[RankPageCallback(reporter, fence)],
    )  # fmt: skip


@pytest.mark.parametrize("make", [sft, dpo])
def test_a_training_fills_its_page(tmp_path: Path, make: Callable[[Path, Reporter], Any]) -> None:
    """Steps, losses, phases and saves of supervised and of preference tuning are on the page."""
    path = tmp_path / "rank-0000.page"
    make(tmp_path / "out", Reporter(path)).train()
    page = read_page(path)
    assert (page.state, page.committed_step) == ("finished", 4)
    assert [step.step for step in page.steps] == [1, 2, 3, 4]
    assert 0 < page.steps[-1].loss < 10
    assert all(step.tokens > 0 for step in page.steps)
    assert all(page.steps[-1].phase(name) > 0 for name in ("data", "forward", "optimizer"))


def test_a_stop_is_a_save_and_an_orderly_end(tmp_path: Path) -> None:
    """Asked to stop, the trainer saves the step it is at and ends; it can go on from there."""
    path = tmp_path / "rank-0000.page"
    reporter = Reporter(path)
    write_request(path, "checkpoint_and_stop")
    sft(tmp_path / "out", reporter).train()
    assert (read_page(path).steps_reported, read_page(path).committed_step) == (1, 1)
    sft(tmp_path / "out", Reporter(path)).train(resume_from_checkpoint=True)
    assert [step.step for step in read_page(path).steps] == [2, 3, 4]


@pytest.mark.parametrize("make", [sft, dpo])
def test_what_has_been_overtaken_saves_nothing(tmp_path: Path, make: Callable[..., Any]) -> None:
    """TRL's trainers save in ways of their own, which come to those of Hugging Face's."""
    assert create(tmp_path, Claim(2, "a start", "n2 8"))
    with pytest.raises(SystemExit) as end:
        make(tmp_path / "out", Reporter(tmp_path / "rank-0000.page"), Fence(tmp_path, 1)).train()
    assert end.value.code == exitcodes.FENCED
    assert not list((tmp_path / "out").glob("checkpoint-*/*.safetensors"))


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_ranks_count_their_own_tokens(tmp_path: Path, method: str) -> None:
    """Two ranks: the sum of the pages is the number of tokens that TRL logs for all ranks, here without padding."""
    pages = tokens_of_ranks(tmp_path, ["-c", RANK.format(folder=str(tmp_path), method=method)])
    logged = json.loads((tmp_path / "logged.json").read_text())
    assert pages[0] == pages[1] > 0
    assert sum(pages) == logged


RANK = """
import json, os
from pathlib import Path
import test_adapter_trl
folder = Path({folder!r})
trainer = test_adapter_trl.{method}(folder / "out")
trainer.train()
if os.environ["RANK"] == "0":
    logged = [line["num_tokens"] for line in trainer.state.log_history if "num_tokens" in line]
    (folder / "logged.json").write_text(json.dumps(logged[-1]))
"""
