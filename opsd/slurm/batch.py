"""The batch script of a run: starts a launcher on each node of the job, forwards signals, and handles the end.

There is one srun per node, so that the loss of a node ends only its own step.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from opsd import exitcodes
from opsd.checkpoints import claims
from opsd.checkpoints.claims import ClaimError
from opsd.slurm.allocation import Allocation
from opsd.slurm.port import Slurm, SlurmError
from opsd.slurm.requeue import ExcludedNodes, is_stopping
from opsd.slurm.requeue_helper import cancel_helpers, requeue_from_inside
from opsd.slurm.run_outcome import (
    DEFAULT_MAX_STOPPED_STARTS,
    MAX_SILENT_STARTS,
    MAX_STOPPED_STARTS,
    SHORT_START_S,
    BadStarts,
    Observation,
    RunEvents,
    RunOutcome,
    missing,
    outcome_of,
    stopped_by,
)
from opsd.slurm.spare_jobs import cancel_spares

POLL_S = 0.2
CLAIM_S = 1.0
"""How often the newest claim is read while all steps run."""
SHUTDOWN_S = {exitcodes.REQUEUE: 3.0}
DEFAULT_SHUTDOWN_S = 20.0
"""How long launchers may take to exit once the run is over; the step of a dead node is not waited for."""
STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)


@dataclass
class Batch:
    """One start of the run in ``folder``. ``start`` is its name in claims; ``signals`` are those received."""

    folder: Path
    start: str
    job: Allocation
    slurm: Callable[[], Slurm]
    needs: int = 1
    """Least number of nodes that run ranks."""
    log: int = 1
    """The file descriptor to which the run's log is copied."""
    signals: deque[signal.Signals] = field(default_factory=deque)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep
    say: Callable[[str], object] = print

    def __post_init__(self) -> None:
        self._began = self.clock()
        self._looked = -CLAIM_S
        self._lease: tuple[int, int] | None = None
        self._lease_renewed_at = float("-inf")
        self._gone_at: float | None = None
        self._missing_at: float | None = None
        self._asked = 0
        self._interrupted = False
        self._told = ""
        self._events = RunEvents(self.folder)
        self._silent_starts = BadStarts(self.folder / "wordless.json")
        self._stopped_starts = BadStarts(self.folder / "hurried.json")

    def listen(self) -> None:
        """Handle the signals that ask for a stop. They, and the end of a step, cut a pause short.

        Child processes do not inherit the handlers.
        """
        for number in STOPPING:
            signal.signal(number, lambda number, _: self.signals.append(signal.Signals(number)))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        receiver, sender = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
        self.sleep = lambda seconds: _pause(receiver, seconds)

    def run(self, steps: Steps) -> int:
        """Return the exit code of the batch script once the run is over and Slurm has been told what to do."""
        self.steps = steps
        if self.job.restarts:
            with suppress(SlurmError):
                cancel_helpers(self.slurm(), self.job.job)
        while (end := self._look()) is None:
            self._forward_signals()
            self.sleep(POLL_S)
        self._wait_for_shutdown(end)
        self._copy_log()
        self.steps.abandon()
        return self._finish(end)

    # -- while it runs -------------------------------------------------------------------------------------------

    def _look(self) -> RunOutcome | None:
        now, left = self.clock(), self.steps.left
        self._copy_log()
        if left and now - self._looked < CLAIM_S:
            return None
        if not left and self._gone_at is None:
            self._gone_at = now
        self._looked = now
        try:
            claim, lease = claims.newest(self.folder), claims.lease(self.folder)
        except ClaimError as error:
            self._tell(f"the run's folder cannot be read and will be read again: {error.strerror}")
            return None
        if self._gone_at is not None:
            if self._lease is not None and lease != self._lease:
                self._lease_renewed_at = now
                self._tell("no launcher is left on the job's nodes; the run goes on elsewhere, and this job waits")
            self._lease = lease
        gone_s = now - self._gone_at if self._gone_at is not None else 0.0
        codes = self.steps.codes
        if self._missing_at is None and missing(codes):
            self._missing_at = now
        missing_s = now - self._missing_at if self._missing_at is not None else 0.0
        look = Observation(claim, left, codes, gone_s, now - self._lease_renewed_at, missing_s, self.needs)
        return outcome_of(look, self.start)

    def _copy_log(self) -> None:
        """Copy new lines of the run's log."""
        with suppress(OSError):
            os.write(self.log, self._events.job_log())

    def _tell(self, sentence: str) -> None:
        if sentence != self._told:
            self._told = sentence
            self.say(sentence)

    # -- signals -------------------------------------------------------------------------------------------------

    def _forward_signals(self) -> None:
        """Stop the launchers, unless Slurm has signalled them itself: after a second request they wait less long."""
        if not self.signals:
            return
        came = set(self.signals)
        self.signals.clear()
        self._interrupted = self._interrupted or signal.SIGINT in came
        name = min(came).name
        if came == {signal.SIGTERM} and self._ending_by_slurm():
            self._tell("Slurm ends the job; the launchers were signalled as well")
            return
        self._asked += 1
        if signal.SIGINT in came and self._asked > 1:
            self._tell("ending the launchers at once")
            self.steps.signal(signal.SIGTERM)
            return
        self._tell(f"{name} came; the launchers are asked to save and stop")
        self.steps.signal(signal.SIGUSR1)

    def _ending_by_slurm(self) -> bool:
        try:
            found = self.slurm().jobs([self.job.job])
        except SlurmError:
            return False
        return not found or is_stopping(found[0])

    # -- the end -------------------------------------------------------------------------------------------------

    def _wait_for_shutdown(self, end: RunOutcome) -> None:
        limit = self.clock() + SHUTDOWN_S.get(end.code, DEFAULT_SHUTDOWN_S)
        lost = frozenset(end.lost) | self._events.lost
        while self.steps.left - lost and self.clock() < limit:
            self._copy_log()
            self.sleep(POLL_S)

    def _finish(self, end: RunOutcome) -> int:
        if end.reported:
            self._silent_starts.forget()
        self._tell(f"the run is over ({end.code}): {end.reason}")
        if end.code != exitcodes.REQUEUE:
            self._cancel_spares()
            return end.code
        if self._interrupted:
            self._cancel_spares()
            return exitcodes.INTERRUPTED
        lasted_s = self.clock() - self._began
        if self._stopped_too_often(end, lasted_s):
            self._cancel_spares()
            return exitcodes.FAILED
        count = 0 if end.reported or end.lost else self._silent_starts.note(self._events.step, lasted_s)
        if count >= MAX_SILENT_STARTS:
            self._tell(f"that was start {count} in a row without an outcome and without progress; giving up")
            self._cancel_spares()
            return exitcodes.FAILED
        return self._requeue(end)

    def _stopped_too_often(self, end: RunOutcome, lasted_s: float) -> bool:
        """Whether several starts in a row were told to stop before they made progress.

        A run that reports no progress only counts starts that were short.
        """
        signal_name, tells = stopped_by(end), self._events.step or self._stopped_starts.step
        if not signal_name or (lasted_s >= SHORT_START_S and not tells) or self._ending_by_slurm():
            self._stopped_starts.forget()
            return False
        count = self._stopped_starts.note(self._events.step, lasted_s)
        if count < MAX_STOPPED_STARTS.get(signal_name, DEFAULT_MAX_STOPPED_STARTS):
            return False
        self._tell(
            f"that was start {count} in a row that was told to stop by {signal_name} before it came any further; it is "
            "the last: is the time limit longer than the notice of --signal and what the program takes to begin?"
        )
        return True

    def _requeue(self, end: RunOutcome) -> int:
        lost = tuple(sorted((set(end.lost) | self._events.lost) & set(self.job.nodes)))
        try:
            slurm = self.slurm()
            cancel_spares(slurm, self.folder, self.job, self.say)
            requeue_from_inside(
                slurm, self.job, ExcludedNodes(lost, end.unfit), log=str(self.folder / "requeue.log"), say=self._tell
            )
        except SlurmError as error:
            self._tell(f"the job is not put back into the queue, and ends with {end.code}: {error}")
            return end.code
        return exitcodes.OK

    def _cancel_spares(self) -> None:
        try:
            cancel_spares(self.slurm(), self.folder, self.job, self.say)
        except SlurmError as error:
            self._tell(f"spares that were asked for may still wait in the queue: {error}")


def _pause(wakeups: int, seconds: float) -> None:
    """Wait until a signal has written to ``wakeups``, for ``seconds`` at most."""
    if select.select([wakeups], [], [], seconds)[0]:
        os.read(wakeups, 4096)


_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_JOB_WIDE = re.compile(
    r"S(?:LURM|RUN)_(?!JOB_)(\w+_PER_\w+|NTASKS|NPROCS|GPUS|GPU_BIND|GPU_FREQ|TRES\w*|GRES\w*|STEP_GRES|MEM_BIND\w*|HINT|EXACT"
    r"|EXCLUSIVE|DISTRIBUTION|OVERCOMMIT|CORE_SPEC|THREAD_SPEC|HOSTFILE|ARBITRARY_NODELIST|SPREAD_JOB|USE_MIN_NODES)"
)
"""Variables that srun takes for its options, as sbatch sets them or a shell exports them."""


def srun(node: str, gres: Mapping[str, int], command: Sequence[str]) -> list[str]:
    """The command that runs ``command`` once on ``node`` with ``gres``, and all processors and memory of the job there.

    ``gres`` is what the job has on that node (see ``JobDetails``). Slurm gives a step the GPUs that were asked for the
    whole job, a task or a socket; with ``--gpus`` it gives as many as are named, of each type (22.05.8). A step that
    names no processors has all of them. One that asks for all gets none, if tasks or GPUs were asked for unevenly.
    A step of several nodes would end when the first of them fails, and without --no-kill when Slurm notices a dead
    node. The task gets the environment of the batch script, also in a job of ``sbatch --export=NONE``, whose steps have
    none by default.
    """
    gpus = {name: count for name, count in gres.items() if name.partition(":")[0] == "gpu"}
    others = ",".join(f"{name}:{count}" for name, count in gres.items() if name not in gpus)
    told = ",".join(f"{name[4:]}:{count}" if name[4:] else str(count) for name, count in gpus.items())
    bound = [
        *([f"--gpus={told}"] if told else []),
        *([f"--gres={others}"] if told and others else []), "--mem=0",
    ]  # fmt: skip
    return [
        "srun", "--no-kill", "--wait=0", "--kill-on-bad-exit=0", "--overlap", "--export=ALL", "--nodes=1", "--ntasks=1",
        f"--nodelist={node}", *bound, *command,
    ]  # fmt: skip


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without what was asked for the whole job: srun would ask the same for the step."""
    return {name: value for name, value in environ.items() if _JOB_WIDE.fullmatch(name) is None}


class Steps:
    """One srun process per node, each in its own session: srun answers SIGTERM by killing its task.

    None of them outlives this process. The srun of a dead node gives up after a while and cancels its step by number,
    and by then the job may have been started again with steps of the same numbers.
    """

    def __init__(self, commands: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> None:
        """Start them all. Raises OSError if there is no srun."""
        self._running = {
            node: subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                env=dict(environ),
                start_new_session=True,
                preexec_fn=_end_with_parent,  # noqa: PLW1509  # there are no threads here
            )
            for node, command in commands.items()
        }

    @property
    def codes(self) -> dict[str, int]:
        """Exit codes of srun by node, for the steps that have ended."""
        found = {node: process.poll() for node, process in self._running.items()}
        return {node: code for node, code in found.items() if code is not None}

    @property
    def left(self) -> frozenset[str]:
        """The nodes whose step has not ended, according to srun: that of a dead node may seem to run for minutes."""
        return frozenset(self._running) - self.codes.keys()

    def abandon(self) -> None:
        """Kill the remaining sruns without stopping their steps; Slurm ends those with the job."""
        for node in self.left:
            self._running[node].kill()
            self._running[node].wait()

    def signal(self, number: signal.Signals) -> None:
        """Forward SIGUSR1 to the tasks, which srun does without the controller; SIGTERM kills them."""
        for node in self.left:
            with suppress(ProcessLookupError):
                self._running[node].send_signal(number)


def _end_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
