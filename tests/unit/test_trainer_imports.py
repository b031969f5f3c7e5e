"""What the trainer's helper processes load, since a restart waits for it."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("opsd.trainer.data.worker", {"torch", "pydantic", "tokenizers", "safetensors"}),
        ("opsd.trainer.persist", {"torch", "numpy", "pydantic", "safetensors"}),
        ("opsd.trainer.tracking", {"torch", "tokenizers", "safetensors", "tensorboard", "wandb", "trackio"}),
        ("opsd.commands.checkpoint", {"torch", "numpy"}),
    ],
)
def test_helper_processes_start_light(module: str, forbidden: set[str]) -> None:
    """The processes beside a rank load nothing heavy that they do not need."""
    program = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert not forbidden & set(loaded.stdout.split())


@pytest.mark.slow
def test_a_run_imports_nothing_on_its_way() -> None:
    """Once ``opsd.trainer.train`` is imported, a run with a checkpoint loads no further part of torch."""
    program = """
import sys, tempfile, pathlib
import opsd.trainer.train
from opsd.trainer.config import load
from opsd.trainer.data.tokenize import make_corpus, train_tokenizer
folder = pathlib.Path(tempfile.mkdtemp())
texts = ["some words and some others"] * 200
make_corpus(texts, train_tokenizer(texts, 300), folder, 10**6)
before = set(sys.modules)
sets = [f"data.shards={folder}", f"run.folder={folder}", "run.steps=2", "data.batch=2", "data.sequence=16"]
sets.append("run.log_every=0")
assert opsd.trainer.train.train(load("tiny", sets))
print(*(name for name in sys.modules if name not in before and name.split(".")[0] in ("torch", "sympy", "numpy")))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) <= {"torch.profiler._cupti_monitor"}
