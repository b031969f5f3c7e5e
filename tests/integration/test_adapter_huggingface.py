"""The callback for Hugging Face's Trainer, in the real one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from opsd.client import Reporter, events_path, read_page, write_request

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from opsd.adapters.huggingface import RankPageCallback  # noqa: E402

pytestmark = pytest.mark.slow  # the library alone takes seconds to import


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
        output_dir=str(tmp_path / "out"), max_steps=6, per_device_train_batch_size=4, save_steps=3, logging_steps=1,
        report_to=[], use_cpu=True, include_num_input_tokens_seen="all", disable_tqdm=True, **settings,
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
    assert read_page(path).steps[-1].step == 6
