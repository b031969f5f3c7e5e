"""The ranks of this node: started, watched and ended as the one in control of the run says."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from opsd import exitcodes
from opsd.client import RankPage, process_start, write_request
from opsd.launch.console import Console
from opsd.launch.control import Request
from opsd.launch.events import EventLog
from opsd.launch.failure import Failure
from opsd.launch.hang import WARM_STEPS, Hang, Standing
from opsd.launch.hang_watch import HangWatch
from opsd.launch.loop import Loop, Timer
from opsd.launch.membership import Assignment
from opsd.launch.messages import say
from opsd.launch.postmortem import failures
from opsd.launch.process import collect_orphans
from opsd.launch.ranks import Generation, Rank, RankStarter
from opsd.launch.rundir import RunFolders, RunState
from opsd.launch.settings import Settings
from opsd.launch.standby import StandbyPool
from opsd.launch.teardown import Teardown
from opsd.launch.watch import Progress

State = Literal["waiting", "running", "restarting", "stopping", "spare", "finished", "failed"]

GATHER_S = 0.02
"""After a failure that is clearly a first cause: time for the other ranks' exits, for the record."""
GATHER_VICTIM_S = 1.0
"""After an exit that looks like the consequence of another: time for that other to show."""
HASTENED_S = 20.0
"""How long a second SIGTERM still waits: Slurm sends SIGKILL 30 s after its own (KillWait)."""
POLL_S, POLL_SUSPICIOUS_S, POLL_AWAITING_S = 0.25, 0.05, 0.02
QUIET_S = 10.0
"""When ranks without pages count as past their start."""

Failed = tuple[Failure, Rank]


class RunControl(Protocol):
    """Decides about the run: what to do when something has happened on this node."""

    def start_run(self) -> None:
        """The launcher serves; bring about the first generation."""
        ...

    def cannot_start(self, reason: str) -> None:
        """The ranks of the generation could not all be started."""
        ...

    def failed(self, found: Sequence[Failed]) -> None:
        """Ranks of this node have failed, all that did at about the same time."""
        ...

    def hung(self, hang: Hang) -> None:
        """The ranks of this node have stood still for too long; told again for as long as they do."""
        ...

    def ended(self) -> None:
        """All ranks of this node have ended in good order: finished, or stopped as they were told to."""
        ...

    def asked_to_stop(self, by: str) -> None:
        """Somebody wants the run to checkpoint and stop; asked again, to hurry."""
        ...

    def stop_too_slow(self, reason: str) -> None:
        """Ranks that were asked to stop have not done so in time."""
        ...

    def interrupted(self) -> None:
        """SIGINT: end at once."""
        ...

    def request(self, request: Request) -> Request:
        """The answer to a request on the control socket other than ``stop``."""
        ...

    def close(self) -> None:
        """The launcher ends."""
        ...


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
        starter: RankStarter,
        standby: StandbyPool,
        hangs: HangWatch | None,
        console: Console,
    ) -> None:
        self.settings = settings
        self.folders = folders
        self.events = events
        self.loop = loop
        self.progress = Progress(events)
        self.generation = Generation(folders.last_generation())
        self._starter = starter
        self._standby = standby
        self._hangs = hangs
        self._console = console
        self.state: State = "waiting"
        self._gathering: Timer | None = None
        self._teardown: Teardown | None = None
        self._after: Callable[[], None] = loop.stop
        self._stopping: _Stopping | None = None
        self._exit_code: int | None = None
        self._world_size = settings.local_size

    def run(self, control: RunControl) -> int:
        """Serve until the run is over."""
        self._control = control
        self.set_state("waiting")
        self.loop.on_signals((signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP), self._on_signal)
        control.start_run()
        self._standby.study()
        self._poll()
        self.loop.every(10.0, lambda: collect_orphans(self._is_own_child))
        self.loop.run()
        control.close()
        assert self._exit_code is not None
        return self._exit_code

    # -- starting and watching -----------------------------------------------------------------------------------

    def start(self, number: int, place: Assignment, restarts: int) -> None:
        """Start this node's ranks of generation ``number``."""
        if self._stopping is not None:
            self._stopping.deadline.cancel()
            self._stopping = None
        generation = self.generation = Generation(number)
        self.events.generation = number
        self._world_size = place.world_size
        try:
            self._starter.start(generation, place, restarts)
        except OSError as error:
            self._watch_ranks()
            self._control.cannot_start(f"the ranks cannot be started: {error}")
            return
        self._watch_ranks()
        self.set_state("running")
        self.events.emit(
            "generation_started",
            world_size=place.world_size,
            standby=sum(rank.warm for rank in generation.ranks),
            ranks=[{"rank": rank.rank, "pid": rank.child.pid} for rank in generation.ranks],
        )

    def _watch_ranks(self) -> None:
        if self._hangs is not None:
            self._hangs.new_generation()
        for rank in self.generation.ranks:
            self.loop.watch(rank.child.pidfd, lambda rank=rank: self._exited(rank))  # type: ignore[misc]
            self.loop.watch(rank.channel.fileno(), lambda rank=rank: self._failing(rank))  # type: ignore[misc]
            if rank.local_rank in self.settings.shown:
                self._console.follow(rank.log, f"[rank{rank.rank}]: " if self._world_size > 1 else "")

    def _poll(self) -> None:
        if self._teardown is None:
            pages = self.progress.update(self.generation)
            if self._stopping is None and self._settled(pages):
                self._standby.refill()
            hang = self._hangs.look(self.generation, pages) if self._hangs is not None else None
            if hang is not None and self._gathering is None:
                self._control.hung(hang)
        delay = POLL_SUSPICIOUS_S if self._hangs is not None and self._hangs.suspicious else POLL_S
        self.loop.later(POLL_AWAITING_S if self.progress.recovery is not None else delay, self._poll)

    def _settled(self, pages: Mapping[int, RankPage]) -> bool:
        """True once the generation is past its start, so that warming up the next one no longer delays it."""
        if pages:
            return all(page.steps_reported >= WARM_STEPS for page in pages.values())
        return not self.generation.ranks or time.monotonic() - self.generation.started > QUIET_S

    def _is_own_child(self, pid: int) -> bool:
        ranks = any(rank.child.pid == pid for rank in self.generation.ranks)
        return ranks or pid in self._standby.pids or (self._hangs is not None and pid in self._hangs.pids)

    def accept_hang(self, phase: str, score: int) -> None:
        """The run will be restarted for a hang in ``phase`` for which so much spoke."""
        if self._hangs is not None:
            self._hangs.accept(phase, score)

    def standings(self) -> tuple[Standing, ...]:
        """Where the ranks stand, none if hangs are not judged."""
        return self._hangs.standings(self.generation) if self._hangs is not None else ()

    def stand_by(self, number: int) -> None:
        """Run no ranks in generation ``number``, but have interpreters warm for a later one."""
        self.generation = Generation(number)
        self.events.generation = number
        self.set_state("spare")

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
        self.loop.unwatch(rank.child.pidfd)
        if self._teardown is not None:
            self._teardown.advance()
        elif rank.exit is not None and not rank.exit.ok and not self._stopped_as_told(rank):
            self._gather()
        elif not self.generation.running and self._gathering is None:
            self._all_ended()

    def _note_end(self, rank: Rank) -> None:
        if rank.ended is None:
            rank.ended = time.monotonic()
            rank.noticed_s = rank.ended - self.loop.last_idle

    def _close_channel(self, rank: Rank) -> None:
        if rank.channel.fileno() >= 0:
            self.loop.unwatch(rank.channel.fileno())
            rank.channel.close()

    def _gather(self) -> None:
        """Wait briefly for exits that came at the same moment, longer if the true cause has not shown yet."""
        clear = any(failure.kind != "communication" for failure, _ in failures(self.generation))
        if self._gathering is None:
            self._gathering = self.loop.later(GATHER_S if clear else GATHER_VICTIM_S, self._settle)
            if not clear:
                self.loop.later(0.05, self._look_for_cause)
        elif clear or not self.generation.running:
            self._gathering.cancel()
            self._gathering = self.loop.later(0.0, self._settle)

    def _look_for_cause(self) -> None:
        """See whether the rank that was first has left its error by now, though it may take long to end."""
        if self._gathering is None or self._teardown is not None:
            return
        if any(failure.kind != "communication" for failure, _ in failures(self.generation)):
            self._gather()
        else:
            self.loop.later(0.05, self._look_for_cause)

    def _settle(self) -> None:
        self._gathering = None
        self.progress.update(self.generation)
        found = [pair for pair in failures(self.generation) if not self._stopped_as_told(pair[1])]
        if found:
            self._control.failed(found)
        elif not self.generation.running:
            # The signal to stop reached the ranks before it reached us.
            self._all_ended()

    # -- ending --------------------------------------------------------------------------------------------------

    def end(self, then: Callable[[], None], *, gently: bool = False) -> None:
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
            self.generation, self.loop, self._is_own_child, done=self._ended, stuck=self._unkillable, gently=gently
        )
        self._teardown.advance()

    @property
    def ending(self) -> bool:
        """True while the generation is being ended."""
        return self._teardown is not None

    def _ended(self) -> None:
        self._teardown = None
        self._console.end_generation()
        self._after()

    def _unkillable(self, culprits: str) -> None:
        self.finish(exitcodes.FAILED, f"{culprits} cannot be killed: stuck in the kernel; the node needs a reboot")

    def _all_ended(self) -> None:
        self.progress.update(self.generation)
        self.end(self._control.ended, gently=True)

    # -- stopping ------------------------------------------------------------------------------------------------

    def _on_signal(self, number: signal.Signals) -> None:
        if number is signal.SIGINT:
            self._control.interrupted()
        else:
            self._control.asked_to_stop(number.name)

    @property
    def stopping(self) -> str:
        """Who has asked for the orderly stop that is on its way, "" if there is none."""
        return self._stopping.by if self._stopping is not None else ""

    def stop(self, by: str) -> None:
        """Let the ranks checkpoint at the next step boundary and end; asked again, wait less long."""
        timeout = self.settings.stop_timeout_s
        if self._stopping is not None:
            self._stopping.requests += 1
            self._stopping.deadline.cancel()
            timeout = min(timeout, HASTENED_S) if self._stopping.requests == 2 else 0.0
            self._stopping.deadline = self.loop.later(timeout, self._stop_too_slow)
            return
        self._stopping = _Stopping(by, self.loop.later(timeout, self._stop_too_slow))
        self.set_state("stopping")
        for rank in self.generation.running:
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
        if self.generation.running:
            late = ", ".join(f"rank {rank.rank}" for rank in self.generation.running)
            self._control.stop_too_slow(f"{late} did not stop in time after {self.stopping} and was killed")

    def answer(self, request: Request) -> Request:
        """Answer a request from the control socket."""
        command = request.get("cmd")
        if command == "stop":
            self._control.asked_to_stop("control")
            return {"ok": True}
        answer = self._control.request(request)
        if command == "status":
            return {"ok": True, **self._run_state(self.state), "standby": self._standby.ready, **answer}
        return answer

    # -- the end -------------------------------------------------------------------------------------------------

    def finish(self, code: int, reason: str) -> None:
        """End the launcher with the exit code ``code``; the ranks have ended."""
        self._exit_code = code
        self.set_state("finished" if code in (exitcodes.OK, exitcodes.REQUEUE) else "failed")
        self.events.emit("finished", exit_code=code, reason=reason)
        if code != exitcodes.OK:
            say(reason)
        self.loop.stop()

    def set_state(self, state: State) -> None:
        """Let it be known what the launcher is doing."""
        self.state = state
        self.folders.write_state(self._run_state(state))

    def _run_state(self, state: State) -> RunState:
        return RunState(
            run=self.settings.run,
            job=self.settings.job,
            node=self.settings.node,
            state=state,
            generation=self.generation.number,
            launcher_pid=os.getpid(),
            launcher_start=process_start(os.getpid()) or 0,
            world_size=self._world_size,
            control=str(self.folders.control),
            folder=str(self.folders.folder.resolve()),
            logs=str(self.folders.logs.resolve()),
        )
