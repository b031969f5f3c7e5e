"""Every layout trains the same model: the same initial bits, losses and gradient norms to rounding, any to any."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from trainer_world import Run

from opsd.checkpoints.manifest import MANIFEST, checksum, folder_of, read
from opsd.checkpoints.sealed import CHECKSUM, seal
from opsd.commands.checkpoint import checkpoint
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

LAYOUTS = {
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
    "replicas2": {"replicas": 2},
    "dp2 tp2": {"dp": 2, "tp": 2},
    "pp2 tp2": {"pp": 2, "tp": 2},
    "replicas2 cp2": {"replicas": 2, "cp": 2},
}


def start(folder: Path, shards: Path, layout: dict[str, int], **settings: object) -> Run:
    """A run in ``layout`` that has ended well."""
    run = Run(folder, shards, SHAPE | {f"parallel.{name}": n for name, n in layout.items() if name != "dp"})
    world = 1
    for size in layout.values():
        world *= size
    codes = run.start(world=world, **settings).wait()
    assert codes == [0] * world, run.printed()
    assert not [event for kind in ("tp_shards_equal", "replicas_differ") for event in run.events(kind)]
    return run


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Run:
    """Five steps on one rank."""
    return start(tmp_path_factory.mktemp("alone"), shards, {}, run__steps=5)


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


def assert_same_run(run: Run, other: Run, settings: Mapping[str, object] = MappingProxyType({})) -> None:
    """After five steps with these ``settings`` the curve is the same, and so are parameters and moments."""
    assert_same_curve(run, other)
    expected = weights(other, 5, settings)
    for tensor, value in weights(run, 5, settings).items():
        torch.testing.assert_close(value, expected[tensor], rtol=1e-2, atol=2e-4, msg=tensor)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_changes_nothing(tmp_path: Path, shards: Path, alone: Run, name: str) -> None:
    """Loss and gradient norm are those of one rank, and so are the parameters and moments in the checkpoint."""
    run = start(tmp_path, shards, LAYOUTS[name], run__steps=5)
    assert_same_run(run, alone)


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


def test_a_run_goes_on_in_any_other_layout(tmp_path: Path, shards: Path, alone: Run) -> None:
    """A step on four ranks, two, two that share the matrices, two that share the layers, one: one run."""
    for step, layout in enumerate(({"dp": 4}, {"dp": 2}, {"tp": 2}, {"pp": 2}, {}), start=1):
        run = start(tmp_path, shards, layout, run__steps=step)
    assert_same_curve(run, alone)


@pytest.mark.slow
def test_three_dimensions(tmp_path: Path, shards: Path, alone: Run) -> None:
    """DP 2 x TP 2 x PP 2 on eight ranks: five steps, the same numbers; then it goes on on one."""
    run = start(tmp_path, shards, {"dp": 2, "tp": 2, "pp": 2}, run__steps=4)
    assert read(folder_of(run.checkpoints, 4)).layout == {"dp": 2, "tp": 2, "pp": 2}
    assert_same_curve(start(tmp_path, shards, {}, run__steps=5), alone)


def test_untied_normalised_and_windowed(tmp_path: Path, shards: Path) -> None:
    """The model's other switches train alike in layouts too: untied head, QK-norm, window, YaRN, bfloat16 aside."""
    switches = {
        "model__tied": "false", "model__qk_norm": "true", "model__window": 9, "model__yarn_factor": 2.0,
        "model__yarn_positions": 16, "run__steps": 3,
    }  # fmt: skip
    whole = start(tmp_path / "alone", shards, {}, **switches)
    for name in ("pp2 tp2", "cp2"):
        assert_same_curve(start(tmp_path / name, shards, LAYOUTS[name], **switches), whole)


def test_gemma_with_biases(tmp_path: Path, shards: Path) -> None:
    """So do norms on both sides, biases, bounds of scores and logits, and a pattern of windows with their own base."""
    switches = {
        "model__norms": "both", "model__qkv_bias": "true", "model__output_bias": "true", "model__ffn_bias": "true",
        "model__activation": "gelu_tanh", "model__attention_softcap": 3.0, "model__logit_softcap": 5.0,
        "model__embedding_scale": 5.5, "model__head_dim": 12, "model__pattern": ["window", "global"],
        "model__window": 7, "model__window_theta": 100.0, "run__steps": 3,
    }  # fmt: skip
    whole = start(tmp_path / "alone", shards, {}, **switches)
    for name in ("pp2 tp2", "replicas2 cp2"):
        assert_same_curve(start(tmp_path / name, shards, LAYOUTS[name], **switches), whole)


@pytest.mark.long
@pytest.mark.parametrize("name", ["dp2 tp2", "pp2 tp2", "cp2"])
def test_learnt_positions(tmp_path: Path, shards: Path, name: str) -> None:
    """They train alike, and a run goes on in the layout that began on one rank."""
    switches = {"model__positions": 32, "model__pattern": ["nope"]}
    whole = start(tmp_path / "alone", shards, {}, **switches, run__steps=3)
    start(tmp_path / "split", shards, {}, **switches, run__steps=1)
    assert_same_curve(start(tmp_path / "split", shards, LAYOUTS[name], **switches, run__steps=3), whole)


@pytest.mark.long
@pytest.mark.parametrize("name", ["tp2", "pp2 tp2", "cp2"])
def test_chunked_attention(tmp_path: Path, shards: Path, name: str) -> None:
    """Layers that see chunks, beside one without positions that sees the document, as in Llama 4."""
    switches = {"model__pattern": ["chunk", "nope"], "model__chunk": 9, "run__steps": 3}
    whole = start(tmp_path / "alone", shards, {}, **switches)
    assert_same_curve(start(tmp_path / "split", shards, LAYOUTS[name], **switches), whole)


@pytest.mark.long
@pytest.mark.parametrize("name", ["dp2", "tp2", "pp2"])
def test_dual_chunk_attention(tmp_path: Path, shards: Path, name: str) -> None:
    """Positions of chunks that begin anew with each document."""
    switches = {"model__pattern": ["dual_chunk", "nope"], "model__dual_chunk": 9, "model__dual_chunk_local": 3}
    whole = start(tmp_path / "alone", shards, {}, **switches, run__steps=3)
    assert_same_curve(start(tmp_path / "split", shards, {name[:-1]: 2}, **switches, run__steps=3), whole)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputing_changes_nothing(tmp_path: Path, shards: Path, alone: Run, recompute: str) -> None:
    """Activations that are computed again are the same bits."""
    run = start(tmp_path, shards, {}, run__steps=5, parallel__recompute=recompute)
    assert run.curve() == alone.curve()


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
