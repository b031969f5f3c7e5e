"""Which implementation of the Slurm port to use on this machine.

The Slurm port on top of pyslurm, which runs in a separate process (``opsd.slurm.pyslurm_worker`` says why).
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

from opsd.slurm.commands import DEADLINE_S, CommandSlurm
from opsd.slurm.output import failure
from opsd.slurm.port import Job, Node, NodeUpdate, Slurm, SlurmError, SlurmMissing, SlurmUnavailable
from opsd.slurm.runner import Output, Runner, clean_environment, run_command

WORKER = (sys.executable, "-P", "-m", "opsd.slurm.pyslurm_worker")


Asker = Callable[..., Any]
"""Sends pyslurm a request, its name and arguments, and returns the answer. Raises SlurmError."""


class Worker:
    """A process that answers requests. It starts with the first one, and again after it missed a deadline."""

    def __init__(self, argv: Sequence[str] = WORKER, *, deadline_s: float = DEADLINE_S) -> None:
        self._argv = argv
        self._deadline_s = deadline_s
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, name: str, *arguments: object) -> Any:
        """See ``Asker``. Answers or raises within the deadline."""
        process = self._process if self._process is not None and self._process.poll() is None else self._start()
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps([name, *arguments]).encode() + b"\n")
            process.stdin.flush()
            line = self._read_line(process)
        except BrokenPipeError:
            line = b""
        except SlurmUnavailable:
            self.close()
            raise
        if not line:
            raise SlurmMissing(f"pyslurm cannot be used here: {self._last_words(process)}")
        answer = json.loads(line)
        if "error" in answer:
            raise failure([f"pyslurm {name}"], Output(1, "", answer["error"]))
        return answer["ok"]

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for stream in (process.stdin, process.stdout, process.stderr):
            assert stream is not None
            stream.close()
        process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        self.close()
        try:
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=clean_environment(os.environ),
                bufsize=0,
            )
        except OSError as error:
            raise SlurmMissing(f"{self._argv[0]} cannot be run: {error.strerror}") from error
        return self._process

    def _read_line(self, process: subprocess.Popen[bytes]) -> bytes:
        assert process.stdout is not None
        deadline = time.monotonic() + self._deadline_s
        line = bytearray()
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                raise SlurmUnavailable(f"pyslurm has not answered within {self._deadline_s:g} s")
            chunk = os.read(process.stdout.fileno(), 1 << 20)
            if not chunk:
                return b""
            line += chunk
        return bytes(line)

    def _last_words(self, process: subprocess.Popen[bytes]) -> str:
        assert process.stderr is not None
        ready = select.select([process.stderr], [], [], self._deadline_s)[0]
        said = os.read(process.stderr.fileno(), 65_536).decode(errors="replace").strip() if ready else ""
        return said.splitlines()[-1] if said else "it ended without a message"


class PyslurmSlurm(CommandSlurm):
    """Slurm through pyslurm, and through commands where those take options of sbatch or scontrol.

    Jobs are changed through commands too, which take a task of an array by its name: the number of the last task is
    that of the array. So are reservations read: pyslurm 25.11.2 raises on the flag REPLACE_DOWN of a spare pool.
    """

    def __init__(self, ask: Asker, run: Runner = run_command, *, deadline_s: float = DEADLINE_S) -> None:
        super().__init__(run, deadline_s=deadline_s)
        self._ask = ask

    def responds(self) -> bool:
        try:
            return bool(self._ask("responds"))
        except SlurmUnavailable:
            return False

    def nodes(self, names: Sequence[str] = ()) -> Sequence[Node]:
        found = [Node(**{**fields, "flags": frozenset(fields["flags"])}) for fields in self._ask("nodes", list(names))]
        return sorted(found, key=lambda node: node.name)

    def update_nodes(self, names: Sequence[str], update: NodeUpdate, reason: str = "") -> None:
        self._ask("update_nodes", list(names), update, reason)

    def jobs(self, ids: Sequence[int] = (), *, node: str = "") -> Sequence[Job]:
        found = [Job(**{**fields, "nodes": tuple(fields["nodes"])}) for fields in self._ask("jobs", list(ids), node)]
        return sorted(found, key=lambda job: job.id)


def why_not_pyslurm(ask: Asker, commands: Slurm) -> str:
    """Why pyslurm cannot be used through ``ask``, in one sentence; "" if it can.

    Its release has to equal that of ``commands``: the controller does not understand a newer library, which would only
    show at the first request.
    """
    try:
        bound, here = str(ask("hello")), commands.version
    except SlurmError as error:
        return str(error)
    if [int(part) for part in re.findall(r"\d+", bound)[:2]] != [here.year, here.month]:
        return f"pyslurm {bound} does not fit Slurm {here}; install pyslurm {here.year}.{here.month}"
    return ""


class Choice(NamedTuple):
    """The implementation to use; ``no_bindings`` is why it is not pyslurm, "" if it is."""

    slurm: Slurm
    no_bindings: str


def choose(deadline_s: float = DEADLINE_S) -> Choice:
    """This machine's Slurm; each call takes at most ``deadline_s`` seconds.

    Uses pyslurm where possible (3 ms a call, and a separate process of about 25 MiB), otherwise Slurm's commands (5 to
    30 ms a call). Does not contact the controller yet.
    """
    commands = CommandSlurm(deadline_s=deadline_s)
    if find_spec("pyslurm") is None:
        return Choice(commands, "pyslurm is not installed")
    worker = Worker(deadline_s=deadline_s)
    no_bindings = why_not_pyslurm(worker, commands)
    return Choice(commands if no_bindings else PyslurmSlurm(worker, deadline_s=deadline_s), no_bindings)


def known_jobs(ids: Sequence[int]) -> Sequence[Job]:
    """Those of ``ids`` that this machine's Slurm still knows; see ``Slurm.jobs``. Raises SlurmError."""
    return choose().slurm.jobs(ids)
