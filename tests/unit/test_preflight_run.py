"""What preflight says about a run before it starts, and `opsd preflight drill`."""

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
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from opsd.commands.preflight import preflight
from opsd.commands.settings import BadConfig
from opsd.preflight.base import Interrupted, Outcome
from opsd.preflight.drill import VICTIM, Drill, lead, take_part
from opsd.trainer.config import Config, load
from opsd.trainer.counts import parameters
from tests.fakes.clock import eventually

# What preflight says about a run before it starts: predictions, and mistakes in its configuration and batch script.


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


# `opsd preflight drill`: what is started on each node.


LAUNCHER = """
import os, pathlib, socket, sys
folder, lines = pathlib.Path(sys.argv[1]), sys.argv[2:]
with (folder / "events.jsonl").open("a") as file:
    file.writelines(line + "\\n" for line in lines)
control = pathlib.Path(os.environ["OPSD_SHM"], "preflight-drill", "control.sock")
control.parent.mkdir()
os.chdir(control.parent)  # its whole path may be longer than that of a socket
with socket.socket(socket.AF_UNIX) as server:
    server.bind("draft")
    server.listen()
    os.rename("draft", control)
    connection, _ = server.accept()
    with connection:
        (folder / "asked").write_bytes(connection.makefile("rb").readline())
        connection.sendall(b'{"ok": true}\\n')
"""


@dataclass(frozen=True)
class FakeLauncher(Drill):
    """A drill whose launcher writes ``events`` and waits to be told to stop."""

    events: Sequence[dict[str, object]] = ()

    def command(self) -> list[str]:
        return [sys.executable, "-c", LAUNCHER, str(self.folder), *map(json.dumps, self.events)]

    def begun(self) -> bool:
        """Whether it can be told; waits for that."""
        return eventually((self.memory / "preflight-drill" / "control.sock").exists)


def drill(names: tuple[str, ...], spares: int, *overrides: str, ranks: int = 8) -> Drill:
    config = load("smollm3-3b", ["data.shards=/data", *overrides], environ={})
    context = Context(names[0], "drill", 0.0, train="smollm3-3b", overrides=overrides)
    return Drill(context, config, names, 0, spares, ranks, Path("/shared/drill"), Path("/dev/shm/x"), 29555)


def on_a_fake(tmp_path: Path, *events: dict[str, object]) -> FakeLauncher:
    this, folder, memory = drill(("n1", "n2"), 0), tmp_path / "drill", tmp_path / "memory"
    folder.mkdir()
    memory.mkdir()
    return FakeLauncher(this.context, this.config, this.names, 0, 0, 1, folder, memory, this.port, events)


def test_with_a_spare_it_has_to_take_the_place() -> None:
    """As many nodes train as before; all launchers know each other."""
    command = drill(("n1", "n2", "n3"), 1).command()
    assert {"--nnodes=2", "--spares=1", "--nodes=n[1-3]", "--node-name=n1"} <= {*command}


def test_without_a_spare_it_goes_on_with_one_node_fewer() -> None:
    """At the same global batch, which both numbers of nodes have to divide."""
    this = drill(("n1", "n2", "n3"), 0, "data.micro_batch=2")
    assert "--nnodes=2:3" in this.command()
    readers = [
        nodes * 8 // (this.config.parallel.tp * this.config.parallel.pp * this.config.parallel.cp) for nodes in (2, 3)
    ]
    assert all(this.batch() % (count * 2) == 0 for count in readers)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ((), "a node can be lost only where two train; there are 1, and 0 spares"),
        (("--hosts", "n[1-"), "brackets do not match"),
        (("--hosts", "n[1-2]", "--spares", "1"), "there are 2, and 1 spares"),
        (("--hosts", "n[1-3]", "--node", "3"), "node number 3 is not among the 3 nodes"),
        (("--hosts", "n[1-3]", "--node", "0"), "data.shards is not set"),
        (("--hosts", "n[1-3]", "--node", "0", "--train-set", "data.shards=/data"), "with --folder"),
    ],
)
def test_a_drill_that_makes_no_sense_is_refused(options: tuple[str, ...], sentence: str) -> None:
    """One sentence, before anything is started."""
    nowhere = dict.fromkeys(("OPSD_CONFIG", *(name for name in os.environ if name.startswith("SLURM"))))
    result = CliRunner().invoke(preflight, ["drill", "--train", "tiny", *options], env=nowhere, standalone_mode=False)
    assert isinstance(result.exception, BadConfig)
    assert sentence in result.exception.message


def test_a_folder_that_somebody_else_put_there_is_refused(tmp_path: Path) -> None:
    """Its name can be guessed, and this may be root."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "drill").symlink_to("elsewhere")
    options = ["--train", "tiny", "--train-set", "data.shards=/data", "--hosts", "n[1-2]", "--node", "0"]
    command = ["drill", *options, "--folder", str(tmp_path / "drill")]
    result = CliRunner().invoke(preflight, command, env={"OPSD_CONFIG": None}, standalone_mode=False)
    assert isinstance(result.exception, BadConfig)
    assert "was made by somebody else" in result.exception.message


@pytest.mark.parametrize(("node", "name"), [("0", "metrics.jsonl"), ("0", VICTIM), ("1", VICTIM)])
def test_a_folder_of_an_earlier_drill_is_refused(tmp_path: Path, node: str, name: str) -> None:
    """Its checkpoints and events would be taken for those of this one, and its victim would kill itself again."""
    (tmp_path / name).write_text("n2")
    options = ["--train", "tiny", "--train-set", "data.shards=/data", "--hosts", "n[1-2]", "--node", node]
    command = ["drill", *options, "--folder", str(tmp_path)]
    result = CliRunner().invoke(preflight, command, env={"OPSD_CONFIG": None}, standalone_mode=False)
    assert isinstance(result.exception, BadConfig)
    assert "holds an earlier drill; remove it" in result.exception.message


def judged(this: FakeLauncher) -> Outcome:
    return lead(this, 0.0, lambda: False, lambda _what: this.begun())


def test_a_drill_without_a_checkpoint_ends_the_run_on_all_nodes(tmp_path: Path) -> None:
    """The launcher is asked: killed, it would leave the others to train on without this node."""
    this = on_a_fake(tmp_path)
    [finding] = judged(this).findings
    assert (finding.verdict, "no checkpoint was durable" in finding.summary) == (Verdict.COULD_NOT_RUN, True)
    assert json.loads((this.folder / "asked").read_bytes()) == {"cmd": "stop"}


def test_a_drill_in_which_nobody_else_trains_loses_no_node(tmp_path: Path) -> None:
    """Two nodes may train as one where there is no spare."""
    this = on_a_fake(
        tmp_path, {"event": "generation_started", "nodes": ["n1"]}, {"event": "checkpoint_committed", "step": 1}
    )
    [finding] = judged(this).findings
    assert (finding.verdict, "only n1 trained" in finding.summary) == (Verdict.COULD_NOT_RUN, True)
    assert not (this.folder / VICTIM).exists()


def test_an_interrupted_drill_ends_the_run_on_all_nodes(tmp_path: Path) -> None:
    """As one that has failed."""
    this = on_a_fake(tmp_path)
    with pytest.raises(Interrupted):
        lead(this, 60.0, this.begun, lambda _what: None)
    assert (this.folder / "asked").exists()


def test_the_other_nodes_do_not_train_on_for_ever(tmp_path: Path) -> None:
    """A first node that is gone ends nothing."""
    this = on_a_fake(tmp_path)
    take_part(this, -1000.0, lambda: not this.begun())
    assert (this.folder / "asked").exists()


def test_what_was_lost_before_is_not_the_loss_that_counts(tmp_path: Path) -> None:
    """Only what happens after a node was chosen says anything."""
    before: list[dict[str, object]] = [
        {"event": "generation_started", "nodes": ["n1", "n2"]},
        {"event": "node_lost", "t": 1.0, "silent_s": 0.1},
        {"event": "resumed", "t": 2.0, "step": 1, "lost_steps": 0},
        {"event": "checkpoint_committed"},
    ]
    this = on_a_fake(tmp_path, *before)
    (this.folder / "metrics.jsonl").write_text('{"step": 100}\n')
    [finding] = judged(this).findings
    assert (finding.verdict, "after n2 was lost" in finding.summary) == (Verdict.FAIL, True)
