"""What preflight says about a run before it starts: predictions, and mistakes in its configuration and batch script."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from opsd.preflight.base import Context, Demand, Verdict
from opsd.preflight.checks import run_steps
from opsd.preflight.checks.run_config import Setting, findings, seconds_of
from opsd.preflight.checks.run_steps import MemoryUse
from opsd.preflight.training import demand_of, predict
from opsd.settings.sections import PreflightSettings

pytest.importorskip("numpy")

from opsd.trainer.config import Config, load
from opsd.trainer.counts import parameters

GOOD = """#!/bin/bash
#SBATCH -N 50 --no-kill  # with two spares
#SBATCH --requeue
#SBATCH --signal=USR1@300
#SBATCH --open-mode=append
"""


def config(*overrides: str, preset: str = "smollm3-3b") -> Config:
    layout = ["parallel.tp=2"] if preset == "smollm3-3b" else []
    return load(preset, ["data.shards=/data", *layout, *overrides], environ={})


def said(*overrides: str, ranks: int = 384, **fields: Any) -> str:
    """All findings as one text, each with its verdict."""
    run = config('evaluation.perplexity={web = "/data/web.txt"}', *overrides)
    setting = Setting(run, predict(run, ranks), **{"nodes": 48, "script": GOOD, **fields})
    return "\n".join(f"{finding.verdict}: {finding.summary}; {finding.advice}" for finding in findings(setting))


def test_smollm3_is_predicted_as_it_went() -> None:
    """3.075 B parameters, 11 T tokens, 13.5k tokens a second and GPU, four weeks, an interruption every few days."""
    plan = predict(config(), 384)
    assert plan.parameters == pytest.approx(3.075e9, rel=0.001)
    assert plan.tokens == pytest.approx(11.1e12, rel=0.01)
    assert plan.tokens_per_s is not None
    assert plan.tokens_per_s / 384 == pytest.approx(13_500, rel=0.1)
    assert plan.train_s is not None
    assert 20 < plan.train_s / 86_400 < 30
    assert plan.stops is not None
    assert 3 < plan.stops < 10
    assert plan.checkpoint == pytest.approx(37e9, rel=0.01)


@pytest.mark.parametrize("changes", [(), ("model.tied=false",), ("model.qk_norm=true",), ("model.kv_heads=4",)])
def test_parameters_are_those_of_the_model(changes: tuple[str, ...]) -> None:
    """The formula agrees with the decoder that is trained."""
    torch = pytest.importorskip("torch")
    from opsd.trainer import model as trained

    run = config(*changes, preset="tiny")
    with torch.device("meta"):
        decoder = trained.Decoder(run.model)
    count = sum(parameter.numel() for parameter in decoder.parameters())
    assert parameters(run.model) == count


def test_a_good_run_is_left_alone() -> None:
    """Nothing is found where nothing is wrong."""
    assert said("checkpoint.every=2000") == ""


@pytest.mark.parametrize(
    ("overrides", "fields", "text"),
    [
        (["checkpoint.every=50000"], {}, "warn: a checkpoint every"),
        (["run.steps=1000"], {}, "fail: the warm-up of 2000 steps is longer than the run of 1000"),
        (["run.steps=9000000"], {}, "fail: the learning rate is 0 from step 4720000 on"),
        (["run.steps=4500000"], {}, "warn: the learning rate decays until step 4720000"),
        (["checkpoint.every=4720000"], {}, "fail: checkpoint.every 4720000 is not reached"),
        ([], {"free": 100e9}, "fail: 4 checkpoints need 148 GB, and 100 GB are free"),
        (["run.device=cuda", "metrics.peak_flops=0"], {}, "warn: metrics.peak_flops is not set"),
        (["parallel.tp=1"], {}, "predicted: data.batch 576 is not a multiple of 384 groups x micro-batch 3"),
        (["evaluation.perplexity={}"], {}, "warn: no checkpoint is evaluated"),
        ([], {"script": None}, "warn: no batch script was given"),
        ([], {"script": GOOD.replace("#SBATCH --requeue\n", "")}, "fail: the batch script has no --requeue"),
        ([], {"script": GOOD.replace("--signal=USR1@300", "")}, "fail: the batch script asks for no signal"),
        ([], {"script": GOOD.replace("append", "truncate")}, "warn: a requeued job overwrites its log"),
        ([], {"script": GOOD.replace("--no-kill", "-J x")}, "fail: the batch script has no --no-kill"),
        ([], {"script": GOOD.replace("50", "48")}, "warn: the job has 48 nodes and the run needs 48"),
        ([], {"script": GOOD + "#SBATCH --time=2-00:00:00\n"}, "the job will be requeued about"),
    ],
)
def test_each_mistake_is_found(overrides: list[str], fields: dict[str, Any], text: str) -> None:
    """With what it means and what to do about it."""
    assert text in said(*overrides, **fields)


def test_one_node_needs_neither_spares_nor_a_script() -> None:
    """What only many nodes need is not asked of one."""
    assert said("checkpoint.every=300", ranks=8, nodes=1, script=None) == ""


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 1800), ("10:30", 630), ("2:00:00", 7200), ("1-12", 129_600), ("1-12:30", 131_400), ("UNLIMITED", None)],
)
def test_time_limits_are_read_as_slurm_writes_them(text: str, seconds: float | None) -> None:
    """Minutes stand alone, with days they are hours."""
    assert seconds_of(text) == seconds


def test_verdicts_fail_what_would_lose_work() -> None:
    """A missing requeue is no matter of taste."""
    run = config()
    found = findings(Setting(run, predict(run, 384), 48, script="#!/bin/bash\n"))
    assert {finding.verdict for finding in found} >= {Verdict.FAIL, Verdict.WARN}


def test_an_interval_in_minutes_or_from_failures_is_judged_like_one_in_steps() -> None:
    """A checkpoint every ten hours costs more than it need, one that follows from the failures does not."""
    every = "checkpoint.every=0"
    assert "set checkpoint.minutes to about 16" in said(every, "checkpoint.minutes=600")
    assert predict(config(every, "checkpoint.minutes=10"), 384).interval_s == 600.0
    assert "checkpoint" not in said(every, "checkpoint.mttf_hours=120")


def memory_use(taken: float, share: float | None) -> MemoryUse:
    seen = MemoryUse(list)
    seen.taken, seen.share = taken, share
    return seen


def test_memory_that_was_not_predicted_is_a_warning() -> None:
    """On a GPU; on a processor the libraries count as well, of which nothing is known."""
    [found] = run_steps.too_much(memory_use(60e9, 0.75), 40e9)
    assert found.summary == "a GPU took 60 GB where 40 GB were predicted"
    assert [*run_steps.too_much(memory_use(45e9, 0.6), 40e9)] == []
    assert [*run_steps.too_much(memory_use(600e6, None), 1e6)] == []


def test_what_the_ranks_tell_of_each_other_fails_the_drill() -> None:
    """Equal seeds of tensor-parallel ranks train a smaller model, and nobody sees it in the loss."""
    events = [
        {"event": "generation_started"},
        {"event": "tp_shards_equal", "tensors": ["layers.0.wq"], "ranks": [0, 1]},
        {"event": "replicas_differ", "tensor": "norm", "ranks": [1, 3], "step": 10},
        {"event": "replay_differs", "ranks": [2], "step": 12},
    ]
    seeds, replicas, replay = run_steps.of_ranks(events)
    assert seeds.summary == "ranks 0, 1 began with the same random numbers in different shards (layers.0.wq)"
    assert replicas.summary == "ranks 1, 3 should hold the same norm and do not, at step 10"
    assert replay.summary == "ranks 2 got other bits when they computed a micro-batch again, at step 12"


@pytest.mark.parametrize(("seconds", "verdict"), [(10.0, []), (200.0, [Verdict.WARN]), (700.0, [Verdict.FAIL])])
def test_a_checkpoint_must_be_durable_before_the_next(seconds: float, verdict: list[Verdict]) -> None:
    """One is due every ten minutes."""
    run = config("checkpoint.every=0", "checkpoint.minutes=10")
    assert [found.verdict for found in run_steps.too_slow(37_000_000_000, seconds, run, 384)] == verdict


def test_storage_is_judged_by_what_the_run_needs() -> None:
    """A node's share of the tokens and of the checkpoint; without a run, what the configuration says."""
    configured = Demand(tokens_per_s=5.0, checkpoint_bytes=7.0)
    known = Context(
        "n1", "quick", 1.0, settings=PreflightSettings(gpus=8), demand=configured, train="smollm3-3b", nodes=48
    )
    wanted = demand_of(replace(known, overrides=("data.shards=/data", "parallel.tp=2")))
    assert wanted.tokens_per_s == pytest.approx(8 * 13_500, rel=0.1)
    assert wanted.checkpoint_bytes == pytest.approx(37e9 / 48, rel=0.01)
    assert demand_of(replace(known, train="")) == configured
    assert demand_of(replace(known, overrides=("no.such=1",))) == configured
