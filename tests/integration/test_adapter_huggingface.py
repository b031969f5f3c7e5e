"""The callback for Hugging Face's Trainer, in the real one and in TRL's trainers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from opsd import exitcodes
from opsd.checkpoints.claims import Claim, Fence, create
from opsd.client import Reporter, events_path
from opsd.rank_page import read_page, write_request
from tests.fakes.adapter_ranks import tokens_of_ranks

pytest.importorskip("accelerate")
from collections.abc import Callable
from typing import Any

import datasets
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from opsd.adapters.huggingface import RankPageCallback

pytestmark = pytest.mark.slow


# The callback for Hugging Face's Trainer, in the real one.


transformers = pytest.importorskip("transformers")


class Numbers(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(index, index + 8) % 32
        return {"input_ids": ids, "labels": ids}


def trainer(tmp_path: Path, callbacks: list[object], **settings: object) -> transformers.Trainer:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), **{"per_device_train_batch_size": 4, **settings}, max_steps=6, save_steps=3,
        logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    return transformers.Trainer(model, arguments, train_dataset=Numbers(), eval_dataset=Numbers(), callbacks=callbacks)


def test_a_training_fills_its_page(tmp_path: Path) -> None:
    """Steps, tokens, losses, phases, saves and evaluations of a real Trainer are on the page."""
    path = tmp_path / "rank-0000.page"
    trainer(tmp_path, [RankPageCallback(Reporter(path))], eval_strategy="steps", eval_steps=3).train()
    page = read_page(path)
    assert (page.state, page.steps_reported, page.committed_step) == ("finished", 6, 6)
    assert [step.step for step in page.steps] == [1, 2, 3, 4, 5, 6]
    assert page.tokens == 6 * 4 * 8
    assert 0 < page.steps[-1].loss < 10
    assert page.steps[-1].grad_norm > 0
    rates = [step.learning_rate for step in page.steps[1:]]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] > 0
    assert all(page.steps[-1].phase(name) > 0 for name in ("data", "forward", "optimizer"))
    assert page.steps[3].phase("checkpoint") > 0
    assert page.steps[3].phase("evaluation") > 0
    events = [json.loads(line) for line in events_path(path).read_text().splitlines()]
    assert [(event["event"], event["step"]) for event in events] == [("evaluation", 3), ("evaluation", 6)]
    assert events[0]["results"]["eval_loss"] > 0


def test_a_stop_is_a_save_and_an_orderly_end(tmp_path: Path) -> None:
    """Asked to stop, the Trainer saves the step it is at and ends; it can go on from there."""
    path = tmp_path / "rank-0000.page"
    reporter = Reporter(path)
    write_request(path, "checkpoint_and_stop")
    trainer(tmp_path, [RankPageCallback(reporter)]).train()
    page = read_page(path)
    assert (page.state, page.steps_reported, page.committed_step) == ("finished", 1, 1)
    again = trainer(tmp_path, [RankPageCallback(Reporter(path))])
    again.train(resume_from_checkpoint=True)
    page = read_page(path)
    assert page.steps[-1].step == 6
    assert {step.tokens for step in page.steps} == {4 * 8}, "after a resume each step counts its own tokens"


class OvertakenAt(transformers.TrainerCallback):  # type: ignore[name-defined, misc]
    """The run goes on elsewhere while this trainer is at ``step``."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step

    def on_step_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        if state.global_step == self.step:  # type: ignore[attr-defined]
            assert create(self.folder, Claim(2, "a start", "n2 8"))


def test_what_has_been_overtaken_saves_no_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first checkpoint is written; before the second the run has gone on elsewhere: exit code 76 and a sentence."""
    assert create(tmp_path, Claim(1, "a start", "n1 7"))
    page = RankPageCallback(Reporter(tmp_path / "rank-0000.page"), Fence(tmp_path, 1))
    fenced = trainer(tmp_path, [OvertakenAt(tmp_path, 5), page])
    with pytest.raises(SystemExit) as end:
        fenced.train()
    assert end.value.code == exitcodes.FENCED
    assert "generation 2 of the run has begun elsewhere; generation 1 may not write" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["checkpoint-3"]
    with pytest.raises(SystemExit):
        fenced.save_model(str(tmp_path / "final"))
    assert not (tmp_path / "final").exists()


def test_a_trainer_without_the_callback_is_left_alone(tmp_path: Path) -> None:
    """Another one in the same program, which is no part of the run, saves as ever."""
    assert create(tmp_path, Claim(2, "a start", "n2 8"))
    RankPageCallback(Reporter(tmp_path / "rank-0000.page"), Fence(tmp_path, 1))
    trainer(tmp_path, []).save_model(str(tmp_path / "final"))
    assert (tmp_path / "final").exists()


def test_ranks_count_their_own_tokens(tmp_path: Path) -> None:
    """Two ranks: each page has the tokens of its own batches, accumulated ones too; the sum was trained on."""
    program = RANK.format(folder=str(tmp_path))
    assert tokens_of_ranks(tmp_path, ["-c", program]) == [6 * 2 * 2 * 8] * 2


RANK = """
from pathlib import Path
from test_adapter_huggingface import trainer
from opsd.adapters.huggingface import RankPageCallback
trainer(Path({folder!r}), [RankPageCallback()], per_device_train_batch_size=2, gradient_accumulation_steps=2).train()
"""

SCRIPT = """
import sys
from pathlib import Path
from test_adapter_huggingface import trainer
from opsd.adapters.huggingface import RankPageCallback
trainer(Path(sys.argv[1]), [RankPageCallback()]).train()
"""


def test_a_rank_of_the_past_ends_with_its_code(tmp_path: Path) -> None:
    """As a program: what the launcher told the rank is enough, and no traceback hides the reason."""
    assert create(tmp_path, Claim(5, "a start", "n1 7"))
    environ = {"OPSD_RUN_DIR": str(tmp_path), "OPSD_GENERATION": "4", "OMP_NUM_THREADS": "1"}
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path], env={**os.environ, **environ, "PYTHONPATH": paths},
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == exitcodes.FENCED, done.stderr
    assert "opsd: generation 5 of the run has begun elsewhere; generation 4 may not write any more\n" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "out").glob("checkpoint-*"))


# The callback for Hugging Face's Trainer in TRL's trainers, which are built on it: the real ones.


trl = pytest.importorskip("trl", reason="trl is not installed")

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
def test_a_training_fills_its_page_of_trl(tmp_path: Path, make: Callable[[Path, Reporter], Any]) -> None:
    """Steps, losses, phases and saves of supervised and of preference tuning are on the page."""
    path = tmp_path / "rank-0000.page"
    make(tmp_path / "out", Reporter(path)).train()
    page = read_page(path)
    assert (page.state, page.committed_step) == ("finished", 4)
    assert [step.step for step in page.steps] == [1, 2, 3, 4]
    assert 0 < page.steps[-1].loss < 10
    assert all(step.tokens > 0 for step in page.steps)
    assert all(page.steps[-1].phase(name) > 0 for name in ("data", "forward", "optimizer"))


def test_a_stop_is_a_save_and_an_orderly_end_of_trl(tmp_path: Path) -> None:
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
def test_ranks_count_their_own_tokens_of_trl(tmp_path: Path, method: str) -> None:
    """Two ranks: the sum of the pages is the number of tokens that TRL logs for all ranks, here without padding."""
    pages = tokens_of_ranks(tmp_path, ["-c", TRL_RANK.format(folder=str(tmp_path), method=method)])
    logged = json.loads((tmp_path / "logged.json").read_text())
    assert pages[0] == pages[1] > 0
    assert sum(pages) == logged


TRL_RANK = """
import json, os
from pathlib import Path
import test_adapter_huggingface
folder = Path({folder!r})
trainer = test_adapter_huggingface.{method}(folder / "out")
trainer.train()
if os.environ["RANK"] == "0":
    logged = [line["num_tokens"] for line in trainer.state.log_history if "num_tokens" in line]
    (folder / "logged.json").write_text(json.dumps(logged[-1]))
"""
