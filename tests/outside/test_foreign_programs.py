"""Training programs of others, unchanged, under ``opsd launch`` on two ranks, one of which is killed on the way.

Programs of installed packages run always; those that live in a repository run where ``OPSD_OUTSIDE`` names a folder
with a checkout of it (see README.md beside this file).
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
from array import array
from importlib.util import find_spec
from pathlib import Path

import pytest

from opsd import exitcodes
from opsd.ledger.ledger import read_ledger
from opsd.rank_page import read_page
from tests.fakes.hf_models import WORDS, make_model, make_tokenizer
from tests.fakes.launched import Launched

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

ON_GLOO = Path(__file__).with_name("gloo")
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "WANDB_MODE": "disabled"}


def need(*packages: str) -> None:
    """Skip where a package is missing, by its name."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def checkout(name: str, *, into: Path, files: str) -> Path:
    """A copy of ``files`` (a folder) of the checkout of the repository ``name``."""
    outside = os.environ.get("OPSD_OUTSIDE")
    source = Path(outside or "/nonexistent", name)
    if not source.is_dir():
        pytest.skip(f"no checkout of {name}: set OPSD_OUTSIDE to a folder that has one, see {__file__}")
    return Path(shutil.copytree(source / files, into / name, ignore=shutil.ignore_patterns(".git")))


def survives_a_kill(
    folder: Path,
    *words: str,
    after: str,
    env: dict[str, str],
    end: str = "",
    last: int | None = None,
    source: str = "observed",
) -> str:
    """Kill rank 1 once a rank has said ``after``; the run goes on, ends well and says ``end``. Returns what it said.

    ``last`` is the number of its last step, if that is known. ``source`` says who reports: opsd, which watches the
    optimizers, or the adapter, which opsd has given to a Trainer of transformers.
    """
    flags, program = (["-m"], words[1:]) if words[0] == "-m" else ([], words)
    watched = folder.parent / f"{folder.name}-watched"
    watched.mkdir()
    environment = {**OFFLINE, "HF_HOME": str(folder / "hf"), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ON_GLOO), **env}
    with Launched(
        watched, "", "--nproc-per-node=2", *flags, program=tuple(program), env=environment, cwd=folder
    ) as launched:

        def begun() -> bool:
            assert launched.process.poll() is None, launched.log(0)[-3000:] + launched.log(1)[-3000:]
            return any(after in launched.log(rank) for rank in range(2))

        launched.until(begun, 300)
        os.kill(launched.event("generation_started")["ranks"][1]["pid"], signal.SIGKILL)
        code = launched.wait(300)
        said = launched.log(0, 2)
        assert code == exitcodes.OK, launched.err + said[-3000:]
        assert [event["event"] for event in launched.events()].count("generation_started") == 2
        (killed,) = [event for event in launched.events("rank_exited") if event["culprit"]]
        assert (killed["rank"], killed["exit"]) == (1, "signal SIGKILL")
        assert end in said
        assert_reported(launched, last, source)
        return said


def assert_reported(launched: Launched, last: int | None, source: str = "observed") -> None:
    """Its pages show the steps, numbered on from the checkpoint it went on from, and the ledger has an ETTR.

    ``last`` is the number of its last step, None for a program whose steps depend on more.
    """
    for page in (read_page(launched.memory / f"rank-{rank:04d}.page") for rank in range(2)):
        assert (page.source, page.state, page.tokens > 0) == (source, "finished", source == "adapter")
        steps = [record.step for record in page.steps]
        assert steps == list(range(steps[0], steps[0] + len(steps)))
        assert last in (None, steps[-1])
    assert len(launched.events("resumed")) == 1
    ledger = read_ledger(launched.run)
    assert ledger.notes == ()
    assert ledger.steps > 0
    assert 0 < ledger.ettr < 1


def nanogpt(folder: Path, **settings: object) -> tuple[Path, list[str]]:
    """A checkout of karpathy/nanoGPT with data below ``folder``, and the command line of a small model."""
    need("torch", "numpy")
    folder = checkout("nanoGPT", into=folder, files=".")
    data = folder / "data/tiny"
    data.mkdir()
    for name in ("train.bin", "val.bin"):
        data.joinpath(name).write_bytes(array("H", [number % 64 for number in range(4096)]).tobytes())
    data.joinpath("meta.pkl").write_bytes(pickle.dumps({"vocab_size": 64}))
    settings = {
        "dataset": "tiny", "backend": "gloo", "compile": False, "dtype": "float32", "eval_interval": 20,
        "eval_iters": 1, "block_size": 32, "batch_size": 2, "gradient_accumulation_steps": 2, "n_layer": 1,
        "n_head": 2, "n_embd": 16, "max_iters": 60, "lr_decay_iters": 60, "warmup_iters": 5, **settings,
    }  # fmt: skip
    return folder, ["train.py", *(f"--{name}={value}" for name, value in settings.items())]


def test_nanogpt(tmp_path: Path) -> None:
    """karpathy/nanoGPT, train.py."""
    folder, words = nanogpt(tmp_path)
    survives_a_kill(folder, *words, after="iter 20:", env={"NO_GPU": "1"}, end="iter 60:", last=61)
    assert (folder / "out/ckpt.pt").exists()


@pytest.mark.parametrize("observe", [(), ("--no-observe",)])
def test_nanogpt_evaluates_without_being_killed(tmp_path: Path, observe: tuple[str, ...]) -> None:
    """``estimate_loss`` takes hundreds of steps and several limits, while rank 1 waits for rank 0."""
    folder, words = nanogpt(tmp_path, eval_iters=1200)
    flags = ("--nproc-per-node=2", "--hang-limit=1", "--unannounced-hang-limit=2", "--idle-limit=8", *observe)
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ON_GLOO), "NO_GPU": "1"}
    (tmp_path / "watched").mkdir()
    with Launched(tmp_path / "watched", "", *flags, program=tuple(words), env=env, cwd=folder) as launched:
        assert launched.wait(500) == exitcodes.OK
        assert not launched.events("hang_detected")
        assert "step 60: train loss" in launched.log(0)


@pytest.mark.parametrize("observe", [(), ("--no-observe",)])
def test_a_stopped_rank_of_nanogpt_is_named(tmp_path: Path, observe: tuple[str, ...]) -> None:
    """SIGSTOP for one of two ranks: named within seconds, its evidence kept, and the run goes on."""
    folder, words = nanogpt(tmp_path, max_iters=2000, eval_interval=10_000)
    flags = ("--nproc-per-node=2", "--hang-limit=2", *observe)
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ON_GLOO), "NO_GPU": "1"}
    (tmp_path / "watched").mkdir()
    with Launched(tmp_path / "watched", "", *flags, program=tuple(words), env=env, cwd=folder) as launched:
        launched.until(lambda: "iter 20:" in launched.log(0), 300)
        os.kill(launched.event("generation_started")["ranks"][1]["pid"], signal.SIGSTOP)
        hang = launched.event("hang_detected")
        assert hang["rank"] == 1
        assert "state T" in hang["reason"]
        assert hang["stuck_s"] < hang["limit_s"] + 20
        assert (launched.run / "flight_recorder/rank-0000.json").exists()
        launched.until(lambda: "iter 20:" in launched.log(0, 2), 300)


def test_pytorch_ddp(tmp_path: Path) -> None:
    """pytorch/examples, distributed/ddp-tutorial-series/multigpu_torchrun.py, which goes on from its snapshot."""
    need("torch")
    folder = checkout("examples", into=tmp_path, files="distributed/ddp-tutorial-series")
    env = {"NO_GPU": "1"}
    said = survives_a_kill(folder, "multigpu_torchrun.py", "40", "2", after="Epoch 4 | Training snapshot", env=env)
    assert "Resuming training from snapshot at Epoch" in said
    assert "Epoch 38 | Training snapshot" in said


LIGHTNING = """
import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities import rank_zero_only


class Model(BoringModel):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        print(f"step {self.trainer.global_step} on {self.global_rank} by {rank_zero_only.rank}", flush=True)


if __name__ == "__main__":
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=80, limit_val_batches=1, enable_progress_bar=False,
        logger=False, callbacks=[ModelCheckpoint("kept", save_last=True, every_n_train_steps=10)],
    )
    trainer.fit(Model(), ckpt_path="last")
    print("fitted", trainer.global_step, flush=True)
"""


def test_lightning(tmp_path: Path) -> None:
    """A Lightning script, which goes on from its last checkpoint; each rank knows which one it is."""
    need("lightning")
    (tmp_path / "fit.py").write_text(LIGHTNING)
    said = survives_a_kill(tmp_path, "fit.py", after="step 30 on", env={}, end="fitted 80", last=80)
    assert "Restored all states from the checkpoint" in said
    assert "step 80 on 0 by 0" in said


STEPS = ("--max_steps=40", "--save_steps=10", "--logging_steps=1", "--per_device_train_batch_size=1", "--use_cpu")
QUIET = ("--report_to=none", "--disable_tqdm=True", "--output_dir=out")


def test_run_clm(tmp_path: Path) -> None:
    """huggingface/transformers, examples/pytorch/language-modeling/run_clm.py."""
    need("transformers", "accelerate", "datasets", "evaluate", "sklearn")
    folder = checkout("transformers", into=tmp_path, files="examples/pytorch/language-modeling")
    make_tokenizer(folder / "tokenizer")
    (folder / "text.txt").write_text("one two three four five\n" * 400)
    model = ("--model_type=gpt2", "--config_overrides=n_embd=16,n_layer=1,n_head=2", "--tokenizer_name=tokenizer")
    data = ("--train_file=text.txt", "--validation_file=text.txt", "--block_size=16", "--do_train")
    said = survives_a_kill(
        folder, "run_clm.py", *model, *data, *STEPS, *QUIET, after="'loss'", env={}, last=40, source="adapter"
    )
    assert "train_runtime" in said
    assert (folder / "out/checkpoint-40/model.safetensors").exists()


def test_trl(tmp_path: Path) -> None:
    """TRL's script for supervised fine-tuning, as installed."""
    need("trl", "transformers", "datasets")
    make_model(tmp_path / "model")
    (tmp_path / "data").mkdir()
    lines = (json.dumps({"text": f"one two three {WORDS[3 + number % 5]}"}) for number in range(200))
    (tmp_path / "data/train.jsonl").write_text("\n".join(lines))
    words = ("--model_name_or_path=model", "--dataset_name=data", "--max_length=16", "--bf16=False", *STEPS, *QUIET)
    gradients = "--gradient_checkpointing=False"
    said = survives_a_kill(
        tmp_path, "-m", "trl.scripts.sft", *words, gradients, after="'loss'", env={}, last=40, source="adapter"
    )
    assert "train_runtime" in said
    assert (tmp_path / "out/checkpoint-40/model.safetensors").exists()


def test_accelerate(tmp_path: Path) -> None:
    """Accelerate's own test of its operations, as installed."""
    need("accelerate")
    survives_a_kill(
        tmp_path, "-m", "accelerate.test_utils.scripts.test_script", after="**Initialization**",
        env={"ACCELERATE_USE_CPU": "true"}, end="**Test reinstantiated state**",
    )  # fmt: skip


HUGGING_FACE = """
import torch
from transformers import LlamaForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
import os

tokens = AutoTokenizer.from_pretrained("model")("one two three four", return_tensors="pt")["input_ids"][0]
data = [{"input_ids": tokens, "labels": tokens}] * 400
arguments = TrainingArguments(
    "out", max_steps=40, save_steps=10, logging_steps=1, use_cpu=True, report_to="none", disable_tqdm=True,
    per_device_train_batch_size=1,
)
trainer = Trainer(LlamaForCausalLM.from_pretrained("model"), arguments, train_dataset=data)
last = get_last_checkpoint("out") if os.path.isdir("out") else None
print("from", last, flush=True)
trainer.train(resume_from_checkpoint=last)
print("trained", trainer.state.global_step, "on", arguments.process_index, flush=True)
"""


def test_hugging_face_trainer(tmp_path: Path) -> None:
    """A script with the Trainer of transformers, which goes on from its last checkpoint."""
    need("transformers", "accelerate")
    make_model(tmp_path / "model")
    (tmp_path / "tune.py").write_text(HUGGING_FACE)
    said = survives_a_kill(
        tmp_path, "tune.py", after="'epoch': '0.06'", env={}, end="trained 40 on 0", last=40, source="adapter"
    )
    assert "from out/checkpoint-10" in said
