"""Settings of the trainer, how ranks find each other, and `opsd train`."""

from __future__ import annotations

import itertools
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from opsd import exitcodes, pip_install
from opsd.commands import train as command
from opsd.commands.main import cli
from opsd.commands.train import train
from opsd.trainer.__main__ import main
from opsd.trainer.accumulate import fitting_ranks, micro_batches
from opsd.trainer.config import PRESETS, Config, ConfigError, load
from opsd.trainer.counts import divide, flops_per_token, layer_flops, stage_ranges
from opsd.trainer.parallel import demand_device
from opsd.trainer.world import await_store, gpu_here

# Settings of the trainer: what is accepted, and one sentence for what is not.


SHARDS = "data.shards=/data"


@pytest.fixture
def tiny() -> Config:
    return load("tiny", [SHARDS], {})


def refusal(source: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(source, [SHARDS, *overrides], {})
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("preset", sorted(path.stem for path in PRESETS.glob("*.toml")))
def test_presets_are_valid(preset: str) -> None:
    """Every preset loads by its name, which the help of both commands tells."""
    assert load(preset, [SHARDS], {}).model.layers > 0
    assert all(re.search(rf"Presets: .*\b{preset}\b[,.]", command.help or "") for command in (train, main))


def test_smollm3_is_as_published() -> None:
    """The preset has the batch, the warm-up and the decay over the last 11 % that SmolLM3 was trained with."""
    config = load("smollm3-3b", [SHARDS], {})
    assert config.data.batch * config.data.sequence == 2_359_296
    assert config.schedule.warmup == 2000
    decay = config.schedule.decay_end - config.schedule.decay_start
    assert config.schedule.decay_end == config.run.steps == 4_720_000
    assert decay / config.run.steps == pytest.approx(0.11)
    assert (config.optimizer.lr, config.model.rope_theta, config.model.document_mask) == (2e-4, 50_000, True)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["data.batch=12"], [1, 2, 3, 4, 6, 12]),
        (["data.batch=12", "data.micro_batch=2"], [1, 2, 3, 6]),
        (["data.batch=12", "parallel.replicas=2"], [2, 4, 6, 12]),
        (["data.batch=12", "parallel.tp=2"], [2, 4, 6, 8, 12, 24]),
        (["data.batch=12", "parallel.pp=2"], [2, 4, 6, 8, 12]),
        (["data.batch=12", "parallel.ep=4", "model.experts=4", "model.experts_per_token=2"], [4, 12]),
        (["data.batch=12", "data.batch_warmup=[[5, 4]]"], [1, 2, 4]),
        (["data.batch=2", "data.micro_batch=3"], []),
    ],
)
def test_numbers_of_ranks_that_share_the_batch(settings: list[str], expected: list[int]) -> None:
    """A run may go on with any number of ranks that splits all its batches, with a micro-batch for each stage."""
    assert fitting_ranks(load("tiny", [SHARDS, "data.micro_batch=1", *settings], {})) == expected


def test_overrides_keep_their_types(tiny: Config) -> None:
    """--set reads values as TOML, and as a string where they are not TOML."""
    config = load("tiny", [SHARDS, "run.steps=7", "optimizer.lr=1", "run.folder=/a/b c", "run.deterministic=false"], {})
    assert (config.run.steps, config.optimizer.lr, config.run.folder) == (7, 1.0, "/a/b c")
    assert tiny.run.deterministic
    assert not config.run.deterministic


def test_run_folder_comes_from_the_launcher() -> None:
    """OPSD_RUN_DIR is used unless the settings name a folder; without either it is runs/NAME."""
    assert load("tiny", [SHARDS], {"OPSD_RUN_DIR": "/r"}).run.folder == "/r"
    assert load("tiny", [SHARDS, "run.folder=/mine"], {"OPSD_RUN_DIR": "/r"}).run.folder == "/mine"
    assert load("tiny", [SHARDS], {}).run.folder == "runs/tiny"


def test_what_is_wrong_with_an_override_is_not_said_of_the_file() -> None:
    """The file is the trainer's own, and right."""
    assert refusal("tiny", "run.seed=1", "run.stpes=3") == (
        "--set run.stpes=3: unknown key run.stpes; did you mean run.steps?"
    )
    assert refusal("tiny", "modle.width=3").startswith("--set modle.width=3: unknown key modle;")
    assert refusal("tiny", "run.steps=many").startswith("--set run.steps=many: run.steps: input should be")
    assert refusal("tiny", "schedule.decay_end=1").startswith("--set schedule.decay_end=1: ")


def test_unknown_key_names_the_nearest() -> None:
    """A misspelt key is refused with the key that was probably meant."""
    assert "unknown key optimizer.learning_rat" in refusal("tiny", "optimizer.learning_rat=1")
    assert "did you mean schedule.warmup?" in refusal("tiny", "schedule.warm_up=1")
    assert "did you mean checkpoint?" in refusal("tiny", "checkpoints.every=1")
    stages = "data.stages=[{start = 1, weights = {web = 1.0}}, {start = 5, weigths = {web = 1.0}}]"
    assert "unknown key data.stages.1.weigths; did you mean data.stages.1.weights?" in refusal("tiny", stages)


def test_a_value_in_the_place_of_a_section_is_refused(tmp_path: Path) -> None:
    """With the name of the section, whether the file is to be used as it is or with changes."""
    (tmp_path / "c.toml").write_text("run = 5")
    assert "run: input should be" in refusal(str(tmp_path / "c.toml"))
    assert "run has to be a section, the file says run = 5" in refusal(str(tmp_path / "c.toml"), "run.steps=3")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.steps=many", "run.steps: "),
        ("run.steps=0", "greater than 0"),
        ("optimizer.lr=-1.0", "greater than 0"),
        ("optimizer.lr=inf", "optimizer.lr: input should be a finite number"),
        ("optimizer.clip=nan", "greater than 0"),
        ("model.heads=3", "does not split into 3 heads"),
        ("model.kv_heads=3", "not a multiple of model.kv_heads 3"),
        ("schedule.decay_start=900", "warmup <= decay_start < decay_end"),
        ("checkpoint.every=0", "nothing says when to save"),
        ("checkpoint.minutes=5", "checkpoint.every and checkpoint.minutes says when to save; set exactly one"),
        ("data.shards=", "`python -m opsd.trainer.data` makes shards"),
        ("model.yarn_factor=2.0", "needs model.yarn_positions"),
        ("schedule.kind=multi-step", "needs milestones"),
        ("data.batch_warmup=[[20, 1], [10, 2]]", "they have to ascend"),
        ("model.positions=8", "data.sequence 256 is more than model.positions 8"),
        ("model.chunk=8", "model.chunk and layers of the kind 'chunk' in model.pattern need each other"),
        ("parallel.tp=3", "parallel.tp 3 does not divide model.heads 4"),
        ("parallel.tp=4", "parallel.tp 4 does not divide model.kv_heads 2"),
        ("parallel.pp=5", "makes 5 stages, more than model.layers 4"),
        ("parallel.cp=3", "data.sequence 256 is not a multiple of 6"),
        ("steps", "expected section.key=value"),
        ("steps=3", "expected section.key=value"),
    ],
)
def test_bad_values_are_refused(override: str, expected: str) -> None:
    """Values of the wrong type or out of range, and settings that contradict each other, say what is wrong."""
    assert expected in refusal("tiny", override)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    """A missing file, a file that is not TOML, an unknown preset and a missing section are each one sentence."""
    assert "there is no file" in refusal(str(tmp_path / "none.toml"))
    (tmp_path / "bad.toml").write_text("run = [")
    assert "cannot be read" in refusal(str(tmp_path / "bad.toml"))
    assert "tiny" in refusal("tny")
    (tmp_path / "half.toml").write_text("[run]\nsteps = 3\n")
    assert "model is missing" in refusal(str(tmp_path / "half.toml"))


def test_digest_covers_what_the_state_depends_on(tiny: Config) -> None:
    """Another model, seed, sequence length or corpus is another run; another length or learning rate is not."""

    def digest(*overrides: str, shards: str = "a", position: int = 4) -> str:
        config = load("tiny", [SHARDS, *overrides], {})
        names = {name for stage in config.data.stages for name in stage.weights} or {"."}
        mixture = config.data.mix(dict.fromkeys(names, 9), config.run.seed)
        return config.digest(mixture, dict.fromkeys(names, shards), position)

    same = digest()
    assert digest("run.steps=999", "optimizer.lr=1", "data.batch=8", "run.folder=/x", "model.dtype=bfloat16") == same
    assert digest("model.nope_every=4", "model.document_mask=true", "data.skip=[[2, 3]]") == same
    for change in ("model.layers=5", "model.nope_every=2", "run.seed=2", "data.sequence=128", "data.skip=[[1, 1]]"):
        assert digest(change) != same
    assert digest(shards="b") != same


FIRST = "{start = 1, weights = {web = 0.5, code = 0.5}}"

LATER = "{start = 100, weights = {math = 1.0}}"


def test_stages_to_come_may_change() -> None:
    """The state of a run belongs to the stages that have begun, so a later one may be added on the way."""

    def digest(stages: str, position: int) -> str:
        config = load("tiny", [SHARDS, f"data.stages=[{stages}]"], {})
        names = {name for stage in config.data.stages for name in stage.weights}
        return config.digest(config.data.mix(dict.fromkeys(names, 9), 1), {name: name for name in names}, position)

    assert digest(FIRST, 40) == digest(f"{FIRST}, {LATER}", 40)
    assert digest(FIRST, 400) != digest(f"{FIRST}, {LATER}", 400)


def test_a_preset_mixture_is_read() -> None:
    """data.mixture names a preset or a file whose stages become those of the run."""
    config = load("smollm3-3b", [SHARDS, "data.mixture=smollm3"], {})
    assert [len(stage.weights) for stage in config.data.stages] == [41, 46, 56]
    assert config.data.stages[1].start == 3_450_001


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.mixture=smollm3"], "a stage starts at step 4198001, and the run ends at run.steps 250"),
        (["data.stages=[{start = 1, weights = {web = 0.7, code = 0.4}}]"], "from step 1: the weights sum to 1.1"),
        ([f"data.stages=[{LATER}]"], "the first starts at 1"),
        ([f"data.stages=[{FIRST}, {FIRST}]"], "each later one after it"),
        (['data.stages=[{start = 1, weights = {"../web" = 1.0}}]'], "'../web' is not the name of a folder"),
        (["data.skip=[[5, 3]]"], "pairs of a first and a last step"),
        (["data.mixture=none"], "neither a .toml file nor a preset (smollm3)"),
        (["data.mixture=smollm3", f"data.stages=[{FIRST}]"], "both given"),
    ],
)
def test_bad_mixtures_are_refused(overrides: list[str], expected: str) -> None:
    """Weights, stages and skips that cannot be followed are refused before anything starts."""
    assert expected in refusal("tiny", *overrides)


@pytest.mark.parametrize(("step", "position"), [(1, 0), (2, 2), (4, 6), (5, 10), (6, 14), (7, 22), (100, 766)])
def test_a_growing_batch_moves_the_position(step: int, position: int) -> None:
    """The samples before a step are the sum of the batches before it."""
    config = load("tiny", [SHARDS, "data.batch_warmup=[[3, 2], [5, 4]]", "data.batch=8"], {})
    assert config.data.position(step) == position
    assert config.data.position(step + 1) - position == config.data.shape_at(step).batch
    assert [shape.batch for shape in config.data.shapes] == [2, 4, 8]
    assert config.data.tokens(position) == position * config.data.sequence


# How layers are divided among the stages of a pipeline, and what cannot be.


def config(*overrides: str, preset: str = "tiny") -> Config:
    return load(preset, ["data.shards=/data", "data.micro_batch=1", *overrides], {})


@settings(max_examples=50, deadline=None)
@given(costs=st.lists(st.integers(1, 9), min_size=1, max_size=9), parts=st.integers(1, 9))
def test_no_division_has_a_faster_slowest_stage(costs: list[int], parts: int) -> None:
    """Compared with every other one; each stage has a layer at least, and all are in order."""
    parts = min(parts, len(costs))
    counts = divide(costs, parts)
    assert (len(counts), sum(counts), min(counts) > 0) == (parts, len(costs), True)

    def slowest(ends: tuple[int, ...]) -> int:
        return max(sum(costs[begin:end]) for begin, end in itertools.pairwise((0, *ends, len(costs))))

    every = itertools.combinations(range(1, len(costs)), parts - 1)
    assert slowest(tuple(itertools.accumulate(counts[:-1]))) == min(map(slowest, every))


def test_the_output_projection_is_worth_layers() -> None:
    """SmolLM3's costs as much as nearly three layers, so the last of four stages has fewer."""
    run = load("smollm3-3b", ["data.shards=/data", "parallel.pp=4"], {})
    assert [len(layers) for layers in stage_ranges(run.model, run.parallel, 4096)] == [9, 10, 10, 7]
    own = load("smollm3-3b", ["data.shards=/data", "parallel.pp=2", "parallel.stage_layers=[20, 16]"], {})
    assert stage_ranges(own.model, own.parallel, 4096) == [range(20), range(20, 36)]


@pytest.mark.parametrize("preset", ["tiny", "tiny-moe", "tiny-mla", "tiny-hybrid"])
def test_layers_cost_what_the_model_costs(preset: str) -> None:
    """The layers, the last norm and the output projection are all of it."""
    model = config(preset=preset).model
    whole = sum(layer_flops(model, layer, 256) for layer in range(model.layers)) + 6 * model.width * (model.vocab + 1)
    assert whole == pytest.approx(flops_per_token(model, 256))


@pytest.mark.parametrize(("overrides", "expected"), [
    (["parallel.schedule=zero-bubble"], "parallel.schedule needs parallel.pp above 1"),
    (["parallel.stages_per_rank=2"], "parallel.stages_per_rank needs parallel.pp above 1"),
    (["parallel.pp=2", "parallel.schedule=interleaved"], "needs parallel.stages_per_rank above 1"),
    (["parallel.pp=2", "parallel.stages_per_rank=2"], "needs parallel.schedule interleaved or zero-bubble"),
    (["parallel.pp=2", "parallel.stage_layers=[3, 2]"], "needs 2 numbers with the sum of model.layers 4"),
    (["parallel.pp=8"], "makes 8 stages, more than model.layers 4"),
    (
        ["parallel.pp=2", "parallel.schedule=zero-bubble", "parallel.compile=true"],
        "parallel.schedule zero-bubble does not work with parallel.compile",
    ),
    (
        ["parallel.pp=2", "parallel.schedule=zero-bubble", "parallel.recompute=selective"],
        "zero-bubble does not work with parallel.recompute selective; take none or full",
    ),
])  # fmt: skip
def test_what_cannot_be_is_refused(overrides: list[str], expected: str) -> None:
    """In one sentence."""
    with pytest.raises(ConfigError, match="parallel") as error:
        config(*overrides)
    assert expected in str(error.value)


def test_rounds_have_to_come_out_even() -> None:
    """Schedules with rounds need a whole number of micro-batches in each."""
    zero = ("parallel.pp=2", "parallel.schedule=zero-bubble")
    assert list(micro_batches(config("data.batch=6", *zero), 2).values()) == [6]
    with pytest.raises(ConfigError, match="cannot divide into 2 rounds"):
        micro_batches(config("data.batch=5", *zero), 2)


# How ranks find each other.


def test_a_rank_waits_for_the_first_to_listen() -> None:
    """And goes on as soon as it does."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        threading.Timer(0.3, listener.listen).start()
        began = time.monotonic()
        await_store(*listener.getsockname(), 60.0)
        assert 0.2 < time.monotonic() - began < 30.0


def test_it_does_not_wait_for_ever() -> None:
    """What then is wrong torch says."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        await_store(*silent.getsockname(), 0.1)


@pytest.mark.parametrize(
    ("settings", "gpu", "expected"),
    [
        (["model.attention=flex"], None, "model.attention flex needs a GPU, and this run is on the CPU"),
        (["model.attention=varlen", "model.dtype=bfloat16"], None, "model.attention varlen needs a GPU"),
        (
            ["model.attention=varlen", "model.dtype=bfloat16"],
            (7, 5),
            "8.0 or more, this one has 7.5",
        ),
        (["parallel.fp8=true"], (8, 0), "parallel.fp8 needs a GPU of compute capability 8.9 or more, this one has 8.0"),
        (["parallel.fp8=true"], None, ""),
        (["parallel.fp8=true", "model.attention=flex"], (9, 0), ""),
        ([], None, ""),
    ],
)
def test_kernels_that_a_device_has_not(settings: list[str], gpu: tuple[int, int] | None, expected: str) -> None:
    """They are refused by the name of the setting before the ranks meet."""
    config = load("tiny", ["data.shards=/data", *settings], {})
    if not expected:
        demand_device(config, gpu)
        return
    with pytest.raises(ConfigError, match=expected):
        demand_device(config, gpu)


def test_the_device_is_that_of_the_rank() -> None:
    """Each rank asks for its own GPU, and none that is to be on the CPU does."""
    cuda: Any = SimpleNamespace(is_available=lambda: True, get_device_capability=lambda device: (9, device))
    run = load("tiny", ["data.shards=/data"], {}).run
    assert gpu_here(run.model_copy(update={"device": "auto"}), {"LOCAL_RANK": "3"}, cuda) == (9, 3)
    assert gpu_here(run.model_copy(update={"device": "cpu"}), {}, cuda) is None


# ``opsd train``: what it is short for, and where it is a rank itself.


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """The arguments with which ``opsd launch`` was called."""
    calls: list[Sequence[str]] = []

    def main(args: Sequence[str], *_: object, **__: object) -> int:
        calls.append(args)
        return exitcodes.REQUEUE

    monkeypatch.setattr(command.launch, "main", main)
    monkeypatch.delenv("RANK", raising=False)
    return calls


@pytest.mark.parametrize(
    ("devices", "options", "ranks"),
    [("0,1,2", [], "3"), ("", [], "1"), ("0,1", ["--nproc-per-node", "auto"], "auto")],
)
def test_it_is_short_for_launch(
    launched: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch, devices: str, options: list[str], ranks: str
) -> None:
    """A rank for each GPU, one where there is none; settings and the exit code go through."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    result = CliRunner().invoke(
        cli, ["train", "tiny", *options, "--set", "data.shards=x", "--fresh"], standalone_mode=False
    )
    assert result.return_value == exitcodes.REQUEUE, result.output
    assert launched == [
        ["--nproc-per-node", ranks, "-m", "opsd.trainer", "--set", "data.shards=x", "--fresh", "--", "tiny"]
    ]


def test_under_a_launcher_it_is_a_rank(launched: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each rank would start a launcher of its own."""
    started: list[Sequence[str]] = []

    def execv(_path: str, args: Sequence[str]) -> None:
        started.append(args)
        raise SystemExit

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(command.os, "execv", execv)
    CliRunner().invoke(cli, ["train", "tiny"])
    assert started == [[sys.executable, "-m", "opsd.trainer", "--", "tiny"]]
    assert launched == []


def test_without_torch_one_sentence_says_so(launched: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """And the command line itself never loads it."""
    monkeypatch.setattr(command, "find_spec", lambda _name: None)
    result = CliRunner().invoke(cli, ["train", "tiny"])
    assert (result.exit_code, pip_install("train") in result.output) == (exitcodes.USAGE, True)
    program = "import sys; from opsd.commands import train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("arguments", [("nope",), ("tiny", "--set", "nope=1"), ("tiny", "--set", "run.nope=1")])
def test_a_wrong_configuration_starts_nothing(launched: list[Sequence[str]], arguments: tuple[str, ...]) -> None:
    """It is said in one sentence, by the command and not by each rank."""
    result = CliRunner().invoke(cli, ["train", *arguments])
    assert (result.exit_code, launched) == (exitcodes.USAGE, [])
    assert result.output.count("Error: ") == 1


# What the trainer's helper processes load, since a restart waits for it.


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
