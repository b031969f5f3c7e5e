"""Unchanged scripts of TRL under ``opsd launch``: nothing of opsd is in them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="trl is not installed")

from opsd.agent.swap import planned_swap
from opsd.preflight.base import Verdict
from opsd.preflight.report import Report
from opsd.rank_page import read_page
from tests.fakes.launched import Launched
from tests.fakes.nodes import Nodes

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
STRIPPED = 'tokenizer.chat_template = CHATML.replace("messages %}", "messages[1:] %}")'
"""A template that drops the system prompt."""
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


def longer(name: str) -> str:
    """More steps, each of which takes a quarter of a second at least."""
    source = HEAD.replace("max_steps=6", "max_steps=24").replace("save_steps=2", "save_steps=4") + SLOWLY
    return (source + SCRIPTS[name]).replace("trainer.train()", "trainer.add_callback(Slowly())\ntrainer.train()")


SLOWLY = """
import time, transformers
class Slowly(transformers.TrainerCallback):
    def on_step_end(self, *_, **__):
        time.sleep(float(os.environ.get("SLOWLY", 0)))
"""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "SLOWLY": "0.25"}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", SCRIPTS)
def test_killed_hung_swapped_and_stopped_it_ends_as_undisturbed(tmp_path: Path, name: str) -> None:
    """A rank dies, one hangs, which takes its node out, another node is swapped, and the run is stopped and started.

    The weights are the same to the bit.
    """
    (tmp_path / "quiet").mkdir()
    with Launched(tmp_path / "quiet", longer(name), "--nproc-per-node", "2") as run:
        assert run.wait(300) == 0, run.err
    folder = tmp_path / "disturbed"
    folder.mkdir()
    environ = {f"n{number}": ENVIRONMENT for number in (1, 2, 3, 4)}

    def generation() -> int:
        return max((event["generation"] for event in nodes.events("resumed")), default=1)

    def rank(number: int) -> int:
        """The process of a rank, wherever it is."""
        pages = folder.glob(f"n*/r/rank-{number:04d}.page")
        return max((page for path in pages if (page := read_page(path))), key=lambda page: page.created).pid

    with Nodes(folder, longer(name), "--nnodes=2", "--spares=2", "--no-standby", count=4, environ=environ) as nodes:
        nodes.until(lambda: committed(nodes) >= 4, 200)
        os.kill(rank(1), signal.SIGKILL)
        nodes.until(lambda: generation() == 2 and committed(nodes) >= 8, 200)
        os.kill(rank(1), signal.SIGSTOP)
        nodes.until(lambda: generation() == 3 and committed(nodes) >= 12, 200)
        assert len(nodes.events("hang_detected")) == 1
        stays, leaves = nodes.events("generation_started")[-1]["nodes"]
        assert planned_swap(lambda request: nodes.ask(stays, **request), leaves, "it is tested", patience_s=120)
        nodes.until(lambda: generation() == 4 and committed(nodes) >= 16, 200)
        for process in nodes.processes.values():
            process.terminate()
        assert 75 in nodes.wait(120).values()
    with Nodes(folder, longer(name), "--nnodes=2", "--no-standby", count=2, environ=environ) as nodes:
        assert nodes.wait(300) == {"n1": 0, "n2": 0}
    said = "".join(path.read_text() for path in sorted(folder.glob("run/logs/**/rank-0000.log")))
    assert said.count("the training goes on from") == 4
    assert weights(folder, 24) == weights(tmp_path / "quiet", 24)


def committed(run: Launched | Nodes) -> int:
    return max((event["step"] for event in run.events("checkpoint_committed")), default=0)


def test_a_resume_with_other_data_is_refused(tmp_path: Path) -> None:
    """The data set has changed since the checkpoint: a sentence, code 1, and no restart."""
    with Launched(tmp_path, HEAD + SFT) as run:
        assert run.wait(240) == 0, run.err
    source = (HEAD + SFT).replace("max_steps=6", "max_steps=8").replace("Writer(5)", "Writer(6)")
    with Launched(tmp_path, source) as run:
        assert run.wait(240) == 1
        assert "The data set is not the one of the checkpoint" in run.err


def test_a_resume_with_another_order_or_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    """Another sampling, then a checkpoint without its optimizer, then none that is complete."""
    with Launched(tmp_path, HEAD + SFT) as run:
        assert run.wait(240) == 0, run.err
    longer = (HEAD + SFT).replace("max_steps=6", "max_steps=8")
    with Launched(tmp_path, longer.replace("save_steps=2", "save_steps=2, dataloader_drop_last=True")) as run:
        assert run.wait(240) == 1
        assert "dataloader_drop_last was false at the checkpoint and is true" in run.err
    (tmp_path / "model/checkpoint-6/optimizer.pt").unlink()
    with Launched(tmp_path, longer.replace("save_steps=2", "save_steps=2, learning_rate=1e-4")) as run:
        assert run.wait(240) == 0, run.err
        assert "checkpoint-6 is not complete: optimizer.pt is missing" in run.out + run.err
        assert "learning_rate was 2e-05 at the checkpoint" in run.out + run.err
    for path in (tmp_path / "model").glob("checkpoint-*/trainer_state.json"):
        path.write_text("")
    with Launched(tmp_path, longer) as run:
        assert run.wait(240) == 1
        assert "no checkpoint to go on from is complete" in run.err
        assert sum(event["event"] == "generation_started" for event in run.events()) == 4


def test_a_refused_run_is_not_repeated(tmp_path: Path) -> None:
    """A template that drops the system prompt: code 1, a sentence with the row, one generation."""
    source = HEAD + STRIPPED + SFT
    with Launched(tmp_path, source, "--nproc-per-node", "2") as run:
        assert run.wait(240) == 1
        assert "The system prompt of row 0" in run.err
        assert "the audit of the first batches refuses the run" in run.err
        assert sum(event["event"] == "generation_started" for event in run.events()) == 1
    assert not list((tmp_path / "model").glob("checkpoint-*"))


def test_a_warning_trains_all_the_same(tmp_path: Path) -> None:
    """The same with --audit warn."""
    source = HEAD + STRIPPED + SFT
    with Launched(tmp_path, source, "--audit", "warn") as run:
        assert run.wait(240) == 0
        assert "The system prompt of row 0" in run.out + run.err
    assert json.loads((tmp_path / "model/checkpoint-6/trainer_state.json").read_text())["global_step"] == 6


@pytest.mark.parametrize(
    ("source", "code", "verdict", "said"),
    [
        (HEAD + SFT, 0, Verdict.PASS, ""),
        (HEAD + STRIPPED + SFT, 1, Verdict.FAIL, "The system prompt of row 0"),
        ("print('nothing')", 1, Verdict.COULD_NOT_RUN, "without a step of a trainer"),
        ("raise ValueError('no such model')", 1, Verdict.COULD_NOT_RUN, "no such model"),
    ],
)
def test_preflight_audits_a_script(tmp_path: Path, source: str, code: int, verdict: Verdict, said: str) -> None:
    """The script is a check of the node; one that cannot be audited has failed."""
    (tmp_path / "script.py").write_text(source)
    words = ["preflight", "--only=run_audit", "--quiet", f"--run={tmp_path}/script.py", f"--json={tmp_path}/report"]
    command = [sys.executable, "-m", "opsd", *words, f"--set=agent.state_dir={tmp_path / 'state'}"]
    assert subprocess.run(command, cwd=tmp_path, timeout=240, check=False).returncode == code
    (result,) = Report.from_json((tmp_path / "report").read_bytes()).results
    assert result.verdict is verdict, result
    assert said in " ".join(result.sentences)


HARNESS = """
import json, pathlib, sys
model, output = map(pathlib.Path, sys.argv[1:])
assert (model / "model.safetensors").exists() and (model / "tokenizer.json").exists()
(output / "results.json").write_text(json.dumps({"results": {"task": {"step": int(model.name.split("-")[1])}}}))
"""
"""In the place of lm-evaluation-harness."""


def test_each_checkpoint_is_evaluated_and_kept_until_then(tmp_path: Path) -> None:
    """What the queue refuses waits for the next start; save_total_limit removes no checkpoint that waits."""
    (tmp_path / "harness.py").write_text(HARNESS)
    flags = ["--evaluation", f"{sys.executable} {tmp_path}/harness.py {{model}} {{output}}"]
    source = HEAD.replace("save_steps=2", "save_steps=2, save_total_limit=1") + SFT
    with Launched(tmp_path, source, *flags, "--evaluation-queue", "false {command}") as run:
        assert run.wait(240) == 0, run.err
        refused = run.events("evaluation")
    kept = sorted(path.name for path in (tmp_path / "model").glob("checkpoint-*"))
    assert kept == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert {(event["step"], event["why"].partition(",")[0]) for event in refused} == {
        (step, "false ended with status 1") for step in (2, 4, 6)
    }
    with Launched(tmp_path, source.replace("max_steps=6", "max_steps=8"), *flags) as run:
        assert run.wait(240) == 0, run.err
        found = {event["step"]: event["results"] for event in run.events("evaluation") if event["results"]}
    assert found == {step: {"task_step": float(step)} for step in (2, 4, 6, 8)}
    assert not list((tmp_path / "model").glob("*/awaiting-evaluation"))
