"""The callback for Hugging Face's Trainer, in the real one."""

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
