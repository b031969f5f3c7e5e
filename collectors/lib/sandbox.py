"""Parses input of users in a separate process, so that it takes no memory of the agent.

A few megabytes of JSON or of a pickle may stand for gigabytes, and each estimate of what they take has been wrong
somewhere. The kernel's limit for a process is not. One process works at a time, so that their memory does not add up.
Users who have used the least parsing time go first, so that nobody waits for endless input of others.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from typing import Any, Final, cast

from opsd.collectors.lib.shares import Spent
from opsd.confined import confine, let_go
from opsd.threads import FairQueue

SMALL: Final = 32 << 10
"""Bytes that are made sense of in the agent: they take some MiB at most, and less time than a process."""
MEMORY: Final = 128 << 20
PROCESSOR_S: Final = 5
WITHIN_S: Final = 20.0
"""Bytes, and seconds of a processor and of time, that such a process may take. The longest of dumps takes 1.2 s."""
SHARE: Final = 0.2
BURST_S: Final = 5.0
"""Share of a core that all of them together may take, and seconds of processor time at once."""
FORGOTTEN_S: Final = 120.0
"""Half of what a user has taken counts no longer after this time."""
AHEAD_S: Final = 10.0
"""The parsing time of a user with a GPU that still goes before a user who has used none."""
MAX_RESULT: Final = 2 << 20
"""Bytes of JSON that it may answer with."""
_HEAD: Final = "00000.000\n"
_REFUSED: Final = 3
_TOO_MUCH: Final = f"reading it takes more than {MEMORY >> 20} MiB, or than {PROCESSOR_S} s of a processor"

Content = bytes | bytearray
Work = Callable[[str, Content], tuple[str, float]]
"""Has a function, named as ``module:function``, read something: its result in JSON, and processor seconds elsewhere."""


class SandboxError(Exception):
    """What a user wrote cannot be used; the message says why in one sentence."""


class Sandbox:
    """Thread-safe. The processes take ``SHARE`` of a core, and none of what the collector has, which would pause."""

    def __init__(
        self,
        work: Work | None = None,
        small: Work | None = None,
        first: Callable[[], Collection[int]] = frozenset,
    ) -> None:
        self._spent, self._first = Spent(FORGOTTEN_S), first
        self._large = FairQueue("apart", 1, share=1, rank=self._rank), work or in_a_process
        self._small = FairQueue("apart-small", 1, share=1), small or here
        self._paid_at = 0.0
        """The second at which what has been taken is paid."""

    def parse(self, user: int, function: str, content: Content) -> Future[Any]:
        """What ``function`` makes of ``content``, as JSON has it, or SandboxError. Cancel it to leave it out."""
        future: Future[Any] = Future()
        queue, work = self._small if len(content) <= SMALL else self._large
        job = partial(self._do, future, work, str(user), function, content)
        queue.submit(str(user), job, lambda: not future.cancelled())
        return future

    def _rank(self, user: str) -> float:
        """Seconds taken; those of the ``first``, whose runs have GPUs, count less: a user may have thousands of ids."""
        return self._spent(user) - (AHEAD_S if int(user) in self._first() else 0.0)

    def _do(self, future: Future[Any], work: Work, user: str, function: str, content: Content) -> None:
        if not future.set_running_or_notify_cancel():
            return
        began = time.monotonic()
        try:
            answer, taken_s = work(function, content)
            future.set_result(json.loads(answer))
        except Exception as error:  # the thread must outlive a bug
            taken_s = min(time.monotonic() - began, PROCESSOR_S)
            future.set_exception(error)
        if work is self._large[1]:
            now = time.monotonic()
            self._spent.add(user, taken_s)
            self._paid_at = max(self._paid_at, now) + taken_s / SHARE
            time.sleep(max(0.0, self._paid_at - now - BURST_S / SHARE))


def here(function: str, content: Content) -> tuple[str, float]:
    """Implements ``Work`` in this process. Raises SandboxError."""
    module, _, name = function.partition(":")
    parse = getattr(importlib.import_module(module), name)
    try:
        answer = json.dumps(asdict(parse(content)))
    except MemoryError as error:
        raise SandboxError(_TOO_MUCH) from error
    except Exception as error:
        raise SandboxError(str(error) or type(error).__name__) from error
    if len(answer) > MAX_RESULT:
        raise SandboxError(f"what it tells takes more than {MAX_RESULT >> 20} MiB")
    return answer, 0.0


def in_a_process(function: str, content: Content) -> tuple[str, float]:
    """Implements ``Work`` in a process of its own. Raises SandboxError."""
    with open(os.memfd_create("answer"), "r+b") as answer:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "opsd.collectors.lib.sandbox", function],
                stdin=subprocess.PIPE,
                stdout=answer,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            raise SandboxError(f"no process can be started to read it: {error.strerror}") from error
        with process:
            try:
                confine(process, MEMORY, PROCESSOR_S, written=MAX_RESULT + len(_HEAD))
                process.communicate(cast("bytes", content), WITHIN_S)
            except subprocess.TimeoutExpired as error:
                raise SandboxError(f"it takes longer than {WITHIN_S:g} s to read") from error
            except OSError as error:
                raise SandboxError(f"what reads it cannot be kept within its limits: {error.strerror}") from error
            finally:
                process.kill()
        answer.seek(0)
        taken_s, _, said = answer.read().decode("utf-8", "replace").partition("\n")
    if process.returncode == _REFUSED:
        raise SandboxError(said)
    if process.returncode or not said:
        raise SandboxError(_TOO_MUCH)
    return said, max(0.0, min(PROCESSOR_S, float(taken_s)))


def main() -> int:
    """Have the function that the argument names read stdin; prints the seconds taken, and its result or why not."""
    importlib.import_module(sys.argv[1].partition(":")[0])
    let_go()
    try:
        said, code = here(sys.argv[1], sys.stdin.buffer.read())[0], 0
    except SandboxError as error:
        said, code = str(error), _REFUSED
    sys.stdout.buffer.write(f"{time.process_time():.3f}\n{said}".encode("utf-8", "replace"))
    return code


if __name__ == "__main__":
    sys.exit(main())
