"""Running the cells of a study: one after the other on this machine, or each as a job of Slurm.

Slurm itself bounds how many jobs run at once: of N lanes, each job waits for the end of the job before it in its lane.
So all jobs are submitted at once, and nothing is lost if the submitter dies.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from opsd import durable, exitcodes
from opsd.ablate.cells import LOCK, LOG, SETTINGS, Cell, demand_origin, hold, is_done, look, note_held, prepare
from opsd.ablate.study import StudyError
from opsd.slurm.port import ENDED, Job, Partition, Slurm
from opsd.slurm.requeue_helper import OPSD
from opsd.words import duration

SUBMITTING = "submit.lock"
"""In the folder of the study: held while jobs are submitted."""
NICE, NOTICE_S = 10_000, 120
"""How much lower the priority of the jobs is, and the seconds before a job's time limit in which it saves."""

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

Say = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Failed:
    """A cell that ended with ``code``, and its log."""

    cell: Cell
    code: int
    log: Path


def opsd_command(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """What starts opsd: $OPSD as in batch scripts, else this opsd."""
    return tuple(shlex.split(environ["OPSD"])) if environ.get("OPSD") else OPSD


def launch_command(cell: Cell, ranks: int, opsd: Sequence[str] = OPSD) -> list[str]:
    """The launcher of a cell on this machine."""
    return [*opsd, "launch", *_options(cell, ranks), *_program(cell)]


def _options(cell: Cell, ranks: int) -> list[str]:
    return ["--run-id", cell.run_name, "--run-dir", str(cell.folder.absolute()), "--nproc-per-node", str(ranks)]


def _program(cell: Cell) -> list[str]:
    return ["-m", "opsd.trainer", str(cell.folder.absolute() / SETTINGS)]


def run_local(
    root: Path,
    cells: Sequence[Cell],
    ranks: int,
    say: Say,
    *,
    command: Callable[[Cell, int], Sequence[str]] = launch_command,
) -> list[Failed]:
    """Run all cells that are not done, one after the other. Cells that another process runs come last.

    Raises KeyboardInterrupt once the cell has saved its state, StudyError, OSError.
    """
    demand_origin(root)
    failed: list[Failed] = []
    took: list[float] = []
    waiting: list[Cell] = []
    with _interruptible():
        for at, cell in enumerate(cells, 1):
            prepare(cell)
            if look(cell).code == exitcodes.OK:
                continue
            if (lock := hold(cell)) is None:
                say(f"{_named(cell)} is being run by another process; it comes last")
                waiting.append(cell)
                continue
            failed += _run_one(cell, lock, command(cell, ranks), say, took, len(cells) - at)
        for cell in waiting:
            say(f"waiting for {_named(cell)}, which another process runs")
            lock = _awaited(cell)
            failed += _run_one(cell, lock, command(cell, ranks), say, took, 0)
    return failed


def _run_one(cell: Cell, lock: int, command: Sequence[str], say: Say, took: list[float], left: int) -> Iterator[Failed]:
    """Run a cell, whose lock is given up at the end, unless it was done in the meantime."""
    try:
        if look(cell).code == exitcodes.OK:
            return
        began = time.monotonic()
        code = _run(cell, lock, command)
        found = look(cell)
        if found.state != "done":
            log = cell.folder / LOG
            why = f": {found.reason}" if found.reason else ""
            say(f"{_named(cell)} ended with exit code {code} at step {found.step} of {cell.steps}{why}; see {log}")
            yield Failed(cell, code, log)
            return
        took.append(time.monotonic() - began)
        eta = f"; {left} left, about {duration(fmean(took) * left)}" if left else ""
        loss = "not finite" if found.loss is None else f"{found.loss:.4f}"
        say(f"{_named(cell)}: loss {loss} in {duration(took[-1])}{eta}")
    finally:
        os.close(lock)


def _named(cell: Cell) -> str:
    return f"{cell.arm.name} with seed {cell.seed} ({cell.name})"


def _run(cell: Cell, lock: int, command: Sequence[str]) -> int:
    """The exit code of the cell's launcher, which inherits the lock: it holds while the cell runs.

    A session of its own keeps the terminal's Ctrl-C from the launcher, which would get a second one from here.
    """
    note_held(cell.folder, "start", time.time())
    with open(cell.folder / LOG, "ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(lock,), start_new_session=True
        )  # fmt: skip
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.wait()
        raise
    finally:
        note_held(cell.folder, "end", time.time())


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM does what Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _awaited(cell: Cell) -> int:
    """The lock of the cell, once the process that has it ends."""
    descriptor = os.open(cell.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def script_of(cell: Cell, ranks: int, opsd: Sequence[str]) -> str:
    """The batch script of a cell."""
    run = [*opsd, "slurm", "run", *_options(cell, ranks), "--give-way", "--no-standby", "--", *_program(cell)]
    return f"#!/bin/bash\nexec {shlex.join([*opsd, 'ablate', 'cell', str(cell.folder.absolute()), '--', *run])}\n"


def run_in_job(folder: Path, command: Sequence[str], began: float) -> int:
    """Run the ``command`` of the cell in ``folder`` in its job, which began at the epoch second ``began``.

    Returns its exit code, or 0 at once if the cell is done. Code and libraries of this node must be those that the
    study has begun with. A job that is told to end has ended at that moment. Raises StudyError, OSError.
    """
    try:
        demand_origin(folder.parents[1])
    except StudyError as error:
        note_held(folder, "refused", time.time(), str(error))
        raise
    if is_done(folder):
        return exitcodes.OK
    note_held(folder, "start", began)
    came: list[tuple[int, float]] = []
    process: subprocess.Popen[bytes] | None = None

    def forward(number: int, _frame: object = None) -> None:
        came.append((number, time.time()))
        if process is not None:
            process.send_signal(number)

    for each in _FORWARDED:
        signal.signal(each, forward)
    process = subprocess.Popen(command)
    for number, _ in tuple(came):
        process.send_signal(number)
    code = process.wait()
    told = [t for number, t in came if number == signal.SIGTERM]
    note_held(folder, "end", min(told, default=time.time()))
    return code if code >= 0 else 128 - code


def options_of(cell: Cell, partition: str, after: int | None, options: Sequence[str]) -> list[str]:
    """The options of sbatch for a cell; the user's ``options`` come last and count more.

    A submitter that is killed may leave an sbatch behind, whose job the next submitter does not see yet. Such a second
    job of a cell waits until the first has ended (singleton), and then finds the cell done.
    """
    lane = f"afterany:{after},singleton" if after else "singleton"
    return [
        f"--job-name={cell.run_name}", "--nodes=1", "--ntasks-per-node=1", "--no-kill", "--requeue",
        "--open-mode=append", f"--signal=USR1@{NOTICE_S}", f"--nice={NICE}", f"--partition={partition}",
        f"--output={cell.folder.absolute() / LOG}", f"--dependency={lane}", *options,
    ]  # fmt: skip


def submit(
    root: Path,
    cells: Sequence[Cell],
    slurm: Slurm,
    *,
    partition: str,
    limit: int,
    ranks: int,
    options: Sequence[str] = (),
    opsd: Sequence[str] = OPSD,
) -> list[int]:
    """Submit a job for each cell that is not done and has none; at most ``limit`` of the study's jobs run at once.

    One submitter at a time. Returns the ids of the jobs. Raises SlurmError, OSError.
    """
    durable.make_folder(root)
    with open(root / SUBMITTING, "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        live = _live(cells, slurm)
        names, queue = {job.name for job in live}, sorted(job.id for job in live)
        submitted = []
        for cell in cells:
            prepare(cell)
            found = look(cell)
            if cell.run_name in names or found.code == exitcodes.OK or found.state == "running":
                continue
            after = queue[-limit] if len(queue) >= limit else None
            queue.append(slurm.submit(script_of(cell, ranks, opsd), options_of(cell, partition, after, options)))
            submitted.append(queue[-1])
    return submitted


def jobs_of(cells: Sequence[Cell], slurm: Slurm) -> dict[str, Job]:
    """The jobs of cells that wait or run, by the name of the cell; of two jobs the older. Raises SlurmError."""
    cell_of = {cell.run_name: cell.name for cell in cells}
    return {cell_of[job.name]: job for job in sorted(_live(cells, slurm), key=lambda job: -job.id)}


def _live(cells: Sequence[Cell], slurm: Slurm) -> list[Job]:
    """All jobs of cells that wait or run. Raises SlurmError."""
    names = {cell.run_name for cell in cells}
    return [job for job in slurm.jobs() if job.name in names and job.state not in ENDED]


def stop(cells: Sequence[Cell], slurm: Slurm) -> list[int]:
    """Cancel the jobs of the study, and no others; returns their ids. Raises SlurmError."""
    found = sorted(job.id for job in _live(cells, slurm))
    for job in reversed(found):  # the last first, so that none starts because another has ended
        slurm.cancel(job)
    return found


def spare_partition(partitions: Sequence[Partition]) -> str:
    """Of the partitions whose jobs are preempted and requeued, the one of the lowest tier. Raises StudyError."""
    able = [
        low for low in partitions
        if low.state == "up" and "REQUEUE" in low.preempt_mode.upper()
        and any(high.tier > low.tier and set(high.nodes) & set(low.nodes) for high in partitions)
    ]  # fmt: skip
    if not able:
        raise StudyError(
            "no partition here has jobs that give way (PreemptMode=REQUEUE, below one of a higher PriorityTier): "
            "name one with --partition, or run on this machine with --local"
        )
    return min(able, key=lambda each: each.tier).name
