"""The programs of examples/ under ``opsd launch`` on two ranks, one of which is killed after the first checkpoint."""

from __future__ import annotations

import json
import os
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest

from opsd import exitcodes
from opsd.ledger.ledger import read_ledger
from opsd.rank_page import read_page
from tests.fakes.hf_models import WORDS, make_model, make_tokenizer
from tests.fakes.launched import Launched

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples"
ON_GLOO = Path(__file__).parents[1] / "outside/gloo"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ON_GLOO)}
TITAN = EXAMPLES.parent / ".venv-torchtitan/bin/python"
ON_CPU = Path(__file__).parents[1] / "fakes/torchtitan_example_cpu.py"
STEPS = 300


def text(folder: Path) -> list[str]:
    """A file to learn."""
    folder.joinpath("text.txt").write_text("one two three four five\n" * 400)
    return ["text.txt"]


def model_and_data(folder: Path) -> list[str]:
    """A model with its tokenizer, and a data set."""
    make_model(folder / "model")
    rows = ({"prompt": "one two three ", "completion": WORDS[3 + number % 5]} for number in range(200))
    folder.joinpath("data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return ["model", "data.jsonl"]


@pytest.mark.parametrize(
    ("name", "packages", "arguments", "source"),
    [
        ("ddp", ["torch"], text, "observed"),
        ("ddp_reporting", ["torch"], text, "client"),
        ("hf_trainer", ["transformers", "accelerate"], text, "adapter"),
        ("lightning_fit", ["lightning"], text, "adapter"),
        ("trl_sft", ["trl", "transformers", "datasets"], model_and_data, "adapter"),
    ],
)
def test_it_survives_the_death_of_a_rank(
    tmp_path: Path, name: str, packages: list[str], arguments: object, source: str
) -> None:
    """It goes on from its checkpoint to the last step; steps, and of an adapter tokens and losses, are seen."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    assert callable(arguments)
    program = (str(EXAMPLES / f"{name}.py"), *arguments(tmp_path), f"--steps={STEPS}", "--save-every=50", "--out=kept")
    with Launched(tmp_path, "", "--nproc-per-node=2", program=program, env=ENVIRONMENT) as launched:
        kill_a_rank(launched)
        assert launched.wait(300) == exitcodes.OK, launched.err
        assert (event := launched.event("resumed"))["step"] >= 50, event
        for page in (read_page(launched.memory / f"rank-{rank:04d}.page") for rank in range(2)):
            assert (page.source, page.state) == (source, "finished")
            steps = [record.step for record in page.steps]
            assert steps == list(range(steps[0], STEPS + 1))
            assert source == "observed" or (page.tokens > 0 and 0 < page.steps[-1].loss < 10)
        ledger = read_ledger(launched.run)
        assert (ledger.notes, ledger.steps > 0) == ((), True)


def kill_a_rank(launched: Launched, rank: int = 1) -> None:
    """Kill ``rank`` once there is a checkpoint."""

    def saved() -> bool:
        assert launched.process.poll() is None, launched.err
        return bool(launched.events("checkpoint_committed"))

    launched.until(saved, 200)
    os.kill(launched.event("generation_started")["ranks"][rank]["pid"], signal.SIGKILL)


@pytest.mark.skipif(not TITAN.exists(), reason="torchtitan needs a newer torch than ours: make torchtitan")
def test_torchtitan_survives_it_too(tmp_path: Path) -> None:
    """In its own environment, on text of one's own; one rank, because gloo lacks what FSDP reduces gradients with."""
    make_tokenizer(tmp_path / "tokenizer")
    (words,) = text(tmp_path)
    arguments = ("--hf_assets_path=tokenizer", f"--dataloader.dataset_path={words}", "--dump_folder=kept")
    program = (str(TITAN), str(ON_CPU), "--module=torchtitan_example_cpu", "--config=small", *arguments)
    paths = os.pathsep.join(map(str, (ON_GLOO, EXAMPLES, ON_CPU.parent, EXAMPLES.parent)))
    environment = {**ENVIRONMENT, "PYTHONPATH": paths, "WANDB_MODE": "disabled"}
    with Launched(tmp_path, "", "--nproc-per-node=1", "--no-python", program=program, env=environment) as launched:
        kill_a_rank(launched, 0)
        assert launched.wait(300) == exitcodes.OK, launched.err
        assert launched.event("resumed")["step"] > 10
        page = read_page(launched.memory / "rank-0000.page")
        assert (page.source, page.state, page.steps[-1].step) == ("adapter", "finished", 30)
        assert 0 < page.steps[-1].loss < 10
