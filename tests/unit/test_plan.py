"""What a plan says: memory, FLOP, time, failures and spares, beside what others have published."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch.utils.flop_counter import FlopCounterMode

from opsd import exitcodes
from opsd.checkpoints.interval import daly
from opsd.commands.main import cli
from opsd.plan.forecast import HABITS, reliability, spares_for
from opsd.plan.hardware import FITTED, hardware_of
from opsd.plan.layout import Layout, in_flight, problem, schedules, stages_of
from opsd.plan.memory import half_bytes, kept_bytes, memory_of, state_products
from opsd.plan.plan import plan_for_days
from opsd.plan.search import curve, peak, search, step_time
from opsd.plan.source import tokens_of, with_settings
from opsd.trainer import counts
from opsd.trainer.config import PRESETS, Config, load
from opsd.trainer.counts import flops_per_token
from opsd.trainer.hf.config import settings_of
from opsd.trainer.model import Decoder
from opsd.trainer.model_settings import STATE_PRODUCTS, ModelSettings
from opsd.trainer.settings import Schedule
from tests.fakes.live_memory import activation_bytes, rank_of, state_bytes
from tests.fakes.plans import run_of
from tests.fakes.published import CONFIGS, FITS, RUNS, SIZES, SPEEDS, TIMES, Run, Speed, Time

# What a plan says beside layouts: failures, spares, deadlines, suggestions, and what it refuses.


H100 = hardware_of("h100")

KEYS = {
    "parameters", "active_parameters", "flops", "gpus", "days", "gpu_hours", "mfu", "memory_gib", "layout", "layouts",
    "checkpoint_interval_s", "spares", "ettr", "overheads",
}  # fmt: skip


def opsd(*words: str) -> Result:
    return CliRunner().invoke(cli, ["plan", *words])


def planned(*words: str) -> dict[str, Any]:
    result = opsd(*words, "--measured", "none", "--json", "-")
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ("11e12", r"days +36.\d: 35.\d of training; such runs budget 43 to 47\n"),
        ("1e12", r"days +3.3: 3.3 of training; such runs budget 3.9 to 4.2\n"),
        ("1e11", r"time +7 h \d+ min: 7 h \d+ min of training; such runs budget 9 h \d+ min to 10 h \d+ min\n"),
    ],
)
def test_times_of_short_runs_are_in_hours(tokens: str, expected: str) -> None:
    """A run of hours has a budget of hours, not of 0 to 0 days; its overheads too."""
    text = opsd("smollm3-3b", "--gpus", "256", "--tokens", tokens, "--measured", "none").output
    assert re.search(expected, text), text
    assert ("0.00 days" in text) == (tokens != "1e11")


def test_smollm3_is_planned_as_it_went() -> None:
    """384 H100, 11 T tokens, about 30 % MFU, 24 days: MFU within 15 %, days within 20 %."""
    plan = planned("smollm3-3b", "--gpus", "384", "--tokens", "11e12")
    assert plan.keys() >= KEYS
    assert plan["mfu"] == pytest.approx(0.30, rel=0.15)
    assert plan["days"] == pytest.approx(24, rel=0.20)
    assert plan["gpu_hours"] == pytest.approx(384 * 24 * plan["days"])
    assert sum(plan["memory_gib"].values()) == pytest.approx(plan["memory_total_gib"])
    assert all(sum(each["memory_parts_gib"].values()) == pytest.approx(each["memory_gib"]) for each in plan["layouts"])
    assert plan["activations_gib"][plan["layout"]["recompute"]] == plan["memory_gib"]["activations"]
    assert sum(plan["step"].values()) == pytest.approx(plan["step_s"])
    assert plan["training_days"] == pytest.approx(plan["days"] * (1 - sum(plan["overheads"].values())))
    assert all(figure["source"] for figure in plan["figures"].values())


def test_a_given_figure_is_marked() -> None:
    """And the network's bandwidth counts where it is what GPUs wait for."""
    slow = planned("smollm3-3b", "--gpus", "384", "--assume", "nvlink=1e9", "--assume", "network=1e9")
    assert slow["figures"]["network"] == {
        "value": 1e9, "unit": "bytes/s per GPU", "source": "given with --assume", "measured": False,
        "file": "", "date": "",
    }  # fmt: skip
    assert slow["days"] > 2 * planned("smollm3-3b", "--gpus", "384")["days"]


def test_what_is_above_the_time_of_training_has_names() -> None:
    """In shares of the wall clock and in days; what a budget has beyond them is the allowance."""
    plan = planned("smollm3-3b", "--gpus", "384", "--assume", "evaluation=0.1", "--assume", "data=0.02")
    assert {"failures", "checkpoints", "evaluation", "data", "restarts", "maintenance"} <= plan["overheads"].keys()
    assert sum(plan["overhead_days"].values()) == pytest.approx(plan["days"] - plan["training_days"])
    assert plan["overhead_days"]["evaluation"] == pytest.approx(0.1 * plan["training_days"])
    assert plan["budget_days"] == [
        pytest.approx(1.2 * plan["training_days"]),
        pytest.approx(1.3 * plan["training_days"]),
    ]


def test_the_curve_ends_where_more_gpus_gain_nothing() -> None:
    """With a network of a hundredth the next number is slower, and the part that waits for it is to blame."""
    run, slow = run_of("smollm3-3b"), replace(H100, network=H100.network._replace(value=4e8))
    points = list(curve(run, 192, slow))
    found = peak(points)
    assert found.slower == points[-1].gpus and found.gpus == points[-2].gpus
    assert points[-1].tokens_per_s < points[-2].tokens_per_s == max(point.tokens_per_s for point in points)
    assert found.blame == "sharding"
    first, last = points[0], points[-1]
    proportional = first.tokens_per_s / first.gpus * last.gpus
    assert 1 - sum(last.lost(first).values()) == pytest.approx(last.tokens_per_s / proportional)


def test_money_is_the_price_of_the_configuration(tmp_path: Path) -> None:
    """GPU-hours times cost.gpu_hour; nothing without one."""
    file = tmp_path / "opsd.toml"
    file.write_text("[cost]\ngpu_hour = 2.5\n", encoding="utf-8")
    plan = planned("tiny", "--gpus", "8", "--config", str(file))
    assert plan["cost"]["total"] == pytest.approx(2.5 * plan["gpu_hours"])


def test_a_deadline_is_met_by_the_fewest_nodes() -> None:
    """One node less does not do it, or its GPUs do not divide the batch."""
    run = run_of("smollm3-3b")
    plan = plan_for_days(run, "h100", 60, tokens_of(run), H100, HABITS)
    assert plan.days <= 60
    fewer = opsd("smollm3-3b", "--gpus", str(plan.gpus - 8), "--json", "-")
    assert fewer.exit_code == exitcodes.FAILED or json.loads(fewer.stdout)["days"] > 60


@pytest.mark.parametrize(("nodes", "spares", "within"), [(48, 7, 1), (1000, 60, 10)])
def test_spares_are_those_of_the_trace(nodes: int, spares: int, within: int) -> None:
    """For 99 % of the time: what 200 days of 400 nodes (StepFun, InfiniteHBD) have needed."""
    assert abs(spares_for(nodes, 0.99, HABITS) - spares) <= within


def test_llama_3_lost_what_it_says() -> None:
    """16,384 GPUs for 54 days: 419 interruptions; with restarts of minutes more than 90 % of the time is effective."""
    found = reliability(54 * 86_400.0, 4e12, 16_384, 8, HABITS)
    assert found.failures == pytest.approx(419, rel=0.05)
    assert 0.9 < found.ettr < 1


def test_the_interval_is_the_best() -> None:
    """Half as long and twice as long both cost more, in saves and in lost work."""
    best = daly(1.0, 10_000.0)

    def cost(interval: float) -> float:
        return 1.0 / interval + interval / 2 / 10_000.0

    assert cost(best) < min(cost(best / 2), cost(best * 2))


def test_a_window_is_as_long_as_it_is() -> None:
    """Layers with a window cost their window."""
    run = run_of("tiny", "model.window=64", "model.nope_every=0")
    whole = run_of("tiny", "model.nope_every=0")
    difference = flops_per_token(whole.model, 256) - flops_per_token(run.model, 256)
    assert difference == 12 * 4 * 128 * (256 - 64)


def test_less_is_kept_where_more_is_computed_again() -> None:
    """Memory falls and time grows from none to selective to full."""
    run = run_of("llama-3-8b", "data.batch=64")
    layouts = [Layout(recompute=kind) for kind in ("none", "selective", "full")]
    memory = [memory_of(run, layout, 64).activations for layout in layouts]
    times = [step_time(run, layout, 64, H100).total for layout in layouts]
    assert memory == sorted(memory, reverse=True)
    assert times == sorted(times)


def test_gradients_that_add_up_unsharded_count() -> None:
    """With two micro-batches FSDP keeps whole gradients in float32: 30 GiB of 8 billion parameters."""
    run = run_of("llama-3-8b", "data.batch=128")
    one, two = (memory_of(run, Layout(micro_batch=size), 64).gathered for size in (2, 1))
    assert one < 8e9 < 4 * 8e9 < two


def test_what_does_not_run_has_a_reason() -> None:
    """Every layout is either ranked, from the fastest on, or out with a sentence."""
    found = search(run_of("llama-3-70b", "data.batch=512"), 64, H100)
    times = [each.step.total for each in found.fitting]
    assert times == sorted(times)
    assert all(each.reason for each in found.out)
    assert all(each.memory.total <= H100.memory.value for each in found.fitting)
    assert "memory" in found.reasons


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["smollm3-3b", "--gpus", "8", "--days", "3"], exitcodes.USAGE, "give one of them"),
        (["smollm"], exitcodes.USAGE, "did you mean smollm3-3b?"),
        (["smollm3-3b", "--gpus", "7"], exitcodes.FAILED, "take another number of them"),
        (["smollm3-3b", "--days", "0.1"], exitcodes.FAILED, "allow more days"),
        (["smollm3-3b", "--gpus", "384", "--write"], exitcodes.USAGE, "copy the run into one"),
        (["smollm3-3b", "--assume", "speed=1"], exitcodes.USAGE, "expected NAME=VALUE"),
        (["smollm3-3b", "--assume", "outages=0"], exitcodes.USAGE, "can be 0"),
        (["smollm3-3b", "--measured", "/nowhere"], exitcodes.USAGE, "/nowhere cannot be read"),
        (["config.json", "--gpus", "8"], exitcodes.USAGE, "add --tokens"),
        (["config.json", "--gpus", "8", "--tokens", "1e12"], exitcodes.FAILED, "take more GPUs, or larger ones"),
        (["other.json", "--gpus", "8", "--tokens", "1e12"], exitcodes.USAGE, "these can be used: llama"),
        (["typed.json", "--gpus", "8", "--tokens", "1e12"], exitcodes.USAGE, "num_hidden_layers '32'"),
        (["smollm3-3b", "--tokens", "1e300"], exitcodes.USAGE, "not in the range"),
        (["smollm3-3b", "--tokens", "1"], exitcodes.USAGE, "a step has 2,359,296 tokens"),
        (["smollm3-3b", "--days", "1e12"], exitcodes.USAGE, "not in the range"),
        (["smollm3-3b", "--assume", "node_gpus=0.5"], exitcodes.USAGE, "no such GPUs"),
        (["smollm3-3b", "--assume", "gemm=7"], exitcodes.USAGE, "no such share of peak"),
        (["smollm3-3b", "--assume", "loop=1e-9"], exitcodes.USAGE, "no such share"),
        (["smollm3-3b", "--gpus", "8", "--assume", "failures=1e9"], exitcodes.FAILED, "most to restarts"),
        (["missing.json", "--tokens", "1e12"], exitcodes.USAGE, "No such file or directory"),
        (["deep.json", "--tokens", "1e12"], exitcodes.USAGE, "nested too deeply"),
        (["silent.json", "--tokens", "1e12"], exitcodes.USAGE, "a pipe into which nobody writes"),
    ],
)
def test_what_cannot_be_planned_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, said: str
) -> None:
    """With what to change."""
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(CONFIGS["llama-3-405b"]), encoding="utf-8")
    Path("typed.json").write_text(json.dumps(CONFIGS["llama-3-8b"] | {"num_hidden_layers": "32"}), encoding="utf-8")
    Path("other.json").write_text('{"model_type": "gpt2"}', encoding="utf-8")
    Path("deep.json").write_text("[" * 200_000, encoding="utf-8")
    os.mkfifo("silent.json")
    result = subprocess.run([sys.executable, "-m", "opsd", "plan", *words], capture_output=True, text=True, check=False)
    last = result.stderr.strip().splitlines()[-1]
    assert (result.returncode, last.startswith("opsd: "), said in last) == (code, True, True), result.stderr


def test_a_plan_needs_neither_torch_nor_numpy() -> None:
    """It is made on a login node or a laptop, where only the core is installed."""
    program = (
        "import sys; sys.modules.update(torch=None, numpy=None); from opsd.commands.plan import plan; "
        "plan(['smollm3-3b', '--gpus', '384'], standalone_mode=False)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


def test_settings_are_changed_in_place() -> None:
    """A value keeps its comment, a new key goes to the end of its section, a new section to the end of the file."""
    text = "# a run\n[data]\nmicro_batch = 3 # as published\n\n[model]\nlayers = 2\n"
    changed = with_settings(text, {"data.micro_batch": 4, "data.batch": 8, "parallel.recompute": "full"})
    assert changed == (
        "# a run\n[data]\nmicro_batch = 4 # as published\nbatch = 8\n\n[model]\nlayers = 2\n\n"
        '[parallel]\nrecompute = "full"\n'
    )
    with pytest.raises(ValueError, match="line by line"):
        with_settings("data = {micro_batch = 3}\n", {"data.micro_batch": 4})


def test_layers_with_a_state_cost_no_more_in_longer_sequences() -> None:
    """Their time and memory grow with the tokens; context parallelism, which they do not have, is out."""
    model = ("model.dtype=bfloat16", "model.pattern=['mamba','delta']", "data.batch=64", "parallel.compile=false")
    short, long = (run_of("tiny-hybrid", *model, f"data.sequence={length}") for length in (4096, 8192))
    once, twice = (step_time(run, Layout(), 8, H100) for run in (short, long))
    assert 0 < once.states == pytest.approx(twice.states / 2)
    assert memory_of(long, Layout(), 8).activations == pytest.approx(2 * memory_of(short, Layout(), 8).activations)
    found = search(long, 8, H100)
    assert not any(each.layout.cp > 1 for each in found.fitting)
    assert any("have a state" in each.reason for each in found.out)


def test_attention_in_chunks_costs_what_documents_of_their_length_do() -> None:
    """However long the sequence."""
    chunks = run_of("tiny", "model.pattern=['chunk']", "model.chunk=1024", "data.sequence=8192")
    whole = run_of("tiny", "model.pattern=['global']", "data.sequence=1024")
    one, other = (step_time(run, Layout(), 8, H100).attention / run.data.sequence for run in (chunks, whole))
    assert 0 < one == pytest.approx(other)


@pytest.mark.parametrize(("schedule", "parts", "share"), [
    ("1f1b", 1, 1.0), ("interleaved", 3, 1 / 3), ("zero-bubble", 1, 1 / 3), ("zero-bubble", 3, 1 / 9),
])  # fmt: skip
def test_a_schedule_has_its_bubble(schedule: Schedule, parts: int, share: float) -> None:
    """Several stages per rank divide it, and gradients of weights fill two thirds of it."""
    run, plain = run_of("smollm3-3b", "model.vocab=64"), Layout(pp=4)
    layout = replace(plain, schedule=schedule, stages_per_rank=parts)
    bubble, before = (step_time(run, each, 96, H100).bubble for each in (layout, plain))
    assert bubble == pytest.approx(share * before, rel=0.01)
    more = memory_of(run, layout, 96).activations > memory_of(run, plain, 96).activations
    assert more == (parts > 1)


def test_micro_batches_in_flight_are_no_more_than_there_are() -> None:
    """With several stages per rank the first has most ahead: 2 (pp - 1) + (v - 1) pp + 1 steps, each of 1 / v."""
    layout = Layout(pp=4, schedule="interleaved", stages_per_rank=2)
    assert [in_flight(layout, rank, 64) for rank in range(4)] == [5.5, 4.5, 3.5, 2.5]
    assert in_flight(layout, 0, 4) == 4
    assert [in_flight(Layout(pp=4), rank, 64) for rank in range(4)] == [4, 3, 2, 1]


def test_a_step_takes_as_long_as_its_slowest_stage() -> None:
    """Five stages of seven layers: two of them have two layers, and all wait for these."""
    run = run_of("smollm3-3b", "model.layers=7", "model.vocab=64", "data.batch=640")
    stages = stages_of(run, Layout(pp=5))
    assert sorted(map(len, stages.ranks)) == [1, 1, 1, 2, 2]
    assert stages.slowest == stages.longest == pytest.approx(2 / 7, rel=0.01)
    even, uneven = (step_time(run, Layout(pp=size), 20 * size, H100) for size in (7, 5))
    assert uneven.products == pytest.approx(2 * even.products, rel=0.01)


def test_zero_bubble_is_searched_if_the_file_has_it() -> None:
    """And several stages per rank otherwise, where they divide the layers nearly evenly."""
    run = run_of("llama-3-405b")
    zero = run_of("llama-3-405b", "parallel.pp=2", "parallel.schedule=zero-bubble")
    spread = Layout(tp=8, pp=16)
    assert [(each.schedule, each.stages_per_rank) for each in schedules(run, spread)] == [
        ("1f1b", 1), ("interleaved", 2), ("interleaved", 4),
    ]  # fmt: skip
    assert {each.schedule for each in schedules(zero, spread)} == {"zero-bubble"}
    assert list(schedules(run, Layout(tp=8))) == [Layout(tp=8)]


def test_experts_that_leave_the_nvlink_domain_are_named() -> None:
    """TP x EP of the plan beside the GPUs of a domain, which --assume makes larger."""
    words = ("smollm3-3b", "--gpus", "8", "--measured", "none", "--tokens", "1e11")
    assert "of the 8 GPUs of a domain" in opsd(*words).output
    assert planned(*words[:3], "--assume", "nvlink_gpus=72")["nvlink"]["gpus"] == 72


def test_a_plan_is_of_one_shape() -> None:
    """Stages that change sequences are planned one by one, and the refusal says how."""
    stages = "data.stages=[{start = 1}, {start = 5, sequence = 8192}]"
    refused = opsd("smollm3-3b", "--gpus", "64", "--set", stages)
    assert refused.exit_code == exitcodes.USAGE
    assert "--set data.stages=[]" in refused.output


def test_a_kind_of_gpu_is_known_in_any_case() -> None:
    """As NVIDIA writes it, too."""
    assert planned("smollm3-3b", "--gpus", "384", "--gpu", "A100") == planned(
        "smollm3-3b", "--gpus", "384", "--gpu", "a100"
    )


# The FLOP of a plan: the trainer's own count, and what torch counts of a step.


LENGTH = 256


def counted(model: ModelSettings) -> dict[str, float]:
    """FLOP per token of a sequence, forward and backward, by torch's operation; fused attention is none of them."""
    torch.set_num_threads(1)
    decoder = Decoder(model)
    decoder.routing.begin(1, torch.device("cpu"))
    tokens = torch.randint(0, model.vocab, (1, LENGTH))
    with FlopCounterMode(display=False) as counter:
        decoder(tokens, torch.zeros(1, LENGTH, dtype=torch.int32), tokens).sum().backward()
    return {str(name): flops / LENGTH for name, flops in counter.get_flop_counts()["Global"].items()}


@pytest.mark.parametrize("preset", sorted(path.stem for path in PRESETS.glob("*.toml")))
def test_a_plan_has_the_trainers_count(preset: str) -> None:
    """Which is the numerator of MFU, for every preset."""
    result = CliRunner().invoke(cli, ["plan", preset, "--gpus", "8", "--measured", "none", "--json", "-"])
    assert result.exit_code == 0, result.output
    config = load(preset, ["data.shards=/data"], environ={})
    assert json.loads(result.stdout)["flops_per_token"] == counts.flops_per_token(config.model, config.data.sequence)


@pytest.mark.parametrize("preset", ["tiny", "tiny-moe", "tiny-mla", "tiny-hybrid"])
def test_the_products_are_those_of_a_step(preset: str) -> None:
    """6 FLOP for each parameter that a token meets, which are nearly all in matrices: within 1 %."""
    model = load(preset, ["data.shards=/data", "model.document_mask=false"], environ={}).model
    assert counted(model)["aten.mm"] == pytest.approx(6 * counts.active_parameters(model), rel=0.01)


def test_the_products_with_states_are_those_of_a_step() -> None:
    """In chunks, forward and backward: within 10 %, because torch counts no triangular system."""
    model = load("tiny-hybrid", ["data.shards=/data", "model.document_mask=false"], environ={}).model
    products = sum(state_products(model, kind) for kind in model.kinds if kind in STATE_PRODUCTS)
    assert counted(model)["aten.bmm"] == pytest.approx(3 * products, rel=0.1)


# The memory of a plan against what torch holds: exact for the state, within 5 % for activations.


torch.set_num_threads(1)  # threads cost more than they bring for matrices this small

LAYOUTS = [
    ("tiny", 1, ()),
    ("tiny", 4, ()),
    ("tiny", 4, ("parallel.tp=2",)),
    ("tiny", 8, ("parallel.tp=2", "parallel.replicas=2")),
    ("tiny", 4, ("parallel.cp=2",)),
    ("tiny-moe", 4, ("parallel.tp=2",)),
    ("tiny-mla", 4, ("parallel.tp=2",)),
    ("tiny-hybrid", 1, ()),
    ("tiny-hybrid", 4, ("parallel.tp=2",)),
]

FUSED = {"tiny": (), "tiny-moe": (), "tiny-hybrid": (), "tiny-mla": ("model.value_dim=48",)}
"""The CPU has a fused kernel of attention only for values as large as keys."""


def config(preset: str, *overrides: str) -> Config:
    return load(preset, ["data.shards=/data", "run.device=cpu", "model.document_mask=false", *overrides], environ={})


@pytest.mark.parametrize(("preset", "ranks", "overrides"), LAYOUTS)
def test_the_state_is_what_a_rank_holds(preset: str, ranks: int, overrides: tuple[str, ...]) -> None:
    """Weights and moments, to the byte; gradients are as large as weights."""
    run = config(preset, *overrides)
    predicted = memory_of(run, Layout.of(run), ranks)
    with rank_of(run, ranks) as (model, _):
        held = state_bytes(model, run)
    assert {"weights": predicted.weights, "optimizer": predicted.optimizer} == held
    assert predicted.gradients == predicted.weights


@pytest.mark.parametrize("overrides", [("parallel.pp=2",), ("optimizer.kind=muon",)])
def test_the_state_is_nearly_so_where_it_is_uneven(overrides: tuple[str, ...]) -> None:
    """Stages have different ends, and Muon leaves norms to AdamW: within 1 %."""
    run = config("tiny", *overrides)
    predicted = memory_of(run, Layout.of(run), 4)
    with rank_of(run, 4) as (model, _):
        held = state_bytes(model, run)
    assert predicted.weights == pytest.approx(held["weights"], rel=0.01)
    assert predicted.optimizer == pytest.approx(held["optimizer"], rel=0.01)


def of_cpu(run: Config, layout: Layout) -> int:
    """Bytes that the CPU's kernels keep and those of a GPU do not: of each norm also its result before the weight."""
    model, tokens = run.model, run.data.micro_batch * run.data.sequence
    if layout.tp > 1:
        return 0
    latents = (model.query_rank + model.kv_rank) * model.layers
    heads = model.kinds.count("delta") * model.state_value_width
    norms = 2 * model.layers * model.width + latents + heads if layout.recompute == "none" else 0
    return (model.width + norms) * tokens * half_bytes(model)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("preset", "ranks", "tp"), [
    ("tiny", 1, 1), ("tiny", 4, 2), ("tiny-moe", 1, 1), ("tiny-moe", 4, 2), ("tiny-mla", 1, 1),
    ("tiny-hybrid", 1, 1), ("tiny-hybrid", 4, 2),
])  # fmt: skip
def test_activations_are_what_a_pass_leaves(preset: str, ranks: int, tp: int, recompute: str) -> None:
    """Between the passes, with what the loss keeps for the gradients of its input and of the projection."""
    run = config(preset, f"parallel.tp={tp}", f"parallel.recompute={recompute}", *FUSED[preset])
    layout, model = Layout.of(run), run.model
    tokens = run.data.micro_batch * run.data.sequence
    loss = (tokens + model.vocab / tp) * model.width * half_bytes(model)
    rotation = 2 * 4 * model.head_channels * run.data.sequence
    with rank_of(run, ranks) as (decoder, _):
        held = activation_bytes(decoder, run)
    assert kept_bytes(run, layout, 1) + of_cpu(run, layout) + loss + rotation == pytest.approx(held, rel=0.05)


def test_only_the_first_stage_has_all_micro_batches_in_flight() -> None:
    """The second of two keeps more of each, with its experts, and one of them at a time."""
    run = config("tiny-moe", "parallel.pp=2", "model.layers=8", "model.dense_layers=4", "model.vocab=512")
    layout = Layout.of(run)
    one, two, many = (kept_bytes(run, layout, count) for count in (1, 2, 8))
    assert one < two == many < 1.9 * one


# A plan against what others have published of their runs, with the tolerances of ``tests/fakes/published.py``.


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_as_published(name: str) -> None:
    """All parameters, and those that a token meets."""
    size, model = SIZES[name], settings_of(CONFIGS[name])
    assert counts.parameters(model) == pytest.approx(size.total, rel=size.within)
    assert counts.active_parameters(model) == pytest.approx(size.active, rel=size.within)


@pytest.mark.parametrize("time", TIMES, ids=lambda time: time.config)
def test_gpu_hours_follow_from_the_published_mfu(time: Time) -> None:
    """FLOP over the rate: the hours that the run is known to have taken."""
    config = run_of(time.config, f"data.sequence={time.sequence}")
    flops = time.tokens * counts.flops_per_token(config.model, time.sequence)
    hours = flops / (time.mfu * hardware_of("h100").peak.value) / 3600
    assert hours == pytest.approx(time.gpu_hours, rel=time.within)


def predicted(speed: Speed) -> float:
    """Tokens/s of a GPU."""
    config: Config = run_of(speed.config, *speed.settings)
    layout = Layout.of(config)
    assert problem(config, layout, speed.gpus) is None
    hardware = hardware_of(speed.gpu)
    given = {name: hardware.figures()[name]._replace(value=value) for name, value in speed.given.items()}
    step = step_time(config, layout, speed.gpus, hardware.given(given))
    return config.data.batch * config.data.sequence / step.total / speed.gpus


@pytest.mark.parametrize("speed", SPEEDS, ids=lambda speed: f"{speed.config}-{speed.gpus}-{speed.gpu}")
def test_speeds_are_predicted(speed: Speed) -> None:
    """In layouts that the model was not fitted to."""
    assert predicted(speed) == pytest.approx(speed.tokens_per_s, rel=speed.within)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.config}-{run.gpus}")
def test_runs_of_other_trainers_are_predicted(run: Run) -> None:
    """Pipelines and tensor parallelism from 22 B to 1 T, with errors that do not grow with the model."""
    config, hardware = run_of(run.config, *run.settings), hardware_of(run.gpu)
    step = step_time(config, Layout.of(config), run.gpus, hardware)
    tokens = config.data.batch * config.data.sequence / step.total / run.gpus
    mfu = tokens * counts.flops_per_token(config.model, config.data.sequence) / hardware.peak.value
    assert mfu == pytest.approx(run.mfu, rel=run.within)


def test_llama_3_405b_runs_fastest_in_a_layout_like_its_own() -> None:
    """TP 8 x PP 16 with several stages per rank, at the 38 to 43 % that were reached (arXiv 2407.21783)."""
    config = run_of("llama-3-405b", "data.batch=2048")
    best = search(config, 16_384, hardware_of("h100")).fitting[0]
    assert (best.layout.tp, best.layout.pp, best.layout.schedule) == (8, 16, "interleaved")
    tokens = config.data.batch * config.data.sequence / best.step.total / 16_384
    assert 0.38 <= tokens * counts.flops_per_token(config.model, 8192) / 989.4e12 <= 0.43


@pytest.mark.parametrize("speed", FITS, ids=lambda speed: f"{speed.gpu}-{speed.tokens_per_s}")
def test_the_fit_is_that_of_its_source(speed: Speed) -> None:
    """Each fitted figure gives the speed that it was fitted to."""
    assert speed.gpu in FITTED
    assert predicted(speed) == pytest.approx(speed.tokens_per_s, rel=speed.within)
