"""Stacks of ranks: what they say, and how they are taken.

Parses py-spy's output and tells waiting, compiling and saving apart. Pure.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from opsd.launch.io.loop import Loop
from opsd.launch.ranks.process import GONE_S, spawn
from opsd.launch.ranks.worker import STACK_SIGNAL

_COLLECTIVE = re.compile(
    r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|barrier|wait_tensor|gloo::|^nccl|ncclComm|ProcessGroup",
    re.IGNORECASE,
)
_COMPILING = re.compile(
    r"torch/_dynamo/(convert_frame|symbolic_convert|output_graph)\.py"
    r"|torch/_inductor/(compile_fx|async_compile|codecache|graph|scheduler)\.py|/triton/compiler/"
)
"""Without torch/_dynamo/eval_frame.py, whose wrappers are in every stack of compiled code and of FSDP's hooks."""
_SAVING = re.compile(
    r"torch/serialization\.py|torch/distributed/checkpoint/|safetensors/|save_pretrained|save_checkpoint", re.IGNORECASE
)
_ASLEEP = re.compile(r"^(?:__)?(?:clock_)?nanosleep|^time_sleep$")
_READS_OR_WAITS = re.compile(r"^(?:__)?(?:read|p?poll|p?select|epoll_p?wait|wait4|waitpid|waitid)$")
_WAIT_FILES = re.compile(r"/python3[^/]*/(?:selectors|codecs|threading|queue)\.py$")
"""Of the standard library, in which others wait."""
_POOL = re.compile(r"/python3[^/]*/(?:multiprocessing/pool|concurrent/futures/\w+)\.py$|/site-packages/joblib/")
"""Pools of processes and threads, which the caller waits for on a lock."""
_FOR_INPUT = re.compile(
    r"/python3[^/]*/(?:(?:pdb|bdb|cmd|code)\.py|asyncio/base_events\.py|_pyrepl/.*)$"
    r"|/site-packages/(?:IPython|prompt_toolkit|debugpy|uvloop)/"
)
"""A debugger, a prompt, an event loop."""
_LOADER = "torch/utils/data/"
"""Its waits for worker processes have a limit of their own."""
_LIBRARY = re.compile(r"(?:^|/)(?:site-packages|dist-packages|lib/python3[^/]*|torch|opsd)/|^<")
_LAUNCHER = "opsd/launch/ranks/worker.py"
"""Frames of this file and outside of it belong to the launcher, not to the program."""
_HOOKS = "opsd/launch/observe/"
_LIBRARIES = (
    ("setup", _COMPILING),
    ("checkpoint", _SAVING),
    ("evaluation", re.compile(r"lm_eval/|lighteval/")),
    (
        "setup",
        re.compile(
            r"/huggingface_hub/|/urllib/request\.py|/http/client\.py|/requests/|/urllib3/|/boto\w*/|/gcsfs/|/fsspec/|"
            r"/datasets/(?:download|builder|load)|gc_collect_main|_PyGC_"
        ),
    ),
)
"""Work that is known by the file or the native function: also downloads and CPython's garbage collector."""
_FUNCTIONS = (
    ("checkpoint", re.compile(r"(?:^|[_.])(?:save|saving|dump|serialize)(?:$|[_.])", re.IGNORECASE)),
    (
        "evaluation",
        re.compile(
            r"(?:^|[_.])(?:evals?|evaluate|evaluation|valid|validate|validation|test|generate|inference)(?:$|[_.])",
            re.IGNORECASE,
        ),
    ),
    ("setup", re.compile(r"(?:^|[_.])download", re.IGNORECASE)),
)
"""Work that is known by what programs call their Python functions."""
_NO_GRAD = "decorate_context"
"""The wrapper that ``torch.no_grad`` puts around a function."""
_UPDATES = re.compile(r"(?:^|[_.])step(?:$|_)|zero_grad|clip_grad")
"""Functions of optimizers, which are under torch.no_grad as well."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One call: function, file and line (0 for native code)."""

    name: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.name} ({self.file}:{self.line})" if self.line else f"{self.name} ({self.file})"


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread's frames, innermost first."""

    name: str
    active: bool
    owns_gil: bool
    frames: tuple[Frame, ...]

    @property
    def python(self) -> tuple[Frame, ...]:
        """The frames without native ones; what was not read from a file is in "<string>" and the like."""
        return tuple(frame for frame in self.frames if frame.file.endswith((".py", ">")))


@dataclass(frozen=True, slots=True)
class Stack:
    """The threads of one process, the main thread first. ``moved``: it was at work when stacks were taken again."""

    threads: tuple[Thread, ...]
    moved: bool = False

    @property
    def main(self) -> tuple[Frame, ...]:
        """The main thread's frames, innermost first."""
        return self.threads[0].frames if self.threads else ()

    @property
    def python(self) -> tuple[Frame, ...]:
        """The main thread's frames without native ones."""
        return self.threads[0].python if self.threads else ()

    @property
    def native(self) -> bool:
        """Whether native frames are among the main thread's."""
        return any(not frame.line for frame in self.main)

    def moved_since(self, before: Stack) -> bool:
        """Whether the program was at work between two stacks: its main thread, or one that it waits for."""
        if self.python != before.python:
            return True
        waits = bool(self.python) and _WAIT_FILES.search(self.python[0].file) is not None
        return waits and bool(self._running() - before._running()) and bool(before._running())

    def _running(self) -> frozenset[tuple[Frame, ...]]:
        """The stacks of the other threads that run."""
        return frozenset(thread.python for thread in self.threads[1:] if thread.active and thread.python)

    @property
    def where(self) -> str:
        """The innermost frame of the main thread, a Python one if there is one; "" without any.

        If that frame belongs to a library, the line of the program that called it follows.
        """
        innermost = next(iter(self.python or self.main), None)
        program = next((frame for frame in self.python if not _LIBRARY.search(frame.file)), None)
        if program is None or innermost is None or program == innermost:
            return str(innermost or "")
        return f"{innermost}, called from {program}"

    @property
    def in_collective(self) -> str | None:
        """The collective call that the main thread is in, None without one."""
        return next((frame.name for frame in self.main if _COLLECTIVE.search(frame.name)), None)

    @property
    def asleep(self) -> bool:
        """Whether the main thread is in a timed sleep, as in a loop that polls a file. It does not hold the GIL."""
        return bool(self.main) and not self.threads[0].owns_gil and _ASLEEP.search(self.main[0].name) is not None

    @property
    def awaits_input(self) -> bool:
        """Whether the main thread waits for a person at a prompt, or in an event loop for requests.

        It waits in a system call or a lock of the prompt's or loop's own: what those call is the program's.
        """
        return _FOR_INPUT.search(self._waits_in) is not None

    @property
    def _waits_in(self) -> str:
        """The file of the innermost frame that is not of the standard library's waits."""
        return next((frame.file for frame in self.python if not _WAIT_FILES.search(frame.file)), "")

    @property
    def waits_for_process(self) -> bool:
        """Whether the main thread waits for another process to write or to end, in a system call for that, or a pool.

        Without waits in a collective, for a ``DataLoader`` and on a socket.
        """
        if not self.main or self.in_collective:
            return False
        if not _READS_OR_WAITS.search(self.main[0].name) and not _POOL.search(self._waits_in):
            return False
        return not any(_LOADER in frame.file for frame in self.main)

    @property
    def busy_as(self) -> str | None:
        """The phase of the main thread's work, whatever the rank reported; None if unknown.

        "setup" for a compilation, a download and the garbage collector, "checkpoint" for a save, "evaluation", also for
        whatever is decorated with ``torch.no_grad``. Waiting in a collective is no work.
        """
        called = ""
        for frame in self.main:
            if _COLLECTIVE.search(frame.name):
                return None
            if _HOOKS not in frame.file:
                if (phase := _work(frame, called)) is not None:
                    return phase
                called = frame.name
        return None

    def __str__(self) -> str:
        return "\n".join(_thread_lines(self.threads))


def _work(frame: Frame, called: str) -> str | None:
    """The phase of the work that a frame shows, which has ``called`` the function inside of it; None if unknown."""
    text = f"{frame.file} {frame.name}"
    for phase, pattern in _LIBRARIES:
        if pattern.search(text):
            return phase
    if not frame.line:
        return None
    for phase, pattern in _FUNCTIONS:
        if pattern.search(frame.name):
            return phase
    return "evaluation" if frame.name == _NO_GRAD and called and not _UPDATES.search(called) else None


def _thread_lines(threads: tuple[Thread, ...]) -> Iterator[str]:
    for thread in threads:
        state = ("active" if thread.active else "idle") + (", holds the GIL" if thread.owns_gil else "")
        yield f"  thread {thread.name} ({state})"
        yield from (f"    {frame}" for frame in thread.frames)


def parse_stack(text: str) -> Stack | None:
    """The output of ``py-spy dump --json``; None if it cannot be parsed (py-spy failed or was cut short)."""
    try:
        entries = sorted(json.loads(text), key=lambda entry: entry["os_thread_id"] != entry["pid"])
        return Stack(tuple(_parse_thread(entry) for entry in entries)) if entries else None
    except (ValueError, KeyError, TypeError):
        return None


def _parse_thread(entry: dict[str, Any]) -> Thread:
    frames = tuple(
        Frame(str(frame["name"]), str(frame["filename"]), int(frame["line"] or 0)) for frame in entry["frames"]
    )
    outside = next((index for index, frame in enumerate(frames) if frame.file.endswith(_LAUNCHER)), len(frames))
    name = str(entry.get("thread_name") or entry.get("os_thread_id"))
    return Thread(name, bool(entry.get("active")), bool(entry.get("owns_gil")), frames[:outside])


# The stacks of all ranks, taken with py-spy in parallel, each with a deadline, without blocking the event loop.


_OUTPUT_LIMIT = 4 << 20


class ChildOutput:
    """Runs ``command`` and calls ``ended`` with its standard output, at most 4 MiB of it. Raises OSError."""

    def __init__(self, command: Sequence[str], loop: Loop, ended: Callable[[str], None]) -> None:
        self._ended = ended
        self._output = os.memfd_create("output")
        try:
            self._child = spawn(
                command, env=os.environ, cwd=Path("/"), output=self._output, error_output=subprocess.DEVNULL
            )
        except OSError:
            os.close(self._output)
            raise
        self._child.watch(loop, self._collect)

    @property
    def pid(self) -> int:
        """Its process."""
        return self._child.pid

    def kill(self) -> None:
        """Kill it and what it has started."""
        self._child.kill_group()

    def close(self, limit_s: float) -> None:
        """Kill it and wait for its end for at most ``limit_s`` seconds; ``ended`` is not called."""
        self._child.kill_group()
        self._child.reap(limit_s)
        os.close(self._output)

    def _collect(self) -> None:
        with open(os.dup(self._output), "rb") as file:
            file.seek(0)
            text = file.read(_OUTPUT_LIMIT).decode(errors="replace")
        self.close(GONE_S)
        self._ended(text)


STACKS_S = 10.0
"""How long a verdict waits for the stacks of each rank: on a busy node py-spy takes seconds to start."""
LOOKS = 8
"""How often a rank is looked at: one at work may be seen in the same line several times in a row."""
_HANDLER_S = 0.1
"""Time for a rank's faulthandler to write its stack; it runs in the signal handler, without the GIL."""


@dataclass(frozen=True, slots=True)
class Target:
    """A rank to examine. ``stopped``: its process cannot be traced, only read."""

    rank: int
    pid: int
    stopped: bool
    fallback: Path
    """Where the rank's own faulthandler writes on ``STACK_SIGNAL``."""


@dataclass(slots=True)
class StackCapture:
    """Takes stacks: first without pausing the rank, then with native frames, which pauses it, then some more without.

    The most detailed stack is kept; ``stacks`` holds those taken so far. A rank that has been seen to move, or waits in
    a collective, is not looked at again. ``close()`` stops the rest.
    """

    targets: tuple[Target, ...]
    loop: Loop
    py_spy: str | None
    stacks: dict[int, Stack] = field(default_factory=dict)
    moved: set[int] = field(default_factory=set)
    """Ranks that were at work between two of their stacks, see ``Stack.moved_since``."""
    _dumps: dict[int, ChildOutput] = field(default_factory=dict)
    _awaited: set[int] = field(default_factory=set)

    def start(self) -> None:
        """Start with all ranks in parallel."""
        for target in self.targets:
            self._look(target, 1)
        self._awaited = {*self._dumps}

    def awaited(self, seconds: float) -> bool:
        """Whether, ``seconds`` after the start, further stacks of a rank are still worth waiting for."""
        return bool(self._awaited) and seconds < STACKS_S

    @property
    def pids(self) -> frozenset[int]:
        """The running py-spy processes."""
        return frozenset(dump.pid for dump in self._dumps.values())

    def close(self) -> None:
        """Kill the py-spy processes; a rank that was traced goes on."""
        deadline = time.monotonic() + GONE_S
        for dump in self._dumps.values():
            dump.kill()
        for dump in self._dumps.values():
            dump.close(max(0.0, deadline - time.monotonic()))
        self._dumps.clear()

    def ask_ranks(self) -> None:
        """Make ranks that py-spy could not read write their Python stack themselves."""
        unread = [target for target in self.targets if target.rank not in self.stacks and not target.stopped]
        able = [target for target in unread if _catches(target.pid, STACK_SIGNAL)]
        for target in able:
            with contextlib.suppress(ProcessLookupError):
                os.kill(target.pid, STACK_SIGNAL)
        if able:
            time.sleep(_HANDLER_S)

    def text(self) -> str:
        parts = []
        for target in self.targets:
            stack = self.stacks.get(target.rank)
            text = str(stack) if stack is not None else f"  not readable; what the rank itself wrote: {target.fallback}"
            parts.append(f"rank {target.rank} (pid {target.pid}{', stopped' if target.stopped else ''})\n{text}\n")
        return "\n".join(parts)

    def _look(self, target: Target, number: int) -> None:
        """The look ``number`` at a rank, and those after it."""
        self._dump(target, "--native" if number == 2 else "--nonblocking", lambda: self._look_again(target, number))

    def _look_again(self, target: Target, number: int) -> None:
        stack = self.stacks.get(target.rank)
        settled = stack is None or target.rank in self.moved or stack.in_collective is not None
        if target.stopped or number == LOOKS or (number > 1 and settled):
            self._awaited.discard(target.rank)
        else:
            self._look(target, number + 1)

    def _dump(self, target: Target, how: str, then: Callable[[], None]) -> None:
        if self.py_spy is None:
            return
        command = (self.py_spy, "dump", "--json", how, "--pid", str(target.pid))

        def ended(text: str) -> None:
            del self._dumps[target.rank]
            self._collect(target.rank, text)
            then()

        with contextlib.suppress(OSError):
            self._dumps[target.rank] = ChildOutput(command, self.loop, ended)

    def _collect(self, rank: int, text: str) -> None:
        stack = parse_stack(text)
        if stack is None:
            return
        before = self.stacks.get(rank)
        if before is not None and stack.moved_since(before):
            self.moved.add(rank)
        if before is None or not before.native:
            before = stack
        self.stacks[rank] = replace(before, moved=rank in self.moved)


def find_py_spy() -> str | None:
    """The py-spy installed with opsd, else the one on the path, None without."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _catches(pid: int, number: int, proc: str = "/proc") -> bool:
    """Whether the process handles the signal, which would otherwise kill it (proc(5), SigCgt)."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(proc, str(pid), "status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
