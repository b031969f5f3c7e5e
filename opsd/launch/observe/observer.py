"""What the hooks report, made into phases and steps of the rank page."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import threading
import time
import weakref
from collections.abc import Sequence
from math import prod
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

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


KINDS = ("dp", "pp", "tp", "cp")

_DIMENSIONS = {
    "dp": ("dp", "data", "data_parallel", "ddp", "dp_replicate", "dp_shard", "replicate", "shard", "fsdp", "batch"),
    "pp": ("pp", "pipe", "pipeline", "pipeline_parallel", "stage"),
    "tp": ("tp", "tensor", "tensor_parallel", "model", "model_parallel", "mp"),
    "cp": ("cp", "context", "context_parallel", "sp", "sequence", "sequence_parallel"),
}
_KIND_OF = {name: kind for kind, names in _DIMENSIONS.items() for name in names}
_GROUPS = {
    "data_parallel_group": "dp",
    "pipeline_model_parallel_group": "pp",
    "tensor_model_parallel_group": "tp",
    "context_parallel_group": "cp",
}


class Layout:
    """The place of ``rank`` among ``world`` ranks: ``place`` has a coordinate for each of ``KINDS``, or is None."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._groups: dict[str, tuple[int, int]] = {}
        self._dimensions = 0
        self.place: dict[str, int] | None = None

    def mesh(self, names: Sequence[str], shape: Sequence[int], at: Sequence[int]) -> None:
        """A mesh with these dimensions, in which this rank is ``at``. One with fewer dimensions replaces none."""
        kinds = [_KIND_OF.get(name.lower(), "") for name in names]
        if not all(kinds) or not len(kinds) == len(shape) == len(at) or prod(shape) != self._world:
            return
        if len(kinds) < self._dimensions:
            return
        place = dict.fromkeys(KINDS, 0)
        for kind, length, index in zip(kinds, shape, at, strict=True):
            place[kind] = place[kind] * length + index
        self.place, self._dimensions = place, len(kinds)

    def group(self, description: str, ranks: Sequence[int]) -> None:
        """A group with this description; those of the four kinds together must make up all ranks."""
        kind = _GROUPS.get(description.lower())
        if kind is None or self._rank not in ranks:
            return
        self._groups[kind] = ranks.index(self._rank), len(ranks)
        if len(self._groups) >= len(KINDS) - 1 and prod(size for _, size in self._groups.values()) == self._world:
            self.place = dict.fromkeys(KINDS, 0) | {name: index for name, (index, _) in self._groups.items()}


FOLDER = "observed"
KEPT = 16


class SavedSteps:
    """The steps of the newest saves of this rank, kept in the run's ``folder`` for the processes after it.

    Most programs let rank 0 save for all: what a rank has not saved itself is looked up with rank 0. A file is known by
    its path, or, once renamed, by its inode and size. What was saved into memory, as Lightning does before it writes a
    file, is taken for the next file of exactly that size.
    """

    def __init__(self, folder: str | None, rank: int) -> None:
        self._files = [Path(folder, FOLDER, f"rank-{one:04d}.json") for one in (rank, 0)] if folder else []
        self._own: list[list[Any]] | None = None
        self._found: int | None = None
        self._counted = 0

    @property
    def next_step(self) -> int:
        """The number of the first step of this process, from 1: after the newest checkpoint that it has loaded.

        Else after as many as the loaded state of an optimizer has counted.
        """
        return (self._found if self._found is not None else self._counted) + 1

    def note(self, path: str | None, size: int, step: int) -> None:
        """A checkpoint of ``size`` bytes was saved at ``path``, None: into memory, after ``step``."""
        if not self._files:
            return
        own = _read(self._files[0]) if self._own is None else self._own
        mark = (_IN_MEMORY, 0, size, time.time()) if path is None else _mark(path)
        self._own = [*(entry for entry in own if path is None or entry[0] != mark[0]), [*mark, step]][-KEPT:]
        draft = self._files[0].with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            draft.parent.mkdir(exist_ok=True)
            draft.write_text(json.dumps(self._own), encoding="utf-8")
            draft.replace(self._files[0])

    def loaded(self, path: str) -> None:
        """This process reads ``path``."""
        path, inode, size, written = _mark(path)
        for file in dict.fromkeys(self._files):
            entries = _read(file)
            steps = [entry[-1] for entry in entries if entry[0] == path or (size and entry[1:3] == [inode, size])]
            buffers = [entry for entry in entries if entry[0] == _IN_MEMORY and size and entry[2] == size]
            if not steps:
                steps = [entry[-1] for entry in buffers if entry[3] <= written + _CLOCKS_S][-1:]
            if steps:
                self._found = max(steps if self._found is None else [*steps, self._found])

    def counted(self, steps: int) -> None:
        """The state of an optimizer that was loaded has seen so many steps."""
        self._counted = max(self._counted, steps)


def _read(file: Path) -> list[list[Any]]:
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [entry for entry in entries if isinstance(entry, list) and len(entry) == len(_FIELDS)]


_FIELDS = ("path", "inode", "size", "written", "step")
_IN_MEMORY = ""
_CLOCKS_S = 1.0
"""How much the clock of a file server may be behind."""


def _mark(path: str) -> tuple[str, int, int, float]:
    """The absolute path; inode, size and wall second of the last change of a file, 0 of a folder or of nothing."""
    real = Path(path).resolve()
    with contextlib.suppress(OSError):
        info = real.stat()
        if stat.S_ISREG(info.st_mode):
            return str(real), info.st_ino, info.st_size, info.st_mtime
    return str(real), 0, 0, 0.0


LEAVES = 4
"""Parameters that are looked at; an input that needs a gradient may be among them."""
MAX_NODES = 10_000
"""Of the graph of a backward pass, in which they are searched."""


class ParameterVersions:
    """Whether parameters have been written to between two backward passes: torch counts the writes of each tensor.

    So steps are seen of optimizers that are compiled, or are no ``torch.optim``.
    """

    def __init__(self) -> None:
        self._known: list[tuple[weakref.ref[Any], int]] = []

    def changed(self, losses: Any) -> bool:
        """Whether those of an earlier pass have been written to since; the next pass, of ``losses``, begins."""
        alive = [(ref, tensor, version) for ref, version in self._known if (tensor := ref()) is not None]
        changed = any(tensor._version != version for _, tensor, version in alive)
        self._known = [(ref, tensor._version) for ref, tensor, _ in alive]
        if not self._known:
            self._known = [(weakref.ref(tensor), tensor._version) for tensor in leaves(losses)]
        return changed


def leaves(losses: Any) -> list[Any]:
    """Some of the tensors that a backward pass computes gradients for."""
    tensors = losses if isinstance(losses, list | tuple) else (losses,)
    nodes, seen, found = [getattr(tensor, "grad_fn", None) for tensor in tensors], set[int](), list[Any]()
    while nodes and len(found) < LEAVES and len(seen) < MAX_NODES:
        node = nodes.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if (tensor := getattr(node, "variable", None)) is not None:
            found.append(tensor)
        else:
            nodes += [following for following, _ in node.next_functions]
    return found


class StepCycle:
    """Several optimizers take turns (Muon and AdamW, a GAN's two): a step is done when each has had its turn.

    Which optimizers that are is learned from the first turn on. One that steps more rarely than the others does not
    count. When a program exchanges its optimizer, a step or two go uncounted.
    """

    def __init__(self) -> None:
        self._expected: frozenset[int] = frozenset()
        self._turn: set[int] = set()
        self._counted = False
        self._learning = True

    def stepped(self, optimizer: int) -> bool:
        """Whether the step of this optimizer, known by any number, completes a step of the program."""
        if optimizer in self._turn:
            common = self._turn if self._learning else self._turn & self._expected
            self._expected, self._learning = frozenset(common or self._turn), False
            self._turn, self._counted = set(), False
        self._turn.add(optimizer)
        if self._counted or not self._turn >= self._expected:
            return False
        self._counted = True
        return True
