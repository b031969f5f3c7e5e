"""The launcher's state machine: generations of ranks, one after the other, until the run is done or must stop."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from opsd import exitcodes
from opsd.client import process_start, write_request
from opsd.launch.environment import generation_environment, launch_environment
from opsd.launch.events import EventLog
from opsd.launch.failure import Failure, RestartPolicy, Stop, classify, first_cause
from opsd.launch.generation import Generation, Rank, open_log, order_run, start_worker
from opsd.launch.loop import Loop, Timer
from opsd.launch.membership import Assignment, SingleNode
from opsd.launch.process import collect_orphans, sweep
from opsd.launch.rundir import RunFolders, RunState
from opsd.launch.settings import Settings
from opsd.launch.watch import Progress, Recovery, page_of

State = Literal["running", "restarting", "stopping", "finished", "failed"]

GATHER_S = 0.02
"""After a failure that is clearly a first cause: time for the other ranks' exits, for the record."""
GATHER_VICTIM_S = 1.0
"""After an exit that looks like the consequence of another: time for that other to show."""
UNKILLABLE_S = 30.0
POLL_S = 0.25
POLL_AWAITING_S = 0.02


@dataclass(slots=True)
class _Stopping:
    """An orderly stop on the way: asked for by ``by``, enforced when ``deadline`` fires."""

    by: str
    deadline: Timer
    requests: int = 1


class Supervisor:
    """Runs the ranks of this node. ``run()`` returns the launcher's exit code."""

    def __init__(
        self,
        settings: Settings,
        folders: RunFolders,
        events: EventLog,
        membership: SingleNode,
        loop: Loop,
    ) -> None:
        self._settings = settings
        self._folders = folders
        self._events = events
        self._membership = membership
        self._loop = loop
        self._policy = RestartPolicy(
            settings.max_restarts, same_limit=settings.same_failures, refill_steps=settings.refill_steps
        )
        self._progress = Progress(events)
        self._generation = Generation(folders.last_generation())
        self._restarts = 0
        self._state: State = "running"
        self._gathering: Timer | None = None
        self._ending: Callable[[], None] | None = None
        self._stopping: _Stopping | None = None
        self._exit_code = exitcodes.FAILED

    def run(self) -> int:
        """Start the first generation and serve until the run is over."""
        self._loop.on_signals((signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP), self._on_signal)
        self._start_generation()
        self._poll()
        self._loop.every(10.0, self._collect_orphans)
        self._loop.run()
        return self._exit_code

    # -- starting ------------------------------------------------------------------------------------------------

    def _start_generation(self) -> None:
        generation = self._generation = Generation(self._generation.number + 1)
        self._events.generation = generation.number
        self._folders.forget_pages()
        place = self._membership.assign()
        for local_rank in range(self._settings.local_size):
            rank = self._start_rank(place, local_rank)
            generation.ranks.append(rank)
            self._loop.watch(rank.child.pidfd, lambda rank=rank: self._exited(rank))  # type: ignore[misc]
        self._ending = None
        self._set_state("running")
        self._events.emit(
            "generation_started",
            world_size=place.world_size,
            standby=sum(rank.warm for rank in generation.ranks),
            ranks=[{"rank": rank.rank, "pid": rank.child.pid} for rank in generation.ranks],
        )

    def _start_rank(self, place: Assignment, local_rank: int) -> Rank:
        settings, number = self._settings, place.rank_offset + local_rank
        logs = self._folders.generation_logs(self._generation.number)
        log, error_file, page = logs / f"rank-{number:04d}.log", logs / f"rank-{number:04d}.error.json", None
        page = self._folders.page(number)
        env = generation_environment(
            place,
            local_rank=local_rank,
            generation=self._generation.number,
            restarts=self._restarts,
            max_restarts=settings.max_restarts,
            run_id=settings.run_id,
            role=settings.role,
            error_file=error_file,
            page=page,
        )
        output = open_log(log)
        try:
            worker = start_worker(settings.program, self._launch_environment(local_rank), output)
            order_run(worker, settings.program, env, output)
        finally:
            os.close(output)
        return Rank(number, local_rank, worker.child, log, error_file, page, warm=False)

    def _launch_environment(self, local_rank: int) -> dict[str, str]:
        settings = self._settings
        return launch_environment(
            os.environ,
            local_rank=local_rank,
            local_size=settings.local_size,
            run=settings.run,
            run_dir=self._folders.folder,
            job=settings.job,
            node=settings.node,
        )

    # -- watching ------------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        if self._ending is None:
            self._progress.update(self._generation)
        awaiting = self._progress.recovery is not None
        self._loop.later(POLL_AWAITING_S if awaiting else POLL_S, self._poll)

    def _collect_orphans(self) -> None:
        collect_orphans(self._is_own_child)

    def _is_own_child(self, pid: int) -> bool:
        return any(rank.child.pid == pid for rank in self._generation.ranks)

    # -- a rank ends ---------------------------------------------------------------------------------------------

    def _exited(self, rank: Rank) -> None:
        rank.exit, rank.exited = rank.child.exit(), time.monotonic()
        rank.noticed_s = rank.exited - self._loop.last_idle
        self._loop.unwatch(rank.child.pidfd)
        if self._ending is not None:
            self._advance_ending()
        elif rank.exit is not None and not rank.exit.ok and not self._is_stopped_by_us(rank):
            self._gather()
        elif not self._generation.running and self._gathering is None:
            self._all_ended()

    def _gather(self) -> None:
        """Wait briefly for exits that came at the same moment, longer if the true cause has not shown yet."""
        failures = self._failures()
        clear = any(failure.kind != "communication" for failure, _ in failures)
        if self._gathering is None:
            self._gathering = self._loop.later(GATHER_S if clear else GATHER_VICTIM_S, self._settle)
            if not clear:
                self._loop.later(0.05, self._look_for_cause)
        elif clear or not self._generation.running:
            self._gathering.cancel()
            self._gathering = self._loop.later(0.0, self._settle)

    def _look_for_cause(self) -> None:
        if self._gathering is not None and self._ending is None:
            if any(failure.kind != "communication" for failure, _ in self._failures()):
                self._gather()
            else:
                self._loop.later(0.05, self._look_for_cause)

    def _failures(self) -> list[tuple[Failure, Rank]]:
        """What failed: ranks that have ended badly, and ranks that have left an error and are on their way out."""
        offset = time.time() - time.monotonic()
        found = []
        for rank in self._generation.ranks:
            left = rank.error()
            if (rank.exit is None and left is None) or (rank.exit is not None and rank.exit.ok):
                continue
            error, t = left if left is not None else (None, (rank.exited or 0.0) + offset)
            exit = str(rank.exit) if rank.exit is not None else "exception"
            page = page_of(rank)
            step = page.last_step.step if page is not None and page.last_step is not None else None
            kind = classify(exit, error, rank.log_tail())
            found.append((Failure(rank.rank, exit, kind, t, step, page.phase if page else None, error), rank))
        return found

    def _settle(self) -> None:
        self._gathering = None
        self._progress.update(self._generation)
        failures = self._failures()
        cause = first_cause([failure for failure, _ in failures])
        culprit = next(rank for failure, rank in failures if failure is cause)
        for failure, rank in sorted(failures, key=lambda pair: pair[0] is not cause):
            self._report_exit(failure, rank, culprit=failure is cause)
        if cause.error is not None and cause.error.type == "ProgramNotFound":
            self._end_generation(lambda: self._finish(exitcodes.NOT_FOUND, cause.error.message if cause.error else ""))
        elif self._stopping is not None:
            reason = f"rank {cause.rank} failed while the run was stopping: {cause.cause}"
            self._end_generation(lambda: self._finish(exitcodes.FAILED, reason))
        else:
            self._recover(cause, culprit)

    def _report_exit(self, failure: Failure, rank: Rank, *, culprit: bool) -> None:
        page, error = page_of(rank), failure.error
        last = page.last_step if page is not None else None
        self._events.emit(
            "rank_exited",
            rank=rank.rank,
            pid=rank.child.pid,
            exit=failure.exit,
            step=failure.step,
            phase=failure.phase,
            culprit=culprit,
            error=None if error is None else {"type": error.type, "message": error.message, "where": error.where},
            log_tail=rank.log_tail(),
            last_step_t=None if last is None else round(time.time() - time.monotonic() + last.end, 4),
            noticed_s=round(rank.noticed_s, 4),
        )

    def _recover(self, cause: Failure, culprit: Rank) -> None:
        verdict = self._policy.judge(cause, furthest=self._progress.furthest, committed=self._progress.committed)
        if verdict is not None:
            paragraph = self._paragraph(verdict, cause, culprit)
            self._end_generation(lambda: self._finish(verdict.code, paragraph))
            return
        _say(f"rank {cause.rank} failed ({cause.cause}); restarting all ranks")
        self._restart(culprit.exited or time.monotonic())

    def _restart(self, noticed: float) -> None:
        self._set_state("restarting")
        self._restarts += 1
        previous = self._progress.recovery.previous_step if self._progress.recovery else self._progress.furthest
        self._progress.recovery = Recovery(noticed, previous)
        self._end_generation(self._start_generation)

    def _paragraph(self, verdict: Stop, cause: Failure, culprit: Rank) -> str:
        step = "before its first step" if cause.step is None else f"after step {cause.step}"
        tail = "\n".join(f"    {line}" for line in culprit.log_tail(10).splitlines())
        return (
            f"stopped: {verdict.reason}. Rank {cause.rank} on {self._settings.node} failed {step} with {cause.cause}. "
            f"Its log is {culprit.log}" + (f"; it ends in\n{tail}" if tail else ".")
        )

    # -- ending a generation -------------------------------------------------------------------------------------

    def _end_generation(self, then: Callable[[], None]) -> None:
        """Kill every process of the generation, collect them, then go on with ``then``."""
        self._ending = then
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        for rank in self._generation.ranks:
            rank.child.kill_group()
        self._loop.later(UNKILLABLE_S, lambda generation=self._generation: self._give_up(generation))  # type: ignore[misc]
        self._advance_ending()

    def _advance_ending(self) -> None:
        if self._ending is None or self._generation.running:
            return
        for rank in self._generation.ranks:
            rank.child.kill_group()
            rank.child.reap()
        self._generation.ranks.clear()
        self._sweep()

    def _sweep(self) -> None:
        if sweep(self._is_own_child):
            self._loop.later(0.005, self._sweep)
        elif self._ending is not None:
            then, self._ending = self._ending, None
            then()

    def _give_up(self, generation: Generation) -> None:
        if generation is self._generation and self._ending is not None and generation.running:
            pids = ", ".join(f"rank {rank.rank} (pid {rank.child.pid})" for rank in generation.running)
            self._finish(exitcodes.FAILED, f"{pids} cannot be killed: stuck in the kernel; the node needs a reboot")

    def _all_ended(self) -> None:
        self._progress.update(self._generation)
        if self._stopping is not None:
            self._end_generation(self._requeue)
        else:
            self._end_generation(lambda: self._finish(exitcodes.OK, "all ranks finished"))

    # -- stopping ------------------------------------------------------------------------------------------------

    def _on_signal(self, number: signal.Signals) -> None:
        if number is signal.SIGINT:
            self._end_generation(lambda: self._finish(exitcodes.INTERRUPTED, "interrupted by SIGINT"))
        else:
            self.request_stop(number.name)

    def request_stop(self, by: str) -> None:
        """Let the ranks checkpoint at the next step boundary and end; asked again, wait less long."""
        timeout = self._settings.stop_timeout_s
        if self._stopping is not None:
            self._stopping.requests += 1
            self._stopping.deadline.cancel()
            timeout = min(timeout, 20.0) if self._stopping.requests == 2 else 0.0
            self._stopping.deadline = self._loop.later(timeout, self._stop_too_slow)
            return
        self._stopping = _Stopping(by, self._loop.later(timeout, self._stop_too_slow))
        self._set_state("stopping")
        if self._ending is not None:
            self._ending = self._requeue
            return
        for rank in self._generation.running:
            if page_of(rank) is not None:
                write_request(rank.page, "checkpoint_and_stop")
            else:
                rank.child.signal(signal.SIGTERM)

    def _is_stopped_by_us(self, rank: Rank) -> bool:
        return (
            self._stopping is not None
            and rank.exit is not None
            and rank.exit.signal is signal.SIGTERM
            and page_of(rank) is None
        )

    def _stop_too_slow(self) -> None:
        if self._ending is None:
            late = ", ".join(f"rank {rank.rank}" for rank in self._generation.running)
            reason = f"{late} did not stop in time after {self._stopping.by if self._stopping else ''} and was killed"
            self._end_generation(lambda: self._finish(exitcodes.FAILED, reason))

    def _requeue(self) -> None:
        by = self._stopping.by if self._stopping is not None else ""
        self._events.emit("requeued", signal=by, step=self._progress.furthest)
        self._finish(exitcodes.REQUEUE, f"stopped in good order after {by}")

    # -- the end -------------------------------------------------------------------------------------------------

    def _finish(self, code: int, reason: str) -> None:
        self._exit_code = code
        self._set_state("finished" if code in (exitcodes.OK, exitcodes.REQUEUE) else "failed")
        self._events.emit("finished", exit_code=code, reason=reason)
        if code != exitcodes.OK:
            _say(reason)
        self._loop.stop()

    def _set_state(self, state: State) -> None:
        self._state = state
        self._folders.write_state(
            RunState(
                run=self._settings.run,
                job=self._settings.job,
                node=self._settings.node,
                state=state,
                generation=self._generation.number,
                launcher_pid=os.getpid(),
                launcher_start=process_start(os.getpid()) or 0,
                world_size=self._settings.local_size,
                control=str(self._folders.control),
                folder=str(self._folders.folder),
            )
        )


def _say(text: str) -> None:
    print(f"opsd launch: {text}", file=sys.stderr, flush=True)
