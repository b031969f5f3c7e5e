"""What hooks tell, made into the phases and steps of a rank page."""

from __future__ import annotations

import math
import os
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import opsd.client
from opsd.client import Reporter
from opsd.launch.observe.observer import LOOK_EVERY, Observer
from opsd.rank_page import RankPage, read_page
from tests.fakes.graph import Loss, Parameter


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
