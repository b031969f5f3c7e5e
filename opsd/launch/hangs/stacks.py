"""Parses py-spy's output and tells waiting, compiling and saving apart. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
_LAUNCHER = "opsd/launch/ranks/worker.py"
"""Frames of this file and outside of it belong to the launcher, not to the program."""
_EVALUATING = re.compile(r"lm_eval/|lighteval/|\bevaluate\b|\beval_step\b|validation_step")


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


@dataclass(frozen=True, slots=True)
class Stack:
    """The threads of one process, the main thread first."""

    threads: tuple[Thread, ...]

    @property
    def main(self) -> tuple[Frame, ...]:
        """The main thread's frames, innermost first."""
        return self.threads[0].frames if self.threads else ()

    @property
    def python(self) -> tuple[Frame, ...]:
        """The main thread's frames without native ones."""
        return tuple(frame for frame in self.main if frame.file.endswith(".py"))

    @property
    def in_collective(self) -> str | None:
        """The collective call that the main thread is in, None without one."""
        return next((frame.name for frame in self.main if _COLLECTIVE.search(frame.name)), None)

    @property
    def busy_as(self) -> str | None:
        """The phase of the main thread's work, whatever the rank reported; None if unknown.

        "setup" for a compilation, "checkpoint" for a save, "evaluation". Waiting in a collective is no work.
        """
        for frame in self.main:
            if _COLLECTIVE.search(frame.name):
                return None
            text = f"{frame.file} {frame.name}"
            for phase, pattern in (("setup", _COMPILING), ("checkpoint", _SAVING), ("evaluation", _EVALUATING)):
                if pattern.search(text):
                    return phase
        return None

    def __str__(self) -> str:
        return "\n".join(_thread_lines(self.threads))


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
