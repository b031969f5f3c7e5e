"""What the hooks report, made into phases and steps of the rank page."""

from __future__ import annotations

import contextlib
import os
import threading
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .layout import Layout
from .resume import SavedSteps
from .steps import ParameterVersions, StepCycle

if TYPE_CHECKING:
    from opsd.client import Reporter

LEAST_SHARE = 4
"""A file smaller than the optimizer's parameters by more than this factor is no checkpoint of them."""
LOOK_EVERY = 16
"""Steps between looks for a page of the program's own, which replaces this one's file: until then nobody reads it."""


class Observer:
    """Phases and steps of one thread: the main one, or the first in which an optimizer steps.

    Nothing is reported before ``begin``, by other threads, after a fork, and once the program has a page of its own.
    ``base`` is the phase outside of all calls that are hooked.
    """

    def __init__(self, client: ModuleType) -> None:
        self._client = client
        self._page: Reporter | None = None
        self._inode = 0
        self._ready = False
        self._thread = threading.main_thread().ident
        self._base = self._training = "setup"
        self._calls: list[tuple[str, object]] = []
        self._without_gradients = 0
        self._evaluates = False
        self._cycle = StepCycle()
        self._versions: ParameterVersions | None = ParameterVersions()
        self._step = 0
        self._stepped = False
        self._parameter_bytes = 0
        self._saves: list[tuple[Any, int]] = []
        self.saved_steps = SavedSteps(None, 0)
        self.layout = Layout(0, 1)

    def begin(self) -> None:
        """The program begins, with the environment of its rank. Its page appears with the first call of a hook."""
        env = os.environ
        folder = env.get("OPSD_RUN_DIR")
        self._ready = "OPSD_RANK_PAGE" in env
        rank = int(env.get("RANK", "0"))
        self.saved_steps = SavedSteps(folder, rank)
        self.layout = Layout(rank, int(env.get("WORLD_SIZE", "1")))

    def finish(self) -> None:
        """The program's main file has ended in good order; what Python does at its exit may take a while.

        A program that trains in another thread goes on.
        """
        if threading.get_ident() != self._thread:
            return
        if self._page is not None:
            self._look_at_saves(self._page)
            self._page.close()
        self.end()

    def end(self) -> None:
        """Report nothing any more."""
        self._ready, self._thread, self._page = False, None, None

    def watches(self) -> bool:
        """Whether a call in this thread is to be reported."""
        if threading.get_ident() != self._thread:
            return False
        return self._page is not None or (self._ready and self._open())

    def _open(self) -> bool:
        path = os.environ.get("OPSD_RANK_PAGE", "")
        if not path or self._written_by_program(path):
            self.end()
            return False
        self._page = self._client.Reporter.from_env("observed")
        with contextlib.suppress(OSError):
            self._inode = os.stat(path).st_ino  # noqa: PTH116
        self.tell_place()
        return True

    def tell_place(self) -> None:
        """Report the rank's place if ``layout`` knows it."""
        if self._page is not None and self.layout.place is not None:
            self._page.place(**self.layout.place)

    def _written_by_program(self, path: str) -> bool:
        """Whether this process has a page that is not ours."""
        try:
            with open(path, "rb") as file:
                header = self._client.HEADER.unpack(file.read(self._client.HEADER.size))
        except Exception:
            return False
        return bool(header[9] == os.getpid())

    # -- phases --------------------------------------------------------------------------------------------------

    def enter(self, phase: str, key: object = None) -> None:
        """A call begins that belongs to ``phase``; ``key`` tells apart calls that need not end."""
        self._calls.append((phase, key))
        self._show(phase)

    def leave(self) -> None:
        """The call that began last ends."""
        if self._calls:
            self._calls.pop()
        self._show(self._calls[-1][0] if self._calls else self._base)

    def keep_or_enter(self, phase: str) -> None:
        """The same as ``enter``; but waits that are part of an evaluation or a checkpoint belong to that."""
        current = self._calls[-1][0] if self._calls else self._base
        self.enter(current if current in ("evaluation", "checkpoint") else phase)

    def _show(self, phase: str) -> None:
        if self._page is not None:
            self._page.enter(phase)

    def _trains(self) -> None:
        """Gradients or batches are made: what follows is training."""
        self._evaluates = False
        self._base = self._training = "forward"

    def batch(self) -> None:
        """A DataLoader has given a batch."""
        if self._base != "evaluation":
            self._base = self._training = "forward"
        self.leave()

    def begin_backward(self, losses: Any = ()) -> None:
        """The backward pass of ``losses`` begins.

        As long as no optimizer has been seen, a pass before which parameters have changed begins another step.
        """
        self._trains()
        if self._versions is not None and not self._calls:
            with contextlib.suppress(Exception):
                if self._versions.changed(losses):
                    self._count(None)
        self.enter("backward")

    def no_gradients(self) -> None:
        """Gradients are off."""
        self._without_gradients += 1
        if self._evaluates and self._without_gradients == 1:
            self._evaluation()

    def gradients(self) -> None:
        self._without_gradients = max(0, self._without_gradients - 1)

    def mode(self, *, training: bool) -> None:
        """A module has been put into training or evaluation mode."""
        self._evaluates = not training
        if training and self._base == "evaluation":
            self._base = self._training
            if not self._calls:
                self._show(self._base)
        elif not training and self._without_gradients:
            self._evaluation()

    def _evaluation(self) -> None:
        if self._base != "evaluation" and not self._calls:
            self._base = "evaluation"
            self._show("evaluation")

    # -- steps ---------------------------------------------------------------------------------------------------

    def begin_update(self, optimizer: Any, key: object, *, closure: bool = False) -> None:
        """An optimizer begins its step, within which a ``closure`` may compute the gradients.

        An unfinished step of the same ``key`` was left by an exception.
        """
        if threading.get_ident() != self._thread and not self._stepped:
            self._thread = threading.get_ident()
        if not self.watches():
            return
        self._trains()
        left = next((index for index, (_, known) in enumerate(self._calls) if known == key), None)
        if left is not None:
            del self._calls[left:]
        self.enter("forward" if closure else "optimizer", key)

    def end_update(self, optimizer: Any, key: object) -> None:
        """The step of an optimizer ends; one within another's does not count."""
        if threading.get_ident() != self._thread or self._page is None:
            return
        while self._calls and self._calls.pop()[1] != key:
            pass
        self._versions = None
        if not self._calls and self._cycle.stepped(id(optimizer)):
            self._count(optimizer)
        self._show(self._calls[-1][0] if self._calls else self._base)

    def _count(self, optimizer: Any) -> None:
        page = self._page
        assert page is not None
        if (not self._stepped or self._step % LOOK_EVERY == 0) and self._replaced():
            self.end()
            return
        if not self._stepped:
            self._stepped = True
            self._step = self.saved_steps.next_step
            self._parameter_bytes = _parameter_bytes(optimizer)
        page.step(step=self._step, learning_rate=_learning_rate(optimizer))
        self._step += 1
        if self._saves:
            self._look_at_saves(page)

    def _replaced(self) -> bool:
        """Whether the program has made a page of its own since."""
        try:
            return os.stat(os.environ["OPSD_RANK_PAGE"]).st_ino != self._inode  # noqa: PTH116
        except (OSError, KeyError):
            return False

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def saved(self, size: int | None, path: str | None, *, later: Any = None) -> None:
        """A save has returned, from any thread: of ``size`` bytes (None: a whole checkpoint), into memory or ``path``.

        ``later`` is the future of one that goes on in the background.
        """
        if self._page is None or not self._stepped:
            return
        if size is not None and size * LEAST_SHARE < self._parameter_bytes:
            return
        step = self._step - 1
        self.saved_steps.note(path, size or 0, step)
        if later is None and path is not None and threading.get_ident() == self._thread:
            self._page.checkpoint_committed(step)
        else:
            self._saves.append((later, step))

    def _look_at_saves(self, page: Reporter) -> None:
        """What was saved into memory or in another thread is on disk by the next step, futures say so themselves."""
        for later, step in [save for save in self._saves if save[0] is None or save[0].done()]:
            self._saves.remove((later, step))
            if later is None or later.exception() is None:
                page.checkpoint_committed(step)

    def loaded(self, path: str) -> None:
        """Something was read from ``path``: before the first step, a checkpoint from which the program goes on."""
        if not self._stepped:
            self.saved_steps.loaded(path)

    def loaded_optimizer(self, state: Any) -> None:
        """An optimizer has read its state, which may have the number of its steps."""
        if not self._stepped:
            self.saved_steps.counted(_steps_of(state))


def _parameter_bytes(optimizer: Any) -> int:
    try:
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        return sum(one.numel() * one.element_size() for one in parameters)
    except Exception:
        return 0


def _learning_rate(optimizer: Any) -> float:
    """That of the first group, nan if it is a tensor, which it may take a wait for the GPU to read."""
    try:
        rate = optimizer.param_groups[0]["lr"]
    except Exception:
        return float("nan")
    return float(rate) if isinstance(rate, int | float) else float("nan")


def _steps_of(state: Any) -> int:
    """How many steps a state of Adam and its like says that there were, 0 if it does not."""
    with contextlib.suppress(Exception):
        return max((int(one["step"]) for one in state["state"].values() if "step" in one), default=0)
    return 0
