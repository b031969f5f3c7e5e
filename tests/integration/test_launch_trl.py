"""Unchanged scripts of TRL under ``opsd launch``: nothing of opsd is in them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="trl is not installed")

from opsd.rank_page import read_page
from tests.fakes.launched import Launched

pytestmark = [pytest.mark.slow, pytest.mark.long]

HEAD = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})  # for the tiny model and its texts only
import datasets, trl
from tests.fakes.posttrain import CHATML, TRAINED, Writer, byte_tokenizer, message, tiny_llama
datasets.disable_progress_bars()
writer, tokenizer = Writer(5), byte_tokenizer(CHATML)
settings = dict(
    output_dir="model", max_steps=6, per_device_train_batch_size=2, save_steps=2, logging_steps=1, report_to=[],
    use_cpu=True, bf16=False, disable_tqdm=True, gradient_checkpointing=False,
)
"""
PREFERENCES = """
answer = lambda: [message("assistant", writer.answer())]
"""
SFT = """
rows = datasets.Dataset.from_list([{"messages": writer.chat()} for _ in range(32)])
trainer = trl.SFTTrainer(tiny_llama(), args=trl.SFTConfig(**settings), train_dataset=rows, processing_class=tokenizer)
trainer.train()
"""
DPO = """
rows = [{"prompt": writer.chat()[:-1], "chosen": answer(), "rejected": answer()} for _ in range(32)]
trainer = trl.DPOTrainer(
    tiny_llama(), ref_model=tiny_llama(), args=trl.DPOConfig(**settings),
    train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer,
)
trainer.train()
"""
KTO = """
rows = [{"prompt": writer.chat()[:-1], "completion": answer(), "label": at % 2 == 0} for at in range(32)]
trainer = trl.KTOTrainer(
    tiny_llama(), ref_model=tiny_llama(), args=trl.KTOConfig(**settings),
    train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer,
)
trainer.train()
"""
GRPO = """
rows = datasets.Dataset.from_list([{"prompt": writer.chat()[:-1]} for _ in range(32)])
trainer = trl.GRPOTrainer(
    tiny_llama(), args=trl.GRPOConfig(**settings, num_generations=2, max_completion_length=8), train_dataset=rows,
    processing_class=tokenizer, reward_funcs=lambda completions, **_: [len(each) for each in completions],
)
trainer.train()
"""
# TRL 1.16 itself, without opsd, resumes a distillation exactly within its first epoch only.
DISTILLATION = """
rows = datasets.Dataset.from_list([{"prompt": writer.chat()[:-1]} for _ in range(128)])  # one epoch
trainer = trl.DistillationTrainer(
    tiny_llama(), teacher_model=tiny_llama(hidden_size=48),
    args=trl.DistillationConfig(**settings, max_completion_length=8), train_dataset=rows, processing_class=tokenizer,
)
trainer.train()
"""
SCRIPTS = {
    "sft": SFT, "dpo": PREFERENCES + DPO, "kto": PREFERENCES + KTO, "grpo": GRPO, "distillation": DISTILLATION,
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_unchanged_script_fills_its_page(tmp_path: Path, name: str) -> None:
    """Steps, tokens and saves of two ranks are on their pages, without a line of opsd in the script."""
    with Launched(tmp_path, HEAD + SCRIPTS[name], "--nproc-per-node", "2") as run:
        assert run.wait(240) == 0, run.err
        pages = [read_page(run.memory / f"rank-{rank:04d}.page") for rank in range(2)]
    assert [page.source for page in pages] == ["adapter"] * 2
    for page in pages:
        assert (page.state, page.committed_step) == ("finished", 6)
        assert [step.step for step in page.steps] == [1, 2, 3, 4, 5, 6]
        assert all(step.tokens > 0 for step in page.steps)
    assert "nothing found" in run.out + run.err
    if name == "grpo":
        rollouts = run.events("rollouts")
        assert [event["step"] for event in rollouts] == [1, 2, 3, 4, 5, 6]
        assert all(0 <= event["flat"] <= 1 and event["length"] > 0 for event in rollouts)


def weights(folder: Path, step: int) -> bytes:
    return (folder / f"model/checkpoint-{step}/model.safetensors").read_bytes()


LONGER = HEAD.replace("max_steps=6", "max_steps=24").replace("save_steps=2", "save_steps=4")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["sft", "dpo", "kto", "grpo", "distillation"])
def test_killed_and_stopped_it_ends_as_undisturbed(tmp_path: Path, name: str) -> None:
    """A rank is killed, later the run is stopped and started again: the same weights to the bit, no step twice."""
    folders = [tmp_path / "quiet", tmp_path / "disturbed"]
    for folder in folders:
        folder.mkdir()
    source = LONGER + SCRIPTS[name]
    with Launched(folders[0], source, "--nproc-per-node", "2") as run:
        assert run.wait(300) == 0, run.err
    with Launched(folders[1], source, "--nproc-per-node", "2") as run:
        run.until(lambda: committed(run) >= 8, 200)
        os.kill(run.events("generation_started")[0]["ranks"][1]["pid"], signal.SIGKILL)
        run.until(lambda: committed(run) >= 12 and len(run.events("generation_started")) > 1, 200)
        run.process.terminate()
        assert run.wait(120) == 75, run.err
        assert "the training goes on from" in run.log(0, 2)
    with Launched(folders[1], source, "--nproc-per-node", "2") as run:
        assert run.wait(300) == 0, run.err
        (resumed,) = [each for each in run.events("generation_started") if each["generation"] > 2][:1]
        assert "the training goes on from" in run.log(0, resumed["generation"])
    assert weights(folders[0], 24) == weights(folders[1], 24)


def committed(run: Launched) -> int:
    return max((event["step"] for event in run.events("checkpoint_committed")), default=0)


def test_a_resume_with_other_data_is_refused(tmp_path: Path) -> None:
    """The data set has changed since the checkpoint: a sentence, code 1, and no restart."""
    with Launched(tmp_path, HEAD + SFT) as run:
        assert run.wait(240) == 0, run.err
    source = (HEAD + SFT).replace("max_steps=6", "max_steps=8").replace("Writer(5)", "Writer(6)")
    with Launched(tmp_path, source) as run:
        assert run.wait(240) == 1
        assert "The data set is not the one of the checkpoint" in run.err


def test_a_refused_run_is_not_repeated(tmp_path: Path) -> None:
    """A template that drops the system prompt: code 1, a sentence with the row, one generation."""
    source = HEAD + 'tokenizer.chat_template = CHATML.replace("messages %}", "messages[1:] %}")' + SFT
    with Launched(tmp_path, source, "--nproc-per-node", "2") as run:
        assert run.wait(240) == 1
        assert "The system prompt of row 0" in run.err
        assert "the audit of the first batches refuses the run" in run.err
        assert sum(event["event"] == "generation_started" for event in run.events()) == 1
    assert not list((tmp_path / "model").glob("checkpoint-*"))


def test_a_warning_trains_all_the_same(tmp_path: Path) -> None:
    """The same with --audit warn."""
    source = HEAD + 'tokenizer.chat_template = CHATML.replace("messages %}", "messages[1:] %}")' + SFT
    with Launched(tmp_path, source, "--audit", "warn") as run:
        assert run.wait(240) == 0
        assert "The system prompt of row 0" in run.out + run.err
    assert json.loads((tmp_path / "model/checkpoint-6/trainer_state.json").read_text())["global_step"] == 6
