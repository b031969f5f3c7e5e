"""Evaluations of a real run: one for each checkpoint, told as events, compared with a reference."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from trainer_world import Run, make_texts

from opsd.checkpoints.manifest import folder_of, steps
from opsd.trainer.config import load
from opsd.trainer.evaluate import main
from tests.fakes.clock import until


def test_every_checkpoint_is_evaluated(run: Run, tmp_path: Path) -> None:
    """Each checkpoint has a line and an event with its results; the loss has fallen; none is pruned before.

    Texts are read in longer sequences than those of training.
    """
    (tmp_path / "held.txt").write_text("\n".join(make_texts(3, seed=2)))
    items = [{"context": "import ", "choices": ["torch", "qqqq"], "answer": 0}]
    (tmp_path / "items.jsonl").write_text("\n".join(map(json.dumps, items)))
    reference = [{"tokens": tokens, "results": {"held_loss": 1.0}} for tokens in (0, 10**6)]
    (tmp_path / "reference.jsonl").write_text("\n".join(map(json.dumps, reference)))
    sets: dict[str, object] = {
        "evaluation__sequence": 80,
        "evaluation__perplexity": f'{{held = "{tmp_path}/held.txt"}}',
        "evaluation__cloze": f'{{items = "{tmp_path}/items.jsonl"}}',
        "evaluation__reference": f'"{tmp_path}/reference.jsonl"',
    }
    codes = run.start(checkpoint__every=20, checkpoint__keep=1, **sets).wait()
    assert codes == [0, 0], run.log().read_text()
    lines = [json.loads(line) for line in (run.folder / "evaluations.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [20, 40], (run.folder / "evaluations.log").read_text()
    assert [line["tokens"] for line in lines] == [20 * 4 * 32, 40 * 4 * 32]
    assert lines[1]["results"]["held_loss"] < lines[0]["results"]["held_loss"] < 6.0
    assert lines[0]["results"]["items_accuracy"] in (0.0, 1.0)
    assert lines[0]["errors"] == dict.fromkeys((f"items_accuracy{part}" for part in ("", "_norm", "_raw")), 0.0)
    kept = json.loads((run.folder / "scores" / "step-000000000020" / "items.jsonl").read_text())
    assert (kept["answer"], kept["bytes"]) == (0, [5, 4])
    assert lines[0]["reference"] == {"held_loss": 1.0}
    events = run.events("evaluation")
    assert [event["results"] for event in events] == [line["results"] for line in lines]
    assert events[0]["reference"] == {"held_loss": 1.0}


@pytest.mark.parametrize(
    ("kind", "content", "expected"),
    [
        ("cloze", None, "cannot be read"),
        ("cloze", "", "the evaluation set s has no items"),
        ("multiple_choice", '{"context": "a", "choices": ["b"], "answer": 0}', "line 1: no cloze item"),
        ("multiple_choice", json.dumps({"context": "a", "choices": ["b"] * 27, "answer": 0}), "27 choices"),
        ("perplexity", "", "the evaluation set s has no text"),
    ],
)
def test_a_set_that_cannot_be_read_is_refused_at_once(
    run: Run, tmp_path: Path, kind: str, content: str | None, expected: str
) -> None:
    """The run would train to its end, and have no evaluation."""
    if content is not None:
        (tmp_path / "set.jsonl").write_text(content)
    assert run.start(world=1, **{f"evaluation__{kind}": f'{{s = "{tmp_path}/set.jsonl"}}'}).wait() == [2]
    assert expected in run.printed()
    assert "step 1/" not in run.printed()


HARNESS = """
import json, pathlib, sys
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from tests.fakes.clock import until
model, output = map(pathlib.Path, sys.argv[1:])
parameters = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(model).parameters())
tokenizer = AutoTokenizer.from_pretrained(model)
assert tokenizer.decode(tokenizer.bos_token_id) and tokenizer.eos_token_id is not None, "lm_eval needs one of them"
ids = tokenizer("import torch")["input_ids"]
(output / "m").mkdir(parents=True)
results = {"results": {"task": {"acc,none": len(ids) / 100, "acc_stderr,none": 0.01, "parameters,none": parameters}}}
(output / "m/results_1.json").write_text(json.dumps(results))
"""
"""In the place of lm-evaluation-harness: loads the model as that does, and writes what that writes."""


def test_a_harness_has_the_model_and_its_results_are_taken(run: Run, tmp_path: Path) -> None:
    """The command gets a model with a tokenizer that transformers loads, and what it finds becomes an evaluation."""
    pytest.importorskip("transformers")
    (tmp_path / "harness.py").write_text(HARNESS)
    command = f"{sys.executable} {tmp_path}/harness.py {{model}} {{output}}"
    codes = run.start(run__steps=5, model__nope_every=0, evaluation__harness=command).wait()
    assert codes == [0, 0], run.log().read_text()
    (event,) = run.events("evaluation")
    assert event["results"].keys() == {"task_acc", "task_parameters"}, (run.folder / "evaluations.log").read_text()
    assert event["results"]["task_parameters"] > 20_000
    assert event["errors"] == {"task_acc": 0.01}
    assert 0 < event["results"]["task_acc"] < 1


def test_a_harness_that_fails_is_told(run: Run, tmp_path: Path) -> None:
    """Its exit code and its last line are in the event, all it wrote is kept, and the training does not mind."""
    (tmp_path / "broken.sh").write_text("echo loading; echo no such task >&2; exit 3")
    assert run.start(run__steps=5, evaluation__harness=f"sh {tmp_path}/broken.sh {{model}}").wait() == [0, 0]
    (event,) = run.events("evaluation")
    log = run.folder / "scores" / "step-000000000005" / "harness.log"
    why = f"evaluation.harness: sh ended with status 3: no such task; all it wrote is in {log}"
    assert (event["results"], event["why"]) == ({}, why)
    assert log.read_text() == "loading\nno such task\n"


def test_an_evaluation_that_fails_is_told(run: Run, tmp_path: Path) -> None:
    """A set that cannot be read gives an event without results, and the checkpoint may go; the training goes on."""
    sets = {"evaluation__perplexity": f'{{held = "{tmp_path}/none.txt"}}', "evaluation__queue": '"env {command}"'}
    assert run.start(run__steps=5, **sets).wait() == [0, 0], run.log().read_text()
    (event,) = run.events("evaluation")
    assert (event["step"], event["results"]) == (5, {})
    assert "none.txt cannot be read" in event["why"]
    assert not list(run.checkpoints.glob("*/awaiting-evaluation"))


@pytest.fixture(scope="module")
def trained(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that ended after a step and was not evaluated."""
    run = Run(tmp_path_factory.mktemp("trained"), shards)
    run.finish(world=1, run__steps=1)
    return run


def evaluated(run: Run, *overrides: str) -> dict[str, Any]:
    """The line of an evaluation with other settings."""
    config = load(str(run.folder / "config.toml"), [f"data.shards={run.shards}", *overrides], {})
    (run.folder / "config.json").write_text(config.model_dump_json())
    main([str(run.folder), "1"])
    return json.loads((run.folder / "evaluations.jsonl").read_text().splitlines()[-1])


def test_it_computes_in_the_type_of_the_training(trained: Run) -> None:
    """The results of a run in bfloat16 are those of its model, which on a GPU has kernels for that type only."""
    sets = f'evaluation.perplexity={{held = "{Path(__file__)}"}}'
    whole, half = (
        evaluated(trained, sets, f"model.dtype={dtype}")["results"]["held_loss"] for dtype in ("float32", "bfloat16")
    )
    assert half != whole
    assert half == pytest.approx(whole, rel=1e-2)


def test_an_evaluation_that_breaks_down_is_told(trained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it dies of there is a line that says so, and the checkpoint may go."""

    def broken(*_: object) -> None:
        raise MemoryError("used up")

    monkeypatch.setattr("opsd.trainer.evaluate.scored", broken)
    items = tmp_path / "items.jsonl"
    items.write_text('{"context": "a", "choices": ["b", "c"], "answer": 0}')
    mark = folder_of(trained.checkpoints, 1) / "awaiting-evaluation"
    mark.touch()
    line = evaluated(trained, f'evaluation.cloze={{items = "{items}"}}')
    assert line["results"] == {}
    assert line["why"].startswith("MemoryError: used up")
    assert not mark.exists()


def test_a_queue_is_asked(run: Run, tmp_path: Path) -> None:
    """With a queue command the evaluation is handed to it, and the checkpoint waits until it has been done."""
    sets = {
        "evaluation__perplexity": f'{{held = "{tmp_path}/none.txt"}}',
        "evaluation__queue": f"'sh -c \"echo {{command}} > {tmp_path}/submitted\"'",
    }
    assert run.start(run__steps=5, **sets).wait() == [0, 0], run.log().read_text()
    until(lambda: (tmp_path / "submitted").exists())
    assert "opsd.trainer.evaluate" in (tmp_path / "submitted").read_text()
    assert steps(run.checkpoints) == [5]
    assert list(run.checkpoints.glob("*/awaiting-evaluation"))
