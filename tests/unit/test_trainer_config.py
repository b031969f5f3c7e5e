"""Settings of the trainer: what is accepted, and one sentence for what is not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from opsd.commands.train import train
from opsd.trainer.__main__ import main
from opsd.trainer.accumulate import fitting_ranks
from opsd.trainer.config import PRESETS, Config, ConfigError, load

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
