"""The launcher's state machine: generations of ranks, one after the other, until the run is done or must stop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from opsd import exitcodes
from opsd.client import RankPage, process_start, write_request
from opsd.launch.console import Console
from opsd.launch.control import Request
from opsd.launch.events import EventLog
from opsd.launch.failure import Failure, RestartPolicy, first_cause
from opsd.launch.hang import WARM_STEPS, Hang
from opsd.launch.hang_watch import HangWatch
from opsd.launch.loop import Loop, Timer
from opsd.launch.membership import SingleNode
from opsd.launch.messages import say
from opsd.launch.postmortem import PROGRAM_NOT_FOUND, explain, failures, report_exit
from opsd.launch.process import collect_orphans
from opsd.launch.ranks import Generation, Rank, RankStarter
from opsd.launch.rundir import RunFolders, RunState
from opsd.launch.settings import Settings
from opsd.launch.standby import StandbyPool
from opsd.launch.teardown import Teardown
from opsd.launch.watch import Progress, Recovery

State = Literal["running", "restarting", "stopping", "finished", "failed"]

GATHER_S = 0.02
"""After a failure that is clearly a first cause: time for the other ranks' exits, for the record."""
GATHER_VICTIM_S = 1.0
"""After an exit that looks like the consequence of another: time for that other to show."""
HASTENED_S = 20.0
"""How long a second SIGTERM still waits: Slurm sends SIGKILL 30 s after its own (KillWait)."""
POLL_S, POLL_SUSPICIOUS_S, POLL_AWAITING_S = 0.25, 0.05, 0.02
QUIET_S = 10.0
"""When ranks without pages count as past their start."""


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
        loop: Loop,
        *,
        membership: SingleNode,
        starter: RankStarter,
        standby: StandbyPool,
        hangs: HangWatch | None,
        console: Console,
    ) -> None:
        self._settings = settings
        self._folders = folders
        self._events = events
        self._loop = loop
        self._membership = membership
        self._starter = starter
        self._standby = standby
        self._hangs = hangs
        self._console = console
        self._policy = RestartPolicy(
            settings.max_restarts, same_limit=settings.same_failures, refill_steps=settings.refill_steps
        )
        self._progress = Progress(events)
        self._generation = Generation(folders.last_generation())
        self._restarts = 0
        self._state: State = "running"
        self._gathering: Timer | None = None
        self._teardown: Teardown | None = None
        self._after: Callable[[], None] = self._start_generation
        self._stopping: _Stopping | None = None
        self._exit_code: int | None = None

    def run(self) -> int:
        """Start the first generation and serve until the run is over."""
        self._loop.on_signals((signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP), self._on_signal)
        self._start_generation()
        self._standby.study()
        self._poll()
        self._loop.every(10.0, lambda: collect_orphans(self._is_own_child))
        self._loop.run()
        assert self._exit_code is not None
        return self._exit_code

    # -- starting and watching -----------------------------------------------------------------------------------

    def _start_generation(self) -> None:
        generation = self._generation = Generation(self._generation.number + 1)
        self._events.generation = generation.number
        try:
            place = self._membership.assign()
            self._starter.start(generation, place, self._restarts)
        except OSError as error:
            reason = f"the ranks cannot be started: {error}"
            self._watch_ranks()
            self._end_generation(lambda: self._finish(exitcodes.FAILED, reason))
            return
        self._watch_ranks()
        self._set_state("running")
        self._events.emit(
            "generation_started",
            world_size=place.world_size,
            standby=sum(rank.warm for rank in generation.ranks),
            ranks=[{"rank": rank.rank, "pid": rank.child.pid} for rank in generation.ranks],
        )

    def _watch_ranks(self) -> None:
        if self._hangs is not None:
            self._hangs.new_generation()
        for rank in self._generation.ranks:
            self._loop.watch(rank.child.pidfd, lambda rank=rank: self._exited(rank))  # type: ignore[misc]
            self._loop.watch(rank.channel.fileno(), lambda rank=rank: self._failing(rank))  # type: ignore[misc]
            if rank.local_rank in self._settings.shown:
                self._console.follow(rank.log, f"[rank{rank.rank}]: " if self._settings.local_size > 1 else "")

    def _poll(self) -> None:
        if self._teardown is None:
            pages = self._progress.update(self._generation)
            if self._stopping is None and self._settled(pages):
                self._standby.refill()
            hang = self._hangs.look(self._generation, pages) if self._hangs is not None else None
            if hang is not None and self._gathering is None:
                self._hung(hang)
        delay = POLL_SUSPICIOUS_S if self._hangs is not None and self._hangs.suspicious else POLL_S
        self._loop.later(POLL_AWAITING_S if self._progress.recovery is not None else delay, self._poll)

    def _settled(self, pages: Mapping[int, RankPage]) -> bool:
        """True once the generation is past its start, so that warming up the next one no longer delays it."""
        if pages:
            return all(page.steps_reported >= WARM_STEPS for page in pages.values())
        return time.monotonic() - self._generation.started > QUIET_S

    def _is_own_child(self, pid: int) -> bool:
        ranks = any(rank.child.pid == pid for rank in self._generation.ranks)
        return ranks or pid in self._standby.pids or (self._hangs is not None and pid in self._hangs.pids)

    # -- failures ------------------------------------------------------------------------------------------------

    def _failing(self, rank: Rank) -> None:
        """The rank's program has failed; its process will end, but that may take seconds."""
        self._close_channel(rank)
        if self._teardown is None and rank.exit is None and rank.error() is not None:
            self._note_end(rank)
            self._gather()

    def _exited(self, rank: Rank) -> None:
        rank.exit = rank.child.exit()
        self._note_end(rank)
        self._close_channel(rank)
        self._loop.unwatch(rank.child.pidfd)
        if self._teardown is not None:
            self._teardown.advance()
        elif rank.exit is not None and not rank.exit.ok and not self._stopped_as_told(rank):
            self._gather()
        elif not self._generation.running and self._gathering is None:
            self._all_ended()

    def _note_end(self, rank: Rank) -> None:
        if rank.ended is None:
            rank.ended = time.monotonic()
            rank.noticed_s = rank.ended - self._loop.last_idle

    def _close_channel(self, rank: Rank) -> None:
        if rank.channel.fileno() >= 0:
            self._loop.unwatch(rank.channel.fileno())
            rank.channel.close()

    def _gather(self) -> None:
        """Wait briefly for exits that came at the same moment, longer if the true cause has not shown yet."""
        clear = any(failure.kind != "communication" for failure, _ in failures(self._generation))
        if self._gathering is None:
            self._gathering = self._loop.later(GATHER_S if clear else GATHER_VICTIM_S, self._settle)
            if not clear:
                self._loop.later(0.05, self._look_for_cause)
        elif clear or not self._generation.running:
            self._gathering.cancel()
            self._gathering = self._loop.later(0.0, self._settle)

    def _look_for_cause(self) -> None:
        """See whether the rank that was first has left its error by now, though it may take long to end."""
        if self._gathering is None or self._teardown is not None:
            return
        if any(failure.kind != "communication" for failure, _ in failures(self._generation)):
            self._gather()
        else:
            self._loop.later(0.05, self._look_for_cause)

    def _settle(self) -> None:
        self._gathering = None
        self._progress.update(self._generation)
        found = [pair for pair in failures(self._generation) if not self._stopped_as_told(pair[1])]
        if not found:
            # The signal to stop reached the ranks before it reached us.
            if not self._generation.running:
                self._all_ended()
            return
        cause = first_cause([failure for failure, _ in found])
        culprit = next(rank for failure, rank in found if failure is cause)
        for failure, rank in sorted(found, key=lambda pair: pair[0] is not cause):
            report_exit(self._events, rank, failure, culprit=failure is cause)
        if cause.error is not None and cause.error.type == PROGRAM_NOT_FOUND:
            message = cause.error.message
            self._end_generation(lambda: self._finish(exitcodes.NOT_FOUND, message))
        else:
            self._recover(cause, culprit, culprit.ended or time.monotonic())

    def _hung(self, hang: Hang) -> None:
        rank = next((rank for rank in self._generation.ranks if rank.rank == hang.rank), self._generation.ranks[0])
        cause = Failure(
            rank.rank, f"a hang in {hang.phase}", "hang", time.time(), hang.step, hang.phase, detail=hang.reason
        )
        self._recover(cause, rank, time.monotonic())

    def _recover(self, cause: Failure, culprit: Rank, noticed: float) -> None:
        if self._stopping is not None:
            reason = f"rank {cause.rank} failed while the run was stopping: {cause.cause}"
            self._end_generation(lambda: self._finish(exitcodes.FAILED, reason))
            return
        verdict = self._policy.judge(cause, furthest=self._progress.furthest, committed=self._progress.committed)
        if verdict is not None:
            paragraph = explain(verdict, cause, culprit, self._settings.node)
            self._end_generation(lambda: self._finish(verdict.code, paragraph))
            return
        say(f"rank {cause.rank} failed with {cause.cause}; restarting all ranks")
        self._restart(noticed)

    def _restart(self, noticed: float) -> None:
        self._set_state("restarting")
        self._restarts += 1
        previous = self._progress.recovery.previous_step if self._progress.recovery else self._progress.furthest
        self._progress.recovery = Recovery(noticed, previous)
        self._end_generation(self._start_generation)

    # -- ending --------------------------------------------------------------------------------------------------

    def _end_generation(self, then: Callable[[], None], *, gently: bool = False) -> None:
        """Kill every process of the generation, collect them, then go on with ``then``."""
        self._after = then
        if self._teardown is not None:
            return
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        if self._hangs is not None:
            self._hangs.relax()
        self._teardown = Teardown(
            self._generation, self._loop, self._is_own_child, done=self._ended, stuck=self._unkillable, gently=gently
        )
        self._teardown.advance()

    def _ended(self) -> None:
        self._teardown = None
        self._console.end_generation()
        self._after()

    def _unkillable(self, culprits: str) -> None:
        self._finish(exitcodes.FAILED, f"{culprits} cannot be killed: stuck in the kernel; the node needs a reboot")

    def _all_ended(self) -> None:
        self._progress.update(self._generation)
        if self._stopping is not None:
            self._end_generation(self._requeue, gently=True)
        else:
            self._end_generation(lambda: self._finish(exitcodes.OK, "all ranks finished"), gently=True)

    # -- stopping ------------------------------------------------------------------------------------------------

    def _on_signal(self, number: signal.Signals) -> None:
        if number is signal.SIGINT:
            self._end_generation(lambda: self._finish(exitcodes.INTERRUPTED, "interrupted by SIGINT"))
        else:
            self._request_stop(number.name)

    def _request_stop(self, by: str) -> None:
        """Let the ranks checkpoint at the next step boundary and end; asked again, wait less long."""
        timeout = self._settings.stop_timeout_s
        if self._stopping is not None:
            self._stopping.requests += 1
            self._stopping.deadline.cancel()
            timeout = min(timeout, HASTENED_S) if self._stopping.requests == 2 else 0.0
            self._stopping.deadline = self._loop.later(timeout, self._stop_too_slow)
            return
        self._stopping = _Stopping(by, self._loop.later(timeout, self._stop_too_slow))
        if self._state == "restarting":
            self._end_generation(self._requeue)
        self._set_state("stopping")
        for rank in self._generation.running:
            try:
                if rank.page() is None:
                    rank.child.signal(signal.SIGTERM)
                else:
                    write_request(rank.page_path, "checkpoint_and_stop")
            except OSError as error:
                say(f"rank {rank.rank} cannot be asked to stop ({error.strerror}); it is sent SIGTERM")
                rank.child.signal(signal.SIGTERM)

    def _stopped_as_told(self, rank: Rank) -> bool:
        """True for a rank without a page that died of the signal to stop, passed on by us or sent to the whole job."""
        signalled = rank.exit is not None and rank.exit.signal in (signal.SIGTERM, signal.SIGUSR1)
        return self._stopping is not None and signalled and rank.page() is None

    def _stop_too_slow(self) -> None:
        if not self._generation.running:
            return
        late = ", ".join(f"rank {rank.rank}" for rank in self._generation.running)
        by = self._stopping.by if self._stopping is not None else ""
        reason = f"{late} did not stop in time after {by} and was killed"
        self._end_generation(lambda: self._finish(exitcodes.FAILED, reason))

    def _requeue(self) -> None:
        by = self._stopping.by if self._stopping is not None else ""
        self._events.emit("requeued", signal=by, step=self._progress.furthest)
        self._finish(exitcodes.REQUEUE, f"stopped in good order after {by}")

    def control(self, request: Request) -> Request:
        """Answer a request from the control socket."""
        command = request.get("cmd")
        if command == "status":
            return {"ok": True, **self._run_state(self._state), "standby": self._standby.ready}
        if command == "stop":
            self._request_stop("control")
            return {"ok": True}
        if command == "restart":
            if self._teardown is not None or self._stopping is not None:
                return {"ok": False, "error": f"the run is {self._state}"}
            self._events.emit("restart_requested", reason=str(request.get("reason", "")))
            self._restart(time.monotonic())
            return {"ok": True}
        return {"ok": False, "error": f"unknown command {command!r}; known are status, restart, stop"}

    # -- the end -------------------------------------------------------------------------------------------------

    def _finish(self, code: int, reason: str) -> None:
        self._exit_code = code
        self._set_state("finished" if code in (exitcodes.OK, exitcodes.REQUEUE) else "failed")
        self._events.emit("finished", exit_code=code, reason=reason)
        if code != exitcodes.OK:
            say(reason)
        self._loop.stop()

    def _set_state(self, state: State) -> None:
        self._state = state
        self._folders.write_state(self._run_state(state))

    def _run_state(self, state: State) -> RunState:
        return RunState(
            run=self._settings.run,
            job=self._settings.job,
            node=self._settings.node,
            state=state,
            generation=self._generation.number,
            launcher_pid=os.getpid(),
            launcher_start=process_start(os.getpid()) or 0,
            world_size=self._settings.local_size,
            control=str(self._folders.control),
            folder=str(self._folders.folder.resolve()),
            logs=str(self._folders.logs.resolve()),
        )
