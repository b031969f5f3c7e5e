"""Every layout trains the same model: the same initial bits, losses and gradient norms to rounding."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from click.testing import CliRunner
from replay_ranks import Fault, run_ranks
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_trainer_faults import kill_and_resume
from trainer_world import Run

from opsd.checkpoints.manifest import MANIFEST, checksum, folder_of, read
from opsd.checkpoints.sealed import CHECKSUM, seal
from opsd.commands.checkpoint import checkpoint
from opsd.rank_page import read_page
from opsd.trainer.config import load as load_config
from opsd.trainer.huggingface import export
from opsd.trainer.load import load
from opsd.trainer.model import Decoder
from opsd.trainer.regions import region_of

SHAPE: dict[str, object] = {
    "model.width": 32, "model.heads": 4, "model.kv_heads": 2, "model.ffn": 50, "model.vocab": 402,
    "optimizer.z_loss": 1e-4, "checkpoint.every": 100,
}  # fmt: skip

TOLERANCE = 1e-5
"""Relative, of losses and gradient norms between layouts in the first five steps, in float32; measured 4e-7."""

SPARSE: dict[str, object] = {
    "model__experts": 6, "model__experts_per_token": 2, "model__expert_ffn": 14, "model__shared_experts": 1,
    "model__dense_layers": 1, "model__layers": 4, "model__router": "sigmoid", "model__router_normalised": "true",
    "model__router_bias": "true", "optimizer__balance_loss": 0.01, "optimizer__router_z_loss": 1e-3,
    "optimizer__balance_rate": 0.01, "metrics__experts_every": 1,
}  # fmt: skip
HYBRID: dict[str, object] = {  # a sequence of more than a chunk, and no whole number of them
    "model__layers": 4, "model__pattern": '["mamba", "global", "delta", "delta"]', "model__state_heads": 4,
    "model__state_key_heads": 2, "model__state_key_dim": 6, "model__state_value_dim": 10,
    "model__state_conv_bias": "true", "data__sequence": 96,
}  # fmt: skip
LATENT: dict[str, object] = {
    "model__kv_heads": 4, "model__head_dim": 10, "model__kv_rank": 11, "model__query_rank": 13, "model__rope_dim": 4,
    "model__value_dim": 7, "model__qkv_bias": "true", "model__yarn_factor": 2.0, "model__yarn_positions": 16,
    "model__yarn_scores": 0.7,
}  # fmt: skip
MUON: dict[str, object] = {"optimizer__kind": "muon", "optimizer__embedding_decay": 0.1}
LAYERS: dict[str, object] = {"model__layers": 5, "model__nope_every": 3}
KINDS = {"plain": {}, "experts": SPARSE, "states": HYBRID, "latent": LATENT, "muon": MUON, "stages": LAYERS}

FIGURES = ("balance_loss", "router_z_loss", "router_entropy", "router_load")
"""What routers measure."""


def layout_of(name: str) -> dict[str, int]:
    """``dp2 ep2``: two ranks, which share experts."""
    return {part[:-1]: int(part[-1]) for part in name.split()}


LAYOUTS = {
    name: layout_of(name) for name in ("dp2", "tp2", "pp2", "cp2", "replicas2", "dp2 tp2", "pp2 tp2", "replicas2 cp2")
}
SPREAD = ("dp2 ep2", "dp4 ep2", "dp2 tp2 ep2", "dp2 cp2 ep2", "dp2 pp2 ep2", "dp2 replicas2 ep2")
"""Layouts with two ranks that share experts; of the second, each pair has two ranks that shard its experts unevenly."""
IN_LAYOUTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "plain": (tuple(LAYOUTS), ("none",)),
    "experts": ((*LAYOUTS, "dp2 cp2", *SPREAD), ("none", "selective", "full")),
    "states": (tuple(name for name in LAYOUTS if "cp" not in name), ("none", "selective")),
    "latent": ((*LAYOUTS, "dp2 cp2", "tp2 cp2"), ("none", "selective")),
    "muon": ((*LAYOUTS, "dp4"), ("none",)),
}
"""For each kind its layouts, and which activations are computed again."""


def start(folder: Path, shards: Path, layout: dict[str, int], **settings: object) -> Run:
    """A run in ``layout`` that has ended well."""
    run = Run(folder, shards, SHAPE | {f"parallel.{name}": n for name, n in layout.items() if name != "dp"})
    world = math.prod(size for name, size in layout.items() if name != "ep")
    codes = run.start(world=world, **settings).wait()
    assert codes == [0] * world, run.printed()
    assert not [event for kind in ("tp_shards_equal", "replicas_differ") for event in run.events(kind)]
    return run


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Callable[[str], Run]:
    """Five steps on one rank with the settings of a kind."""

    @cache
    def run(kind: str) -> Run:
        return start(tmp_path_factory.mktemp("alone"), shards, {}, **KINDS[kind], run__steps=5)

    return run


def weights(run: Run, step: int, more: Mapping[str, object] = MappingProxyType({})) -> dict[str, torch.Tensor]:
    """The whole parameters and moments in a checkpoint, from the files of all ranks; ``more`` settings as in start."""
    values = SHAPE | {name.replace("__", "."): value for name, value in more.items()} | {"data.shards": "x"}
    settings = load_config(str(run.folder / "config.toml"), [f"{k}={v}" for k, v in values.items()])
    model = Decoder(settings.model)
    state = {
        f"{kind}.{name}": region_of(torch.empty_like(value))
        for kind in ("model", "exp_avg", "exp_avg_sq")
        for name, value in model.named_parameters()
    } | {f"model.{name}": region_of(torch.empty_like(value)) for name, value in model.named_buffers()}
    folder = folder_of(run.checkpoints, step)
    load(folder, read(folder), state)
    return {name: region.local for name, region in state.items()}


def assert_same_curve(run: Run, other: Run) -> None:
    ours, theirs = run.curve(), other.curve()
    assert ours.keys() == theirs.keys()
    for step, point in ours.items():
        assert point == pytest.approx(theirs[step], rel=TOLERANCE), step


def assert_same_run(run: Run, alone: Run, kind: str = "plain") -> None:
    """After five steps the curve is the same, and so are parameters, moments and routing; of Muon the curve alone."""
    assert_same_curve(run, alone)
    if kind == "experts":
        for ours, theirs in zip(run.metrics(), alone.metrics(), strict=True):
            assert [ours[name] for name in FIGURES] == pytest.approx([theirs[name] for name in FIGURES], rel=1e-5)
        assert loads(run) == loads(alone)
    if kind != "muon":
        expected = weights(alone, 5, KINDS[kind])
        for tensor, value in weights(run, 5, KINDS[kind]).items():
            torch.testing.assert_close(value, expected[tensor], rtol=1e-2, atol=2e-4, msg=tensor)


def loads(run: Run) -> list[tuple[int, list[list[int]]]]:
    """The tokens of each layer's experts, by step."""
    lines = (run.folder / "experts.jsonl").read_text().splitlines()
    return [(line["step"], line["loads"]) for line in map(json.loads, lines)]


@pytest.mark.parametrize(
    ("kind", "name", "recompute"),
    [
        pytest.param(kind, name, recompute, marks=[pytest.mark.long] if kind != "plain" else [])
        for kind, (names, recomputed) in IN_LAYOUTS.items()
        for name in names
        for recompute in recomputed
    ],
)
def test_a_layout_changes_nothing(
    tmp_path: Path, shards: Path, alone: Callable[[str], Run], kind: str, name: str, recompute: str
) -> None:
    """Loss, gradient norm, routing and checkpoint are those of one rank, recomputed or not."""
    settings = KINDS[kind] | {"run__steps": 5, "parallel__recompute": recompute}
    assert_same_run(start(tmp_path, shards, layout_of(name), **settings), alone(kind), kind)


def test_initial_values_do_not_depend_on_the_layout(tmp_path: Path, shards: Path) -> None:
    """Split by tensor parallelism or into stages, the model begins with the same bits as whole."""
    settings = {"run__steps": 1, "optimizer__lr": 1e-300}  # a step too small to change a bit
    whole, *others = (
        weights(start(tmp_path / name, shards, LAYOUTS.get(name, {}), **settings), 1)
        for name in ("alone", "tp2", "pp2")
    )
    for other in others:
        for name, value in whole.items():
            if name.startswith("model."):
                assert torch.equal(value, other[name]), name


@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        ("plain", ("dp4", "dp2", "tp2", "pp2", "")),
        ("experts", ("dp2", "tp2", "dp2 ep2", "pp2", "")),
        ("states", ("dp2", "tp2", "pp2", "dp2 tp2", "")),
        ("latent", ("dp2", "tp2", "pp2", "cp2", "")),
        ("muon", ("dp2", "dp2 tp2", "pp2", "replicas2", "")),
    ],
)
def test_a_run_goes_on_in_any_other_layout(
    tmp_path: Path, shards: Path, alone: Callable[[str], Run], kind: str, layouts: tuple[str, ...]
) -> None:
    """A step in each: one run, whose losses, momentum and routing are those of one rank."""
    for step, name in enumerate(layouts, start=1):
        run = start(tmp_path, shards, layout_of(name), **KINDS[kind], run__steps=step)
    assert_same_run(run, alone(kind), kind)
    if kind == "experts":
        last = run.metrics()[-1]
        page = read_page(run.folder / "rank-0000.page")
        assert page.router == (last["router_load"], 6 / 2, last["router_entropy"], 0.0)
        moved = [value for name, value in weights(run, 5, SPARSE).items() if name.endswith("experts.bias")]
        assert len(moved) == 3
        assert all(value.abs().max() > 0 for value in moved)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("experts", {"parallel.ep": 2}),
        ("states", {"model.layers": 2, "model.pattern": '["mamba", "delta"]', "data.sequence": 32}),
        ("latent", {"model.heads": 4, "model.width": 32, "parallel.tp": 2, "model.vocab": 402}),
        ("muon", {}),
    ],
)
def test_killed_ranks_change_no_bit(tmp_path: Path, shards: Path, kind: str, changes: dict[str, object]) -> None:
    """Five times killed at random moments, they come to the same losses and the same routing."""
    settings = {name.replace("__", "."): value for name, value in KINDS[kind].items()} | changes
    whole, killed = (Run(tmp_path / name, shards, settings) for name in ("whole", "killed"))
    whole.finish()
    kill_and_resume(killed, 5, random.Random(1))
    assert killed.curve() == whole.curve()
    figures = FIGURES if kind == "experts" else ()
    expected = {line["step"]: [line[name] for name in figures] for line in whole.metrics()}
    assert {line["step"]: [line[name] for name in figures] for line in killed.metrics()} == expected


@pytest.mark.slow
def test_three_dimensions(tmp_path: Path, shards: Path, alone: Callable[[str], Run]) -> None:
    """DP 2 x TP 2 x PP 2 on eight ranks: five steps, the same numbers; then it goes on on one."""
    run = start(tmp_path, shards, {"dp": 2, "tp": 2, "pp": 2}, run__steps=4)
    assert read(folder_of(run.checkpoints, 4)).layout == {"dp": 2, "tp": 2, "pp": 2}
    assert_same_curve(start(tmp_path, shards, {}, run__steps=5), alone("plain"))


GROUPED: dict[str, object] = {
    "model__experts": 8, "model__experts_per_token": 3, "model__expert_ffn": 14, "model__shared_experts": 1,
    "model__router_groups": 4, "model__groups_per_token": 2, "model__router": "sigmoid",
    "model__router_bias": "true", "optimizer__balance_rate": 0.01, "run__steps": 4,
}  # fmt: skip
"""Experts of DeepSeek-V3."""
FEW: dict[str, object] = {"model__experts": 6, "model__experts_per_token": 2, "model__expert_ffn": 14, "run__steps": 4}
SWITCHES: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "untied, QK-norm, window, YaRN": (
        {
            "model__tied": "false", "model__qk_norm": "true", "model__window": 9, "model__yarn_factor": 2.0,
            "model__yarn_positions": 16,
        },
        ("pp2 tp2", "cp2"),
    ),
    "Gemma with biases": (
        {
            "model__norms": "both", "model__qkv_bias": "true", "model__output_bias": "true", "model__ffn_bias": "true",
            "model__activation": "gelu_tanh", "model__attention_softcap": 3.0, "model__logit_softcap": 5.0,
            "model__embedding_scale": 5.5, "model__head_dim": 12, "model__pattern": ["window", "global"],
            "model__window": 7, "model__window_theta": 100.0,
        },
        ("pp2 tp2", "replicas2 cp2"),
    ),
    "chunks beside no positions, as in Llama 4": (
        {"model__pattern": ["chunk", "nope"], "model__chunk": 9}, ("tp2", "pp2 tp2", "cp2"),
    ),
    "positions of chunks that begin anew with each document": (
        {"model__pattern": ["dual_chunk", "nope"], "model__dual_chunk": 9, "model__dual_chunk_local": 3},
        ("dp2", "tp2", "pp2"),
    ),
    "queries that are computed from the input, as in DeepSeek-V2-Lite": (
        LATENT | {"model__query_rank": 0, "model__norms": "after"}, ("tp2", "dp2 tp2"),
    ),
    "DeepSeek-V3": (LATENT | GROUPED, ("dp2 tp2 ep2",)),
    "states with Muon, gates and experts": (
        HYBRID | FEW | {
            "model__shared_experts": 1, "model__shared_gate": "true", "model__attention_gate": "true",
            "model__rope_dim": 4, "optimizer__kind": "muon",
        },
        ("dp2 tp2 ep2",),
    ),
    "experts with Muon": (MUON | FEW, ("dp4 ep2", "dp2 tp2 ep2", "dp2 replicas2 ep2", "dp2 pp2 ep2")),
}  # fmt: skip


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=[pytest.mark.long] if n > 1 else []) for n, name in enumerate(SWITCHES)]
)
def test_the_switches_of_a_model_train_alike(tmp_path: Path, shards: Path, model: str) -> None:
    """In layouts as on one rank."""
    switches, names = SWITCHES[model]
    switches = {"run__steps": 3} | switches
    whole = start(tmp_path / "alone", shards, {}, **switches)
    for name in names:
        assert_same_curve(start(tmp_path / name, shards, layout_of(name), **switches), whole)


@pytest.mark.long
@pytest.mark.parametrize("name", ["dp2 tp2", "pp2 tp2", "cp2"])
def test_learnt_positions(tmp_path: Path, shards: Path, name: str) -> None:
    """They train alike, and a run goes on in the layout that began on one rank."""
    switches = {"model__positions": 32, "model__pattern": ["nope"]}
    whole = start(tmp_path / "alone", shards, {}, **switches, run__steps=3)
    start(tmp_path / "split", shards, {}, **switches, run__steps=1)
    assert_same_curve(start(tmp_path / "split", shards, LAYOUTS[name], **switches, run__steps=3), whole)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputing_changes_nothing(tmp_path: Path, shards: Path, alone: Callable[[str], Run], recompute: str) -> None:
    """Activations that are computed again are the same bits."""
    run = start(tmp_path, shards, {}, run__steps=5, parallel__recompute=recompute)
    assert run.curve() == alone("plain").curve()


@pytest.mark.long
def test_compiling_changes_nothing(tmp_path: Path, shards: Path) -> None:
    """Compiled layers train like the others, recomputed ones included."""
    if not shutil.which("g++"):
        pytest.skip("compiling for the CPU needs a C++ compiler")
    small = {"model__layers": 1, "run__steps": 3, "run__deterministic": "false"}
    plain = start(tmp_path / "plain", shards, {}, **small)
    compiled = {"parallel__compile": "true", "parallel__recompute": "selective"}
    assert_same_curve(start(tmp_path / "compiled", shards, {}, **small, **compiled), plain)


def test_eight_bits_are_close(tmp_path: Path, shards: Path) -> None:
    """With parallel.fp8 the layers' products are rounded to eight bits, and the losses are still near."""
    pytest.importorskip("torchao")
    settings = {"model__dtype": "bfloat16", "model__ffn": 48, "run__steps": 3}
    plain = start(tmp_path / "plain", shards, {}, **settings).curve()
    rounded = start(tmp_path / "fp8", shards, {"dp": 2}, **settings, parallel__fp8="true").curve()
    for step, (loss, norm) in rounded.items():
        assert (loss, norm) == (pytest.approx(plain[step][0], rel=1e-3), pytest.approx(plain[step][1], rel=1e-2))
        assert (loss, norm) != plain[step]


def copy_shards_of_the_first_rank(folder: Path) -> None:
    """Make the second rank's shards of a tensor-parallel checkpoint those of the first, and the manifest fit."""
    info = json.loads((folder / MANIFEST).read_text())
    first, second = (folder / entry["name"] for entry in info["files"])
    with safe_open(second, framework="pt") as file:
        metadata = file.metadata()
    tensors, theirs = load_file(second), load_file(first)
    shared = {name for name in tensors if name.endswith("attention.query.weight")}
    save_file(tensors | {name: theirs[name] for name in shared}, second, metadata)
    info["files"][1] |= {"size": second.stat().st_size, "checksum": checksum(second)}
    (folder / MANIFEST).write_text(json.dumps(seal({name: value for name, value in info.items() if name != CHECKSUM})))


def test_copied_shards_are_named_at_the_start(tmp_path: Path, shards: Path) -> None:
    """A run that begins with shards that are copies of each other says so; so does the audit of its checkpoint."""
    run = start(tmp_path, shards, {"tp": 2}, run__steps=1)
    folder = folder_of(run.checkpoints, 1)
    assert CliRunner().invoke(checkpoint, ["audit", str(folder)], standalone_mode=False).return_value == 0
    copy_shards_of_the_first_rank(folder)
    audit = CliRunner().invoke(checkpoint, ["audit", str(run.folder), "--json"], standalone_mode=False)
    names = [f"blocks.{layer}.attention.query.weight" for layer in range(2)]
    assert [copies["tensor"] for copies in json.loads(audit.output)["copies"]] == [f"model.{name}" for name in names]
    again = Run(tmp_path, shards, SHAPE | {"parallel.tp": 2, "run.steps": 2})
    assert again.start().wait() == [0, 0], again.printed()
    event = again.events("tp_shards_equal")[0]
    assert (event["tensors"], event["ranks"]) == (names, [0, 1])


def test_a_batch_that_grows(tmp_path: Path, shards: Path) -> None:
    """During the warm-up of the batch steps are smaller, in every layout, and the order of the samples is the same."""
    grown = [start(tmp_path / f"{n}", shards, {"dp": n}, run__steps=4, data__batch_warmup="[[2, 2]]") for n in (1, 2)]
    assert [line["tokens"] // 32 for line in grown[0].metrics()] == [2, 4, 8, 12]
    assert_same_curve(grown[1], grown[0])
    assert read(folder_of(grown[0].checkpoints, 4)).sample == 12


def test_gradients_that_stay_infinite_end_the_run(tmp_path: Path, shards: Path) -> None:
    """Each such update is skipped and reported; after a few in a row the run ends with a sentence."""
    run = Run(tmp_path, shards, SHAPE | {"optimizer.lr": 1e30, "optimizer.max_skipped": 2})
    assert run.start(world=1).wait() == [1]
    last = run.log().read_text().splitlines()[-1]
    assert "not finite in 3 steps in a row" in last
    assert len(run.events("update_skipped")) == 3


@pytest.mark.parametrize(
    ("world", "settings", "text"),
    [
        (
            2,
            {"parallel__replicas": 4},
            "2 ranks are not a multiple of parallel.replicas 4; start",
        ),
        (2, {"parallel__pp": 2, "data__batch": 1}, "fewer than the parallel.pp 2 stages"),
        (1, {"parallel__tp": 8}, "parallel.tp 8 does not divide model.heads 4"),
        (1, {"run__folder": "/proc/run"}, "run.folder: /proc/run/checkpoints cannot be made"),
    ],
)
def test_what_cannot_start_is_refused(
    tmp_path: Path, shards: Path, world: int, settings: dict[str, object], text: str
) -> None:
    """What does not divide, or cannot be written, is one sentence and exit code 2."""
    run = Run(tmp_path, shards, SHAPE)
    assert run.start(world=world, **settings).wait() == [2] * world
    log = run.log().read_text()
    assert "Traceback" not in log
    assert text in log.splitlines()[-1]


def test_weights_go_to_hugging_face_and_come_back(tmp_path: Path, shards: Path) -> None:
    """Exported from a tensor-parallel run, the weights are what another run, in another layout, begins with."""
    run = start(tmp_path / "first", shards, {"tp": 2}, run__steps=4, optimizer__lr=0.02)
    sets = SHAPE | {"data.shards": shards, "run.folder": run.folder}
    arguments = [str(run.folder / "config.toml"), str(tmp_path / "exported"), "--dtype=float32"]
    result = CliRunner().invoke(export, [*arguments, *(f"--set={name}={value}" for name, value in sets.items())])
    assert result.exit_code == 0, result.output
    assert f"of {folder_of(run.checkpoints, 4)} written" in result.output
    again = CliRunner().invoke(export, [*arguments, *(f"--set={name}={value}" for name, value in sets.items())])
    assert "already has a model (config.json); remove it, or name another folder" in str(again.exception)
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "exported").iterdir()}
    assert len({*modes.values()}) == 1, modes
    generation = json.loads((tmp_path / "exported" / "generation_config.json").read_text())
    tokenizer = json.loads((tmp_path / "exported" / "tokenizer.json").read_text())
    assert tokenizer["added_tokens"][generation["eos_token_id"]]["content"] == "<|document|>"
    settings = {"run__initial": tmp_path / "exported", "run__steps": 1, "optimizer__lr": 1e-300}
    another = start(tmp_path / "second", shards, {"dp": 2}, **settings)
    trained, begun = weights(run, 4), weights(another, 1)
    assert all(torch.equal(begun[name], value) for name, value in trained.items() if name.startswith("model."))
    refusing = Run(tmp_path / "third", shards, SHAPE)
    assert refusing.start(world=1, **settings, model__ffn=64).wait() == [2]
    assert "needs model.ffn = 50, not 64" in refusing.log().read_text().splitlines()[-1]


@pytest.mark.long
@pytest.mark.parametrize("module", ["blocks.0.attention.query", "blocks.1.ffn.experts.router"])
def test_a_wrong_bit_names_its_rank(tmp_path: Path, module: str) -> None:
    """Although the wrong value goes on to the ranks that share experts, the rank that computed it is named."""
    sparse = ("parallel.ep=2", "model.experts=4", "model.experts_per_token=2")
    events = run_ranks(tmp_path, 2, sparse, [Fault(what, 1, module) for what in ("activation", "weight", "gradient")])
    assert [(event["step"], event["ranks"]) for event in events] == [(1, [1]), (1001, [1]), (2001, [1])]


SCHEDULES: dict[str, dict[str, object]] = {
    "uneven": {"parallel__stage_layers": "[4, 1]"},
    "interleaved": {"parallel__schedule": "interleaved", "parallel__stages_per_rank": 2},
    "zero-bubble": {"parallel__schedule": "zero-bubble"},
    "zero-bubble x 2": {"parallel__schedule": "zero-bubble", "parallel__stages_per_rank": 2},
}


def test_a_run_goes_on_with_any_other_schedule(tmp_path: Path, shards: Path, alone: Callable[[str], Run]) -> None:
    """A step with each, and one on one rank: one run."""
    for step, schedule in enumerate((*SCHEDULES.values(), {}), start=1):
        layout = {"pp": 2} if schedule else {}
        run = start(tmp_path, shards, layout, **LAYERS, **schedule, run__steps=step)
    assert_same_run(run, alone("stages"), "stages")


@pytest.mark.long
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("layout", ["pp2", "dp2 pp2", "tp2 pp2", "cp2 pp2"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_schedule_changes_nothing(
    tmp_path: Path, shards: Path, alone: Callable[[str], Run], name: str, layout: str, recompute: str
) -> None:
    """Beside every other way to spread a model, recomputed or not."""
    if "zero" in name and recompute == "selective":
        pytest.skip("refused")
    settings = LAYERS | SCHEDULES[name] | {"run__steps": 5, "parallel__recompute": recompute}
    assert_same_run(start(tmp_path, shards, layout_of(layout), **settings), alone("stages"), "stages")


@pytest.mark.long
@pytest.mark.parametrize("name", SCHEDULES)
def test_with_experts_and_untied(tmp_path: Path, shards: Path, name: str) -> None:
    """What routers measure and add to gradients is counted once, also where a backward pass is in two halves."""
    sparse = LAYERS | {
        "model__experts": 4, "model__experts_per_token": 2, "model__expert_ffn": 14, "model__tied": "false",
        "optimizer__balance_loss": 0.01, "optimizer__router_z_loss": 1e-3, "run__steps": 4,
    }  # fmt: skip
    whole = start(tmp_path / "alone", shards, {}, **sparse)
    spread = start(tmp_path / "spread", shards, {"pp": 2}, **sparse, **SCHEDULES[name])
    assert_same_curve(spread, whole)
    figures = ("balance_loss", "router_z_loss", "router_load")
    for ours, theirs in zip(spread.metrics(), whole.metrics(), strict=True):
        assert [ours[key] for key in figures] == pytest.approx([theirs[key] for key in figures], rel=1e-5)
