"""Studies: what their file may say, their cells, and the jobs that compute these."""

from __future__ import annotations

import codecs
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from opsd.ablate.cells import (
    ORIGIN,
    SETTINGS,
    cells_of,
    cost_of_all,
    demand_origin,
    hold,
    is_done,
    look,
    metric_of,
    note_held,
    prepare,
)  # fmt: skip
from opsd.ablate.run import jobs_of, opsd_command, spare_partition, stop, submit
from opsd.ablate.study import StudyError, identity_of, read_study
from opsd.slurm.port import Job, Partition, SlurmUnavailable
from opsd.trainer.config import load
from tests.fakes.posttrain import make_corpus
from tests.fakes.slurm import FakeSlurm
from tests.fakes.studies import ARM, STEPS, end_cell, make_study, study_and_cells

# Studies: what their file may say, and which arms can be compared with the baseline.


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


# Cells of a study: their names, their settings, what their folders say, and whose code they run.


def test_a_cell_is_named_by_its_settings_and_its_seed(tmp_path: Path) -> None:
    """Cells come seed by seed; other seeds, arms and order of arms leave the names of the rest as they are."""
    _, cells = study_and_cells(make_study(tmp_path))
    assert [(cell.arm.name, cell.seed) for cell in cells[:3]] == [("baseline", 1), ("lr", 1), ("baseline", 2)]
    assert len({cell.name for cell in cells}) == 6
    more = make_study(tmp_path, '[arm.tied]\nset = ["model.tied=false"]\n' + ARM.replace("arm.lr", "arm.rate"))
    assert {cell.name for cell in cells} < {cell.name for cell in cells_of(read_study(more), tmp_path)}


def test_an_arm_without_a_change_has_runs_of_its_own(tmp_path: Path) -> None:
    """An A/A arm that shared the baseline's runs would show no noise."""
    _, cells = study_and_cells(make_study(tmp_path, "[arm.same]\n"))
    assert len({cell.name for cell in cells}) == 6


def test_the_settings_of_a_cell_stand_by_themselves(tmp_path: Path) -> None:
    """The trainer reads the same settings from the cell's file, with absolute places, the seed and its folder."""
    _, cells = study_and_cells(make_study(tmp_path, ARM.replace("1e-3", "1e-5")))
    prepare(cells[3])
    config = load(str(cells[3].folder / SETTINGS), (), {})
    assert identity_of(config) == identity_of(cells[3].arm.config) | {"run.seed": 2}
    assert (config.run.folder, config.optimizer.lr) == (str(cells[3].folder.absolute()), 1e-5)


def test_stages_of_a_mixture_survive(tmp_path: Path) -> None:
    """They are in the settings, and the file of the mixture is not read again."""
    (tmp_path / "mix.toml").write_text("[[stages]]\nstart = 1\nweights = {shards = 1.0}\n")
    arm = f'[arm.mix]\nset = ["data.shards={tmp_path}", "data.mixture={tmp_path}/mix.toml"]\n'
    _, cells = study_and_cells(make_study(tmp_path, arm))
    prepare(cells[1])
    (tmp_path / "mix.toml").unlink()
    assert load(str(cells[1].folder / SETTINGS), (), {}).data.stages == cells[1].arm.config.data.stages


@pytest.mark.parametrize(
    ("steps", "code", "state"),
    [
        (STEPS, 0, "done"), (7, 0, "refused"), (7, 3, "stopped"), (7, 75, "stopped"), (7, None, "stopped"),
        (STEPS, None, "stopped"), (7, 1, "failed"), (0, 70, "failed"), (STEPS, 1, "failed"),
    ],
)  # fmt: skip
def test_the_state_of_a_cell(tmp_path: Path, steps: int, code: int | None, state: str) -> None:
    """Done is a run that ended well, with all its losses; one that ended in good order or was killed goes on."""
    _, (cell, *_) = study_and_cells(make_study(tmp_path))
    assert look(cell).state == "new"
    end_cell(cell, steps=steps, code=code)
    assert (look(cell).state, look(cell).step) == (state, steps)


def test_one_process_runs_a_cell(tmp_path: Path) -> None:
    """Its lock holds until the last process that has it ends."""
    _, (cell, *_) = study_and_cells(make_study(tmp_path))
    prepare(cell)
    lock = hold(cell)
    assert lock is not None
    assert look(cell).state == "running"
    assert hold(cell) is None
    os.close(lock)
    assert look(cell).state == "stopped"


def test_the_loss_is_the_mean_of_the_last_tenth(tmp_path: Path) -> None:
    """A step that was done again counts once, with its last line."""
    _, (cell, *_) = study_and_cells(make_study(tmp_path))
    end_cell(cell, 3.0)
    with (cell.folder / "metrics.jsonl").open("a") as file:
        for step, loss in ((19, 2.0), (20, 1.0)):
            file.write(
                json.dumps({"t": 1100 + step, "generation": 2, "step": step, "step_s": 1.0, "loss": loss}) + "\n"
            )
    assert metric_of(look(cell), "loss") == 1.5


def test_a_run_that_fails_or_diverges_has_no_number(tmp_path: Path) -> None:
    """It counts against its arm; a run that has not ended counts not at all."""
    _, cells = study_and_cells(make_study(tmp_path))
    end_cell(cells[0], None)
    end_cell(cells[1], 3.0, steps=5, code=1)
    end_cell(cells[2], 3.0, steps=5, code=75)
    found = [metric_of(look(cell), "loss") for cell in cells[:4]]
    assert [value if value is None else math.isnan(value) for value in found] == [True, True, None, None]


def test_an_evaluation_of_the_last_step_is_the_metric(tmp_path: Path) -> None:
    """Earlier checkpoints do not count, the newest line does."""
    _, (cell, *_) = study_and_cells(make_study(tmp_path))
    end_cell(cell)
    lines = [(10, {"arc_accuracy": 0.1}), (STEPS, {}), (STEPS, {"arc_accuracy": 0.4}), (STEPS, {"web_loss": 3.0})]
    told = [json.dumps({"step": step, "results": results}) + "\n" for step, results in lines]
    (cell.folder / "evaluations.jsonl").write_text("".join(told))
    assert metric_of(look(cell), "arc_accuracy") == 0.4
    assert metric_of(look(cell), "other") is None


def test_hours_are_those_of_all_gpus(tmp_path: Path) -> None:
    """10 s of setup and 20 steps of a second on 2 GPUs are a GPU-minute; nothing of it was lost."""
    _, cells = study_and_cells(make_study(tmp_path))
    end_cell(cells[0])
    end_cell(cells[1], gpus=4)
    assert cost_of_all([look(cell) for cell in cells]).gpu_hours == pytest.approx(3 / 60)
    assert look(cells[0]).cost.lost == 0


def test_a_cell_may_move_between_nodes_of_different_size(tmp_path: Path) -> None:
    """Here 25 s on 2 GPUs, an hour in the queue, and 35 s on 8, of which ten steps are done again."""
    _, (cell, *_) = study_and_cells(make_study(tmp_path))
    end_cell(cell, steps=10, code=None)
    events, metrics = (cell.folder / "events.jsonl").read_text(), (cell.folder / "metrics.jsonl").read_text()
    end_cell(cell, began=4630.0, gpus=8)
    for name, before in (("events", events), ("metrics", metrics)):
        path = cell.folder / f"{name}.jsonl"
        path.write_text(before + path.read_text().replace('"generation": 1', '"generation": 2'))
    for t in (995.0, 4625.0):
        note_held(cell.folder, "start", t)
    cost = look(cell).cost
    assert cost.gpu_hours == pytest.approx((25 * 2 + 35 * 8) / 3600)
    assert cost.preempted == pytest.approx((5 + 10) * 8 / 3600)
    assert cost.recomputed == pytest.approx(10 * 8 / 3600)
    assert cost.failures == 0 and cost.lost < cost.gpu_hours


def test_a_cell_that_is_done_does_not_run_again(tmp_path: Path) -> None:
    """Not even as a second job, which a submitter that died may have left."""
    _, (cell, other, *_) = study_and_cells(make_study(tmp_path))
    end_cell(cell)
    end_cell(other, steps=5, code=75)
    assert is_done(cell.folder) and not is_done(other.folder)
    (other.folder / SETTINGS).unlink()
    with pytest.raises(StudyError, match="not the folder of a cell"):
        is_done(other.folder)


def test_other_code_and_libraries_are_refused_by_name(tmp_path: Path) -> None:
    """The first cell records those of all."""
    first = demand_origin(tmp_path / "dir")
    assert demand_origin(tmp_path / "dir") == first
    assert {"python", "torch"} <= first["libraries"].keys() and "train.py" in first["files"]
    other = first | {"libraries": first["libraries"] | {"torch": "1.0"}, "files": first["files"] | {"train.py": "0"}}
    (tmp_path / "dir" / ORIGIN).write_text(json.dumps(other))
    with pytest.raises(StudyError, match=r"the library torch \(1\.0, now .*the code of the trainer \(train\.py\)"):
        demand_origin(tmp_path / "dir")


# The jobs of a study: each cell has one, and never more run at once than asked.


class Queue(FakeSlurm):
    """A queue whose jobs start once the job that they wait for has ended. It dies after ``patience`` jobs."""

    def __init__(self, patience: int = 1000) -> None:
        super().__init__([])
        self.after: dict[int, int] = {}
        self.submitted: list[str] = []
        self.options: list[Sequence[str]] = []
        self.patience = patience

    def submit(self, script: str, options: Sequence[str] = ()) -> int:
        if not self.patience:
            raise SlurmUnavailable("slurmctld does not answer")
        self.patience -= 1
        told = dict(option.removeprefix("--").partition("=")[::2] for option in options)
        number = 100 + len(self.submitted)
        if "dependency" in told:
            *lane, singleton = told["dependency"].split(",")
            assert singleton == "singleton"
            for word in lane:
                self.after[number] = int(word.removeprefix("afterany:"))
        self.submitted.append(told["job-name"])
        self.options.append(options)
        self.scripts[number] = script
        self._jobs.append(Job(number, "pending", "", "u", "p", (), "", None, None, None, 0, told["job-name"]))
        return number

    def cancel(self, job: int) -> None:
        self._jobs = [each for each in self._jobs if each.id != job]

    @property
    def able(self) -> list[int]:
        """The jobs that run, if there is room for all."""
        live = {job.id for job in self._jobs}
        return [job for job in sorted(live) if self.after.get(job) not in live]

    def set_state(self, job: int, state: str) -> None:
        self._jobs = [replace(each, state=state) if each.id == job else each for each in self._jobs]


def sent(tmp_path: Path, queue: Queue) -> list[int]:
    _, cells = study_and_cells(make_study(tmp_path))
    return submit(tmp_path / "study", cells, queue, partition="p", limit=2, ranks=1)


def test_each_cell_has_one_job(tmp_path: Path) -> None:
    """Whether its job waits or runs: submitted again, the study adds none."""
    queue = Queue()
    assert len(sent(tmp_path, queue)) == 6
    queue.set_state(100, "running")
    queue.set_state(101, "completing")
    assert sent(tmp_path, queue) == []
    assert len(set(queue.submitted)) == 6


def test_a_submitter_that_dies_is_continued(tmp_path: Path) -> None:
    """After each job, any number of times."""
    queue = Queue(patience=1)
    for _ in range(5):
        with pytest.raises(SlurmUnavailable):
            sent(tmp_path, queue)
        queue.patience = 1
    assert sent(tmp_path, queue) == [105]
    assert len(queue.submitted) == len(set(queue.submitted)) == 6


def test_the_same_study_in_another_folder_has_jobs_of_its_own(tmp_path: Path) -> None:
    """As the sentence about other code advises."""
    queue = Queue()
    study, cells = study_and_cells(make_study(tmp_path))
    elsewhere = cells_of(study, tmp_path / "again")
    for each in (cells, elsewhere):
        assert len(submit(each[0].folder.parents[1], each, queue, partition="p", limit=2, ranks=1)) == 6
    assert set(jobs_of(elsewhere, queue)) == {cell.name for cell in cells}
    assert len(stop(cells, queue)) == 6 and len(jobs_of(elsewhere, queue)) == 6


def test_what_is_done_gets_no_job(tmp_path: Path) -> None:
    """A cell that failed or was stopped does."""
    _, cells = study_and_cells(make_study(tmp_path))
    for cell, code in zip(cells, (0, 1, 75), strict=False):
        end_cell(cell, steps=20 if not code else 3, code=code)
    queue = Queue()
    sent(tmp_path, queue)
    assert queue.submitted == [cell.run_name for cell in cells[1:]]


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
@pytest.mark.parametrize("seed", range(10))
def test_no_more_run_at_once_than_asked(tmp_path: Path, limit: int, seed: int) -> None:
    """In any order of ends, cancels and submitters that die; and as many run as can while jobs wait."""
    rng, queue = random.Random(seed), Queue()
    path = make_study(tmp_path)
    path.write_text(path.read_text().replace("seeds = 3", "seeds = 12"))
    _, cells = study_and_cells(path)
    for _ in range(60):
        if rng.random() < 0.3 and queue.able:
            queue.cancel(rng.choice(queue.able))
            continue
        queue.patience = rng.randint(0, 3)
        with suppress(SlurmUnavailable):
            submit(tmp_path / "study", cells, queue, partition="p", limit=limit, ranks=1)
        assert len(queue.able) <= limit
    assert queue.able


def test_only_the_jobs_of_the_study_are_cancelled(tmp_path: Path) -> None:
    """Other jobs of the user stay, also those with a similar name."""
    queue = Queue()
    sent(tmp_path, queue)
    _, cells = study_and_cells(make_study(tmp_path))
    others = [
        Job(7, "running", "", "u", "p", (), "", None, None, None, 0, name)
        for name in ("train", cells[0].name, cells[0].run_name[:-1])
    ]
    queue._jobs += others
    assert stop(cells, queue) == list(range(100, 106))
    assert queue.jobs() == others
    assert jobs_of(cells, queue) == {}


def test_a_job_says_what_it_is(tmp_path: Path) -> None:
    """It gives way and is requeued. It checks its code first, then runs the settings of its cell."""
    queue = Queue()
    sent(tmp_path, queue)
    _, cells = study_and_cells(make_study(tmp_path))
    told = set(queue.options[0])
    assert {"--requeue", "--no-kill", "--open-mode=append", "--partition=p", f"--job-name={cells[0].run_name}"} <= told
    assert any(option.startswith("--nice=") for option in told)
    folder = re.escape(str(cells[0].folder))
    wanted = (
        rf"#!/bin/bash\nexec .* ablate cell {folder} -- .* slurm run --run-id {cells[0].run_name} "
        rf"--run-dir {folder} --nproc-per-node 1 --give-way --no-standby -- -m opsd\.trainer {folder}/cell\.toml\n"
    )
    assert re.fullmatch(wanted, queue.scripts[100])
    assert opsd_command({"OPSD": "/opt/opsd -P"}) == ("/opt/opsd", "-P")


@pytest.mark.parametrize("signals", [(), (signal.SIGTERM,), (signal.SIGUSR1, signal.SIGTERM)])
def test_a_job_notes_how_long_it_held_its_node(tmp_path: Path, signals: tuple[int, ...]) -> None:
    """Until it was told to end, or ended; its run gets each signal, and its exit code is that of the job."""
    _, (cell, *_) = study_and_cells(make_study(tmp_path))
    prepare(cell)
    script = "trap 'echo usr1' USR1; trap 'echo term; sleep 1; exit 75' TERM; echo ready; "
    script += '[ -n "$1" ] || exit 0; while :; do sleep 0.1; done'
    command = [sys.executable, "-m", "opsd", "ablate", "cell", str(cell.folder), "--", "sh", "-c", script, "sh"]
    began = time.time()
    process = subprocess.Popen([*command, *(["wait"] if signals else [])], stdout=subprocess.PIPE, text=True)
    forked = time.time()
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for number in signals:
        process.send_signal(number)
        assert process.stdout.readline() == {signal.SIGUSR1: "usr1\n", signal.SIGTERM: "term\n"}[number]
    assert process.wait(20) == (75 if signals else 0)
    ended = time.time()
    process.stdout.close()
    start, end = (json.loads(line) for line in (cell.folder / "held.jsonl").read_text().splitlines())
    assert (start["event"], end["event"]) == ("start", "end")
    assert began - 0.02 < start["t"] < forked + 0.02  # a tick or two
    assert start["t"] < end["t"] <= ended - (1 if signals else 0)


def test_a_job_with_other_code_says_so(tmp_path: Path) -> None:
    """Its cell is refused, which is no failure of its arm, and runs again once the code is that of the study."""
    path = make_study(tmp_path)
    _, (cell, *_) = study_and_cells(path)
    prepare(cell)
    demand_origin(path.with_suffix(""))
    origin = path.with_suffix("") / "origin.json"
    ours = origin.read_text()
    origin.write_text(json.dumps({**json.loads(ours), "files": {}}))
    command = [sys.executable, "-m", "opsd", "ablate", "cell", str(cell.folder), "--", "true"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "the code of the trainer" in refused.stderr
    assert look(cell).state == "refused" and "the code of the trainer" in look(cell).reason
    assert metric_of(look(cell), "loss") is None
    origin.write_text(ours)
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert look(cell).state == "stopped"


def test_jobs_go_where_they_give_way() -> None:
    """To the lowest of the partitions whose jobs are preempted and requeued."""
    high = Partition("train", ("n1", "n2"), 10, "OFF")
    low = Partition("spare", ("n1",), 1, "REQUEUE")
    middle = Partition("dev", ("n2",), 5, "REQUEUE")
    assert spare_partition([high, middle, low]) == "spare"
    for none in ([high], [low], [high, Partition("far", ("n9",), 1, "REQUEUE")], [high, replace(low, state="down")]):
        with pytest.raises(StudyError, match="--partition"):
            spare_partition(none)
