"""Studies: what their file may say, and which arms can be compared with the baseline."""

from __future__ import annotations

import codecs
import json
from pathlib import Path

import pytest

from opsd.ablate.study import StudyError, identity_of, read_study
from tests.fakes.corpora import make_corpus

STUDY = 'baseline = "tiny"\nseeds = 3\nset = ["data.shards={shards}"]\n'


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A corpus of three sources; each could be a corpus of its own."""
    for number, name in enumerate(("corpus", "other", "web", "code")):
        make_corpus(tmp_path / name, seed=number)
    for name in ("other", "web", "code"):
        (tmp_path / name / "tokenizer.json").write_bytes((tmp_path / "corpus/tokenizer.json").read_bytes())
        index = json.loads((tmp_path / name / "index.json").read_text())
        index["tokenizer"] = json.loads((tmp_path / "corpus/index.json").read_text())["tokenizer"]
        (tmp_path / name / "index.json").write_text(json.dumps(index))
    make_corpus(tmp_path / "foreign", seed=9)
    (tmp_path / "two.toml").write_text("[[stages]]\nstart = 1\nweights = {web = 0.5, code = 0.5}\n")
    return tmp_path


def study_file(shards: Path, text: str, head: str = STUDY) -> Path:
    """A study file in the folder of the corpora."""
    path = shards / "study.toml"
    path.write_text(head.format(shards=shards / "corpus") + text)
    return path


def arm(*overrides: str, **rest: object) -> str:
    """An arm that is called ``it``."""
    lines = [f"set = {json.dumps(list(overrides))}", *(f"{key} = {json.dumps(value)}" for key, value in rest.items())]
    return "\n".join(["[arm.it]", *lines])


CLEAN = [
    arm(),
    arm("optimizer.lr=1e-3"),
    arm("optimizer.kind=muon"),
    arm("optimizer.beta2=0.99"),
    arm("optimizer.weight_decay=0.0"),
    arm("optimizer.z_loss=1e-4"),
    arm("model.tied=false"),
    arm("model.nope_every=0"),
    arm("model.document_mask=false"),
    arm("model.layers=6"),
    arm("model.qk_norm=true"),
    arm("model.experts=4", "model.experts_per_token=2"),
    arm("schedule.warmup=50"),
    arm("schedule.decay_start=150", "schedule.decay_end=190"),
    arm("schedule.decay=1-sqrt"),
    arm("data.shards={dir}/other"),
    arm("data.batch=8", "run.steps=125", "schedule.warmup=10", "schedule.decay_start=100", "schedule.decay_end=125"),
    arm("data.micro_batch=4"),
    arm("model.ffn=640", "run.steps=177", equal="flops", differ=["decay", "warm-up"]),
    arm("run.steps=500", differ=["tokens"]),
    arm("optimizer.lr=1e-3", "optimizer.beta2=0.99", differ=["changes"]),
    arm("model.init_std=0.01"),
]


@pytest.mark.parametrize("text", CLEAN)
def test_clean_arms_pass(shards: Path, text: str) -> None:
    """One change, whatever it is, and settings that cannot be changed alone."""
    assert read_study(study_file(shards, text.replace("{dir}", str(shards)))).arms[1].name == "it"


CONFOUNDED = [
    (arm("run.steps=500"), "tokens (256,000 and 512,000)"),
    (arm("model.tied=false", "run.steps=300"), "tokens"),
    (arm("data.batch=8"), "tokens"),
    (arm("data.sequence=128"), "tokens"),
    (arm("data.batch=8", "run.steps=125"), "warm-up (20,480 and 40,960)"),
    (arm("data.batch=8", "run.steps=125", "schedule.warmup=10"), "decay"),
    (arm("data.batch=8", "run.steps=125", "schedule.warmup=20"), "schedule.warmup is what the baseline has"),
    (arm("data.batch_warmup=[[10, 2]]"), "tokens"),
    (arm("data.stages=[{{start=1, weights={{web=1.0}}, batch=8}}]", "data.shards={dir}"), "tokens"),
    (arm("model.tied=false", "schedule.warmup=50"), "warm-up (20,480 and 51,200)"),
    ("\n".join(f'[arm.{name}]\nset = ["optimizer.lr=1e-3"]\n' for name in "ab"), "arm b has the settings of arm a"),
    (arm("optimizer.lr=1e-3", "optimizer.beta2=0.99"), "optimizer.lr and optimizer.beta2 are two changes"),
    (arm("model.layers=6", "model.qk_norm=true"), "model.layers and model.qk_norm are two changes"),
    (arm("optimizer.lr=1e-3", "model.experts=4", "model.experts_per_token=2"), "optimizer.lr and model.experts and"),
    (arm("model.tied=false", "data.shards={dir}/other"), "data"),
    (arm("model.tied=false", "data.shards={dir}", "data.mixture={dir}/two.toml"), "mixture"),
    (arm("data.shards={dir}/foreign"), "tokenizer"),
    (arm("model.tied=false", "data.skip=[[3, 5]]"), "mixture"),
    (arm("evaluation.sequence=128"), "evaluation"),
    (arm("model.tied=true"), "model.tied is what the baseline has"),
    (arm("run.seed=7"), "arm.it.set has run.seed"),
    (arm("model.ffn=640", equal="flops"), "FLOPs"),
    (arm("run.steps=500", differ=["FLOPs"]), "tokens"),
    (arm("optimizer.lr=1e-3", "run.deterministic=false"), "optimizer.lr and run.deterministic are two changes"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "named"), CONFOUNDED)
def test_confounds_are_refused_by_name(shards: Path, text: str, named: str) -> None:
    """The sentence names the arm, what else differs, and what to do."""
    path = study_file(shards, text.replace("{{", "{").replace("}}", "}").replace("{dir}", str(shards)))
    with pytest.raises(StudyError) as refused:
        read_study(path)
    assert named in str(refused.value) and "arm" in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("head", "named"),
    [
        ('baselin = "tiny"\nbaseline = "tiny"\nseeds = 3\n', "unknown key baselin; did you mean baseline?"),
        ("seeds = 3\n", "baseline is missing"),
        ('baseline = "tiny"\n', "seeds is missing"),
        ('baseline = "tinny"\nseeds = 3\n', "did you mean tiny?"),
        ('baseline = "tiny"\nseeds = [1, 1]\n', "the same seed twice"),
        ('baseline = "tiny"\nseeds = 0\n', "seeds: give the number of seeds, from 1 on, or a list"),
        ('baseline = "tiny"\nseeds = []\n', "seeds: give the number"),
        ('baseline = "tiny"\nseeds = true\n', "seeds: give the number"),
        ('baseline = "tiny"\nseeds = [1, -2]\n', "seeds: give the number"),
        ('baseline = "tiny"\nseeds = 99999999999\n', "a study has 10,000 seeds at most"),
        ('baseline = "tiny"\nseeds = 2\nset = "run.steps=1"\n', 'set: give a list of settings, for instance ["'),
        ('baseline = "tiny"\nseeds = 2\nalpha = 2.0\n', "alpha"),
        ('baseline = "tiny"\nseeds = 2\nset = ["run.seed=1"]\n', "set has run.seed"),
        ('baseline = "tiny"\nseeds = 2\nset = ["run.stepz=1"]\n', "run.steps"),
        ('baseline = "tiny"\nseeds = 2\n', "data.shards is not set"),
        ('baseline = "tiny"\nseeds = 2\nset = ["data.shards=/nowhere"]\n', "make it with"),
        (STUDY + 'metric = "los"\n', "did you mean loss?"),
        (STUDY + 'metric = "arc_acuracy"\n', "metric arc_acuracy is not among loss;"),
        (STUDY + "arm = 3\n", "an arm is a section"),
        (STUDY + "[arm.baseline]\n", "arm.baseline"),
        (STUDY + "[arm.a]\nsett = []\n", "arm.a: unknown key sett; did you mean set?"),
        (STUDY + '[arm.a]\nset = 3\n', "arm.a: set: give a list"),
        (STUDY + '[arm.a]\nset = ["run.stepz=1"]\n', "study.toml: arm.a: run.stepz=1: unknown key"),
        (STUDY + '[arm.a]\ndiffer = ["token"]\n', "arm.a: differ"),
        ("seeds = \n", "cannot be read"),
    ],
)  # fmt: skip
def test_a_bad_file_is_one_sentence(shards: Path, head: str, named: str) -> None:
    """Whatever is wrong with it, and the nearest word is in the sentence."""
    with pytest.raises(StudyError) as refused:
        read_study(study_file(shards, "", head))
    assert named in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("/corpus", "/elsewhere"), "baseline: {0}/elsewhere"),
        (("[arm.more]", '[arm.data]\nset = ["data.shards={0}/elsewhere"]\n[arm.more]'), "arm.data: {0}/elsewhere"),
        (('"tiny"', '"none.toml"'), "baseline: there is no file none.toml"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_told_with_its_arm(shards: Path, change: tuple[str, str], named: str) -> None:
    """And with the file, which may have a mark of its encoding as some editors write it."""
    path = study_file(shards, "[arm.more]\n")
    before, after = (each.format(shards) for each in change)
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes().replace(before.encode(), after.encode(), 1))
    with pytest.raises(StudyError) as refused:
        read_study(path)
    assert str(refused.value).startswith(f"{path}: {named.format(shards)}")


def test_the_metric_may_be_a_result_of_an_evaluation(shards: Path) -> None:
    """Accuracies are better if they are higher, losses if they are lower; a harness names its results itself."""
    head = STUDY.replace("]\n", ', "evaluation.cloze={{arc=\'/items\'}}"]\nmetric = "arc_accuracy_norm"\n')
    assert read_study(study_file(shards, "", head)).higher_is_better
    head = STUDY.replace("]\n", ', "evaluation.harness=lm_eval"]\nmetric = "hellaswag"\n')
    assert not read_study(study_file(shards, "", head)).higher_is_better


def test_a_baseline_lies_beside_its_study(shards: Path) -> None:
    """Wherever the command is called."""
    preset = Path(__file__).parents[2] / "trainer/configs/tiny.toml"
    (shards / "mine.toml").write_text(preset.read_text().replace("layers = 4", "layers = 3"))
    study = read_study(study_file(shards, "", STUDY.replace('"tiny"', '"mine.toml"')))
    assert study.baseline.config.model.layers == 3
    assert study.seeds == (1, 2, 3)


def test_the_identity_is_that_of_settings_and_data(shards: Path) -> None:
    """It is the same if the corpus moves, and another one if its content changes."""
    path = study_file(shards, "")
    first = identity_of(read_study(path).baseline.config)
    (shards / "corpus").rename(shards / "moved")
    path.write_text(path.read_text().replace("/corpus", "/moved"))
    assert identity_of(read_study(path).baseline.config) == first
    make_corpus(shards / "moved", seed=5)
    assert identity_of(read_study(path).baseline.config) != first
