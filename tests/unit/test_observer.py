"""What hooks tell, made into the phases and steps of a rank page."""

from __future__ import annotations

import math
import os
import threading
import time
from concurrent.futures import Future
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import opsd.client
from opsd.client import Reporter
from opsd.launch.observe.observer import (
    KEPT,
    KINDS,
    LEAVES,
    LOOK_EVERY,
    Layout,
    Observer,
    ParameterVersions,
    SavedSteps,
    StepCycle,
    leaves,
)
from opsd.rank_page import RankPage, read_page
from tests.fakes.graph import Loss, Parameter

# What hooks tell, made into the phases and steps of a rank page.


class Optimizer:
    """An optimizer with one parameter of ``size`` bytes."""

    def __init__(self, size: int = 4000, lr: Any = 0.1) -> None:
        self.param_groups = [{"params": [self], "lr": lr}]
        self._size = size

    def numel(self) -> int:
        return self._size // 4

    def element_size(self) -> int:
        return 4


class Program:
    """What an unchanged program does, as its hooks tell it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.observer = Observer(opsd.client)
        self.observer.begin()
        self.optimizer = Optimizer()

    @property
    def page(self) -> RankPage:
        return read_page(self.path)

    def batch(self) -> None:
        if self.observer.watches():
            self.observer.keep_or_enter("data")
            self.observer.batch()

    def backward(self, loss: object = None) -> None:
        if self.observer.watches():
            self.observer.begin_backward(loss)
            self.observer.leave()

    def update(self, optimizer: Optimizer | None = None, *, raises: bool = False) -> None:
        optimizer = optimizer or self.optimizer
        self.observer.begin_update(optimizer, id(optimizer))
        if not raises:
            self.observer.end_update(optimizer, id(optimizer))

    def step(self) -> None:
        self.batch()
        self.backward()
        self.update()


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    monkeypatch.setenv("OPSD_RANK_PAGE", str(tmp_path / "rank-0000.page"))
    monkeypatch.setenv("OPSD_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    return Program(tmp_path / "rank-0000.page")


def test_a_program_that_calls_nothing_has_no_page(program: Program) -> None:
    """One that never trains is judged by other means."""
    assert not program.path.exists()


def test_steps_of_a_loop(program: Program) -> None:
    """Step, step time, phases and learning rate; tokens, loss and norm are not known."""
    for _ in range(3):
        program.step()
    page = program.page
    assert (page.source, page.observed, page.steps_reported, page.tokens) == ("observed", True, 3, 0)
    assert [record.step for record in page.steps] == [1, 2, 3]
    last = page.steps[-1]
    assert last.learning_rate == 0.1
    assert math.isnan(last.loss)
    assert math.isnan(last.grad_norm)
    assert min(last.phase("data"), last.phase("backward"), last.phase("optimizer")) > 0
    assert sum(last.phase_s) == pytest.approx(last.duration_s, abs=1e-6)


def test_gradient_accumulation_is_one_step(program: Program) -> None:
    """64 micro-batches."""
    for _ in range(64):
        program.batch()
        program.backward()
    program.update()
    assert program.page.steps_reported == 1


def test_a_step_that_the_scaler_skips_counts(program: Program) -> None:
    """The program has made its step, whether its optimizer was called or not, and once."""
    for skipped in (True, False, False):
        program.backward()
        key = "scaler", id(program.optimizer)
        program.observer.begin_update(program.optimizer, key)
        if not skipped:
            program.update()
        program.observer.end_update(program.optimizer, key)
    assert program.page.steps_reported == 3


def test_a_step_that_raised_does_not_count(program: Program) -> None:
    """The program has caught an error and goes on; nothing is left of the step that was cut off."""
    program.step()
    program.update(raises=True)
    program.step()
    page = program.page
    assert page.steps_reported == 2
    assert page.phase == "forward"


def test_an_optimizer_within_another_does_not_count(program: Program) -> None:
    """A wrapper that shards the states has an optimizer of its own inside."""
    inner = Optimizer()
    for _ in range(3):
        program.observer.begin_update(program.optimizer, id(program.optimizer))
        program.update(inner)
        program.observer.end_update(program.optimizer, id(program.optimizer))
    assert program.page.steps_reported == 3


def test_a_closure_computes_gradients_within_the_step(program: Program) -> None:
    """Lightning, L-BFGS: the forward and backward passes are not the optimizer's time."""
    program.batch()
    program.observer.begin_update(program.optimizer, id(program.optimizer), closure=True)
    assert program.page.phase == "forward"
    program.observer.begin_backward()
    assert program.page.phase == "backward"
    program.observer.leave()
    program.observer.end_update(program.optimizer, id(program.optimizer))
    assert program.page.steps_reported == 1


@pytest.mark.parametrize("gradients_first", [True, False])
def test_evaluation_is_seen(program: Program, gradients_first: bool) -> None:
    """No gradients and a module in evaluation mode, in either order; batches and collectives belong to it."""
    observer = program.observer
    program.step()
    calls = [observer.no_gradients, lambda: observer.mode(training=False)]
    for call in calls if gradients_first else calls[::-1]:
        call()
    since = program.page.phase_since
    assert program.page.phase == "evaluation"
    program.batch()
    observer.keep_or_enter("collective")
    assert program.page.phase == "evaluation"
    assert program.page.phase_since > since, "each is progress"
    observer.leave()
    observer.gradients()
    observer.mode(training=True)
    assert program.page.phase == "forward"


def test_evaluation_ends_with_the_next_training(program: Program) -> None:
    """A program that does not put its module back into training mode."""
    program.step()
    program.observer.mode(training=False)
    program.observer.no_gradients()
    program.observer.gradients()
    assert program.page.phase == "evaluation"
    program.backward()
    assert program.page.phase == "forward"


def test_a_teacher_in_evaluation_mode_is_no_evaluation(program: Program) -> None:
    """It was set once; each step then calls it without gradients."""
    program.observer.mode(training=False)
    program.step()
    program.observer.no_gradients()
    assert program.page.phase == "forward"
    program.observer.gradients()


def test_an_evaluation_before_the_first_step_leaves_the_setup(program: Program) -> None:
    """NanoGPT evaluates first; what follows may compile for minutes."""
    observer = program.observer
    assert observer.watches()
    observer.no_gradients()
    observer.mode(training=False)
    assert program.page.phase == "evaluation"
    observer.mode(training=True)
    observer.gradients()
    assert program.page.phase == "setup"


def test_a_collective_while_saving_belongs_to_the_save(program: Program) -> None:
    """Ranks that gather a checkpoint have the time of a checkpoint."""
    program.step()
    program.observer.enter("checkpoint")
    program.observer.keep_or_enter("collective")
    assert program.page.phase == "checkpoint"
    program.observer.leave()
    program.observer.leave()
    program.observer.keep_or_enter("collective")
    assert program.page.phase == "collective"


def test_a_reporter_of_the_program_keeps_the_word(program: Program) -> None:
    """One that was there first: nothing is observed."""
    own = Reporter(program.path)
    program.step()
    own.step(step=41, loss=2.0)
    assert (program.page.source, program.page.steps_reported) == ("client", 1)
    assert not program.observer.watches()


def test_a_reporter_that_comes_later_takes_the_word(program: Program) -> None:
    """Steps are not counted twice from then on, and soon nothing is observed."""
    program.step()
    own = Reporter(program.path, source="adapter")
    program.step()
    own.step(step=1)
    assert (program.page.source, program.page.steps_reported) == ("adapter", 1)
    for _ in range(LOOK_EVERY):
        program.step()
    assert (program.page.source, program.page.steps_reported) == ("adapter", 1)
    assert not program.observer.watches()


def test_other_threads_report_nothing(program: Program) -> None:
    """Threads that fetch data or write files are no phases of the training."""
    program.step()
    before = program.page.phase_since
    other = threading.Thread(target=program.step)
    other.start()
    other.join()
    assert (program.page.steps_reported, program.page.phase_since) == (1, before)


def test_a_program_may_train_in_another_thread(program: Program) -> None:
    """The first thread whose optimizer steps is the one that counts."""
    other = threading.Thread(target=lambda: [program.step() for _ in range(3)])
    other.start()
    other.join()
    program.observer.finish()
    assert (program.page.steps_reported, program.page.state) == (3, "running")


def test_a_child_process_reports_nothing(program: Program) -> None:
    """Workers of a loader are forked with the page in their memory."""
    os.register_at_fork(after_in_child=program.observer.end)
    program.step()
    child = os.fork()
    if child == 0:
        program.step()
        os._exit(0)
    os.waitpid(child, 0)
    assert program.page.steps_reported == 1


def test_a_program_that_has_ended_says_so(program: Program) -> None:
    """Python's exit is no step that takes long."""
    program.step()
    program.observer.saved(4_000, None)
    program.observer.finish()
    program.step()
    assert (program.page.state, program.page.steps_reported, program.page.committed_step) == ("finished", 1, 1)


def test_a_save_of_the_models_size_is_a_checkpoint(program: Program, tmp_path: Path) -> None:
    """It is durable when the call returns, a list of losses is none, and one into memory is by the next step."""
    observer = program.observer
    observer.saved(10_000, str(tmp_path / "weights.pt"))
    program.step()
    observer.saved(100, str(tmp_path / "losses.pt"))
    assert program.page.committed_step is None
    observer.saved(4_000, str(tmp_path / "a.pt"))
    assert program.page.committed_step == 1
    program.step()
    observer.saved(4_000, None)
    assert program.page.committed_step == 1
    program.step()
    assert program.page.committed_step == 2


def test_a_save_in_the_background_counts_when_it_is_done(program: Program, tmp_path: Path) -> None:
    """One that fails does not."""
    program.step()
    first: Future[None] = Future()
    second: Future[None] = Future()
    program.observer.saved(None, str(tmp_path / "1"), later=first)
    program.step()
    program.observer.saved(None, str(tmp_path / "2"), later=second)
    assert program.page.committed_step is None
    first.set_result(None)
    second.set_exception(OSError("full"))
    program.step()
    assert program.page.committed_step == 1


def test_steps_go_on_from_the_checkpoint_that_was_loaded(program: Program, tmp_path: Path) -> None:
    """The numbers are the run's, over restarts; a load later on changes nothing."""
    for _ in range(5):
        program.step()
    (tmp_path / "a.pt").write_bytes(b"x")
    program.observer.saved(4_000, str(tmp_path / "a.pt"))
    program.path.unlink()
    again = Program(program.path)
    again.observer.loaded(str(tmp_path / "a.pt"))
    again.step()
    again.observer.loaded_optimizer({"state": {0: {"step": 900}}})
    again.step()
    assert [record.step for record in again.page.steps] == [6, 7]


@pytest.mark.parametrize(("state", "step"), [({0: {"step": 12.0}}, 13), ({0: {"momentum": 1}}, 1), ({}, 1)])
def test_an_optimizer_may_know_its_steps(program: Program, state: dict[int, Any], step: int) -> None:
    """Adam counts its steps; others do not, and the steps begin at 1."""
    program.observer.loaded_optimizer({"state": state})
    program.step()
    assert program.page.steps[0].step == step


def test_a_learning_rate_that_is_a_tensor_is_not_read(program: Program) -> None:
    """To read it could wait for the GPU."""
    program.update(Optimizer(lr=object()))
    assert program.page.steps[0].learning_rate is None


def test_steps_of_an_optimizer_that_torch_does_not_know(program: Program) -> None:
    """A compiled or hand-written one writes to the parameters; accumulation does not. The last step is not over."""
    parameter = Parameter()
    for _ in range(5):
        for _ in range(3):
            program.batch()
            program.backward(Loss(parameter))
        parameter.write()
    page = program.page
    assert [record.step for record in page.steps] == [1, 2, 3, 4]
    assert page.steps[-1].phase("backward") > 0


def test_a_step_is_counted_by_one_rule(program: Program) -> None:
    """An optimizer that torch knows writes to the parameters as well."""
    parameter = Parameter()
    for _ in range(5):
        program.backward(Loss(parameter))
        parameter.write()
        program.update()
    assert program.page.steps_reported == 5


# A rank's place in the layout, from the meshes and groups of programs that report nothing.


SIZES = st.integers(1, 3)

MEGATRON = {
    "dp": "DATA_PARALLEL_GROUP", "pp": "PIPELINE_MODEL_PARALLEL_GROUP",
    "tp": "TENSOR_MODEL_PARALLEL_GROUP", "cp": "CONTEXT_PARALLEL_GROUP",
}  # fmt: skip


@given(sizes=st.tuples(SIZES, SIZES, SIZES, SIZES), which=st.floats(0, 0.999))
def test_groups_of_megatron_give_a_rank_its_coordinates(sizes: tuple[int, ...], which: float) -> None:
    """The program makes the groups of all ranks, also those without this one, and groups of its own."""
    places = [dict(zip(MEGATRON, place, strict=True)) for place in product(*map(range, sizes))]
    rank = int(which * len(places))
    layout = Layout(rank, len(places))
    layout.group("", range(len(places)))
    layout.group("EMBEDDING_GROUP", [0, len(places) - 1])
    for kind, description in MEGATRON.items():
        groups: dict[tuple[int, ...], list[int]] = {}
        for other, place in enumerate(places):
            groups.setdefault(tuple(value for name, value in place.items() if name != kind), []).append(other)
        for ranks in groups.values():
            layout.group(description, ranks)
    assert layout.place == places[rank]


@pytest.mark.parametrize(
    ("names", "shape", "at", "place"),
    [
        (("dp", "tp"), (4, 8), (2, 5), (2, 0, 5, 0)),
        (("pp", "dp_replicate", "dp_shard", "cp", "tp"), (2, 2, 2, 2, 2), (1, 1, 0, 1, 0), (2, 1, 0, 1)),
        (("data_parallel", "tensor_parallel"), (16, 2), (7, 1), (7, 0, 1, 0)),
        (("replicate", "shard"), (4, 8), (1, 3), (11, 0, 0, 0)),
    ],
)
def test_named_dimensions_of_a_mesh(
    names: tuple[str, ...], shape: tuple[int, ...], at: tuple[int, ...], place: tuple[int, ...]
) -> None:
    """FSDP with tensor parallelism, torchtitan's five, Lightning's two, hybrid sharding."""
    layout = Layout(0, 32)
    layout.mesh(names, shape, at)
    assert layout.place == dict(zip(KINDS, place, strict=True))


def test_what_is_not_known_tells_nothing() -> None:
    """Experts, meshes of some ranks, dimensions without a name, groups that do not make up all ranks."""
    layout = Layout(3, 8)
    layout.mesh(("dp", "ep"), (4, 2), (1, 1))
    layout.mesh(("dp", "tp"), (2, 2), (1, 1))
    layout.mesh((), (8,), (3,))
    layout.group("TENSOR_MODEL_PARALLEL_GROUP", [2, 3])
    layout.group("PIPELINE_MODEL_PARALLEL_GROUP", [3])
    layout.group("DATA_PARALLEL_GROUP", [1, 3])
    assert layout.place is None


def test_a_mesh_of_one_dimension_does_not_replace_a_richer_one() -> None:
    """FSDP makes a mesh over all ranks beside the program's own."""
    layout = Layout(3, 8)
    layout.mesh(("pp", "dp"), (2, 4), (0, 3))
    layout.mesh(("dp",), (8,), (3,))
    assert layout.place == {"dp": 3, "pp": 0, "tp": 0, "cp": 0}


def test_a_place_that_is_known_before_the_page_is_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are made first, the page comes with the first batch."""
    for name, value in {"OPSD_RANK_PAGE": str(tmp_path / "rank-0001.page"), "RANK": "1", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    observer = Observer(opsd.client)
    observer.begin()
    observer.layout.mesh(("dp", "tp"), (2, 2), (0, 1))
    observer.tell_place()
    assert observer.watches()
    assert read_page(tmp_path / "rank-0001.page").place == (0, 0, 1, 0)


# What counts as a step of a program with one optimizer or several.


def counted(turns: list[int]) -> list[int]:
    """The positions at which a step is counted."""
    cycle = StepCycle()
    return [index for index, optimizer in enumerate(turns) if cycle.stepped(optimizer)]


@given(optimizers=st.integers(1, 6), steps=st.integers(1, 50))
def test_each_round_of_all_optimizers_is_one_step(optimizers: int, steps: int) -> None:
    """One optimizer, a GAN's two, or Muon beside AdamW: as many steps as the program has made."""
    turns = list(range(optimizers)) * steps
    found = counted(turns)
    assert len(found) == steps
    assert all(index % optimizers == optimizers - 1 for index in found[1:]), "from the second on at the end of a round"


def test_the_first_step_is_counted_at_once() -> None:
    """A program whose steps take minutes is not without progress until its second."""
    assert counted([7]) == [0]


@given(critics=st.integers(2, 8), rounds=st.integers(1, 20), first=st.booleans())
def test_an_optimizer_that_steps_more_rarely_does_not_count(critics: int, rounds: int, first: bool) -> None:
    """Five steps of the critic for one of the generator are five steps, to within one at the beginning."""
    turns = ([1] if first else []) + ([0] * critics + [1]) * rounds
    assert abs(len(counted(turns)) - critics * rounds) <= 2


@given(before=st.integers(1, 20), after=st.integers(4, 30))
def test_another_optimizer_takes_over(before: int, after: int) -> None:
    """A program that goes on with a new optimizer keeps counting, but for the first steps."""
    found = counted([0] * before + [1] * after)
    assert before + after - 3 <= len(found) <= before + after


@given(st.lists(st.integers(0, 4), max_size=200))
def test_no_more_steps_than_optimizers_have_made(turns: list[int]) -> None:
    """Whatever the order, nothing is counted twice."""
    assert len(counted(turns)) <= len(turns)
    assert not turns or counted(turns)[0] == 0


# Which step a restarted program goes on from.


def save(saved: SavedSteps, path: Path, step: int, content: bytes = b"weights") -> None:
    path.write_bytes(content)
    saved.note(str(path), len(content), step)


def test_the_step_of_the_checkpoint_that_is_loaded(tmp_path: Path) -> None:
    """A later process of the rank counts on from there."""
    save(SavedSteps(str(tmp_path), 1), tmp_path / "a.pt", 9)
    later = SavedSteps(str(tmp_path), 1)
    later.loaded(str(tmp_path / "a.pt"))
    assert later.next_step == 10


def test_rank_0_saves_for_all(tmp_path: Path) -> None:
    """A rank that has saved nothing itself knows what rank 0 has."""
    save(SavedSteps(str(tmp_path), 0), tmp_path / "a.pt", 9)
    other = SavedSteps(str(tmp_path), 5)
    other.loaded(str(tmp_path / "a.pt"))
    assert other.next_step == 10


def test_a_file_that_was_renamed_is_known(tmp_path: Path) -> None:
    """Careful programs save beside the old checkpoint and put it in its place then."""
    saved = SavedSteps(str(tmp_path), 0)
    save(saved, tmp_path / "new", 4)
    (tmp_path / "new").rename(tmp_path / "a.pt")
    later = SavedSteps(str(tmp_path), 0)
    later.loaded(str(tmp_path / "a.pt"))
    assert later.next_step == 5


def test_a_file_that_was_made_in_memory_is_known_by_its_size(tmp_path: Path) -> None:
    """Of buffers of one size, the file was the last before it was written; other sizes are other things."""
    saved = SavedSteps(str(tmp_path), 0)
    now = time.time()
    saved.note(None, 7, 9)
    (tmp_path / "a.ckpt").write_bytes(b"weights")
    os.utime(tmp_path / "a.ckpt", (now, now))
    assert resumed(tmp_path, "a.ckpt") == 10
    saved.note(None, 7, 19)
    (tmp_path / "b.ckpt").write_bytes(b"weights")
    assert resumed(tmp_path, "b.ckpt") == 20
    (tmp_path / "c.ckpt").write_bytes(b"other weights")
    assert resumed(tmp_path, "c.ckpt") == 1
    os.utime(tmp_path / "b.ckpt", (now - 60, now - 60))
    assert resumed(tmp_path, "b.ckpt") == 1, "older than all that was saved"


def resumed(folder: Path, name: str) -> int:
    """The next step of a process that loads a file."""
    later = SavedSteps(str(folder), 0)
    later.loaded(str(folder / name))
    return later.next_step


def test_a_path_that_was_written_again_has_its_newest_step(tmp_path: Path) -> None:
    """One checkpoint that is always overwritten."""
    saved = SavedSteps(str(tmp_path), 0)
    for step in (9, 19, 29):
        save(saved, tmp_path / "a.pt", step)
    later = SavedSteps(str(tmp_path), 0)
    later.loaded(str(tmp_path / "a.pt"))
    assert later.next_step == 30


def test_a_file_of_nobody_is_no_checkpoint(tmp_path: Path) -> None:
    """Pretrained weights, or data: the steps begin at 1."""
    save(SavedSteps(str(tmp_path), 0), tmp_path / "a.pt", 9)
    (tmp_path / "base.pt").write_bytes(b"pretrained")
    later = SavedSteps(str(tmp_path), 0)
    later.loaded(str(tmp_path / "base.pt"))
    later.loaded(str(tmp_path / "missing.pt"))
    assert later.next_step == 1


def test_the_optimizers_own_count_where_no_file_is_known(tmp_path: Path) -> None:
    """A checkpoint of another run, or in a form that is not hooked; a file of this run knows better."""
    save(SavedSteps(str(tmp_path), 0), tmp_path / "a.pt", 9)
    later = SavedSteps(str(tmp_path), 0)
    later.counted(7)
    assert later.next_step == 8
    later.loaded(str(tmp_path / "a.pt"))
    assert later.next_step == 10


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    """A run of thousands of checkpoints leaves a small file, and a damaged one is as good as none."""
    saved = SavedSteps(str(tmp_path), 0)
    for step in range(3 * KEPT):
        save(saved, tmp_path / f"{step}.pt", step, str(step).encode() * 40)
    (file,) = (tmp_path / "observed").iterdir()
    assert file.stat().st_size < 200 * KEPT
    file.write_text("[[1], 2, {")
    later = SavedSteps(str(tmp_path), 0)
    later.loaded(str(tmp_path / "47.pt"))
    assert later.next_step == 1


def test_a_run_without_a_folder_counts_from_1(tmp_path: Path) -> None:
    """Nothing is written then."""
    saved = SavedSteps(None, 0)
    save(saved, tmp_path / "a.pt", 9)
    saved.loaded(str(tmp_path / "a.pt"))
    assert saved.next_step == 1


# Writes to parameters between backward passes: the steps of optimizers that torch does not know.


def test_a_write_between_two_passes_is_seen_once() -> None:
    """Nothing is known before the first pass."""
    parameter, versions = Parameter(), ParameterVersions()
    parameter.write()
    assert not versions.changed(Loss(parameter))
    assert not versions.changed(Loss(parameter))
    parameter.write()
    parameter.write()
    assert versions.changed(Loss(parameter))
    assert not versions.changed(Loss(parameter))


def test_one_parameter_of_those_looked_at_is_enough() -> None:
    """Others are frozen, or inputs that need a gradient."""
    many, versions = [Parameter() for _ in range(LEAVES)], ParameterVersions()
    versions.changed((Loss(*many),))
    many[1].write()
    assert versions.changed((Loss(*many),))


def test_parameters_that_are_gone_are_replaced() -> None:
    """A program trains one model after another, and the tensors of the first must not stay in memory."""
    versions = ParameterVersions()
    for _ in range(2):
        parameter = Parameter()
        seen = []
        for _ in range(3):
            seen.append(versions.changed(Loss(parameter)))
            parameter.write()
        assert seen == [False, True, True]
        del parameter


def test_a_loss_without_a_graph_has_none() -> None:
    """Such as a number, or nothing at all."""
    assert leaves(None) == leaves([]) == leaves(1.0) == []


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_torch_counts_the_writes_of_any_optimizer(*, compiled: bool) -> None:
    """One that is written by hand, and a compiled step; a forward pass writes nothing to a parameter."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    model, versions = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)), ParameterVersions()
    optimizer = torch.optim.SGD(model.parameters())

    def by_hand() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad

    update = torch.compile(optimizer.step, backend="aot_eager") if compiled else by_hand
    seen = []
    for step in (lambda: None, update, update, lambda: None):
        loss = model(torch.randn(2, 4)).sum()
        seen.append(versions.changed(loss))
        loss.backward()
        step()
    assert seen == [False, False, True, True]
