"""The ranks of this node: started, watched and ended as the run's control decides."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from opsd import exitcodes
from opsd.client import process_start
from opsd.events import Finished, GenerationStarted, RankProcess
from opsd.launch.hangs.hang import RankStatus
from opsd.launch.hangs.limits import FINISH_S, WARM_STEPS
from opsd.launch.hangs.watch import HangWatch
from opsd.launch.io.console import Console
from opsd.launch.io.control import Request
from opsd.launch.io.loop import Loop
from opsd.launch.io.reporting import EventLog, print_message
from opsd.launch.ranks import leftovers
from opsd.launch.ranks.process import GONE_S, Child, ForeignChildren, collect_orphans, launcher_mark, spawn
from opsd.launch.ranks.ranks import Generation, LocalFailureAggregation, Rank, RunProgress
from opsd.launch.ranks.settings import Assignment, Settings, gpu_count
from opsd.launch.ranks.shutdown import SECOND_STOP_S, GracefulStop, Teardown
from opsd.launch.ranks.step_log import StepLog
from opsd.launch.ranks.workers import RankStarter
from opsd.launch.run.companions import Companions
from opsd.launch.run.run_control import CONTROL, RankFailure, RunControl
from opsd.launch.run.slow_ranks import StepSampler
from opsd.rank_page import RankPage
from opsd.rundir import RunFolders, RunState, State
from opsd.words import duration, ranges

POLL_S, POLL_SUSPICIOUS_S, POLL_AWAITING_S = 0.25, 0.05, 0.02
LATE_S = 30.0
"""How long after the first rank that has ended in good order those are named that have not."""
QUIET_S = 10.0
"""When ranks without pages, or with observed ones, which may never have a step, count as started up."""


class Supervisor:
    """Runs the ranks of this node. ``run()`` returns the launcher's exit code.

    ``others`` has the pids of children that are neither ranks nor standbys.
    """

    def __init__(
        self,
        settings: Settings,
        folders: RunFolders,
        events: EventLog,
        loop: Loop,
        *,
        starter: RankStarter,
        hangs: HangWatch | None,
        console: Console,
        others: Collection[int] = (),
        companions: Companions | None = None,
    ) -> None:
        self.settings = settings
        self.folders = folders
        self.events = events
        self.loop = loop
        self.steps = StepLog(folders.folder)
        self.progress = RunProgress(events, self.steps)
        self.generation = Generation(folders.last_generation())
        self.step_times = StepSampler()
        self.done = False
        """True once the ranks of the generation have all ended in good order."""
        self.cut_off = False
        """Whether the signal to stop has ended some of them, which do not handle it."""
        self._starter = starter
        self._standby = starter.standby
        self._hangs = hangs
        self._console = console
        self._others = others
        self._companions = companions
        self.state: State = "waiting"
        self._aggregation = LocalFailureAggregation(loop, self._settle)
        self._reported: set[int] = set()
        self._foreign_children = ForeignChildren()
        self._guard = Guard(loop, folders.folder)
        self._interrupts = 0
        self._teardown: Teardown | None = None
        self._after: Callable[[], None] = loop.stop
        self._stop = GracefulStop(loop, settings.stop_timeout_s, self._stop_too_slow)
        self._exit_code: int | None = None
        self.reason = ""
        """Why the run has ended."""
        self._world_size = settings.local_size

    def run(self, control: RunControl) -> int:
        """Run the event loop until the run is over."""
        self._control = control
        self.set_state("waiting")
        # Under nohup the end of the terminal is none of the run's business.
        hangup = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []
        numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGQUIT, *hangup)
        self.loop.on_signals(numbers, self._on_signal)
        if killed := leftovers.end(leftovers.of_gone_launchers(str(self.folders.folder), self.settings.node)):
            print_message(f"{killed} processes that an earlier launcher of this run has left were killed")
        control.start_run()
        self._poll()
        self.loop.every(10.0, lambda: collect_orphans(self._is_own_child))
        self.loop.run()
        control.close()
        self._guard.close()
        assert self._exit_code is not None
        return self._exit_code

    # -- starting and watching -----------------------------------------------------------------------------------

    def start(self, number: int, place: Assignment, restarts: int) -> None:
        """Start this node's ranks of generation ``number``."""
        self._stop.forget()
        self._reported, self.done = set(), False
        generation = self.generation = Generation(number)
        self.events.generation = number
        self._world_size = place.world_size
        try:
            if self._companions is not None and place.node_rank == 0:
                control = self._control
                self._companions.start(number, control.companion_failed, refused=control.companion_refused)
            self._starter.start(generation, place, restarts)
        except OSError as error:
            self._watch_ranks()
            self._control.cannot_start(f"the ranks cannot be started: {error.strerror or error}")
            return
        self._watch_ranks()
        self.set_state("running")
        fields = GenerationStarted(
            world_size=place.world_size,
            standby=sum(rank.warm for rank in generation.ranks),
            gpus=gpu_count(os.environ),
            ranks=[RankProcess(rank=rank.rank, pid=rank.child.pid) for rank in generation.ranks],
        )
        self.events.emit("generation_started", **fields)

    def _watch_ranks(self) -> None:
        beside = self._companions.pids if self._companions is not None else ()
        self._guard.watch([*(rank.child.pid for rank in self.generation.ranks), *beside])
        if self._hangs is not None:
            self._hangs.new_generation()
        for rank in self.generation.ranks:
            rank.child.watch(self.loop, partial(self._exited, rank))
            self.loop.watch(rank.channel.fileno(), partial(self._failing, rank))

    def _poll(self) -> None:
        if self._teardown is None:
            pages = self.progress.update(self.generation)
            self.step_times.collect(pages)
            if not self.stopping and self._settled(pages):
                self._standby.refill()
            if self._hangs is not None and self._companions is not None:
                self._hangs.companion_works(self._companions.works_at)
            hang = self._hangs.look(self.generation, pages) if self._hangs is not None else None
            if hang is not None and not self._aggregation.open:
                self._control.hung(hang)
        delay = POLL_SUSPICIOUS_S if self._hangs is not None and self._hangs.suspicious else POLL_S
        self.loop.later(POLL_AWAITING_S if self.progress.recovery is not None else delay, self._poll)

    def _settled(self, pages: Mapping[int, RankPage]) -> bool:
        """True once the generation is past its start, so that warming up standbys does not delay it."""
        quiet = not self.generation.ranks or time.monotonic() - self.generation.started > QUIET_S
        if pages:
            steps = [page.steps_reported for page in pages.values() if not (quiet and page.observed)]
            return all(count >= WARM_STEPS for count in steps)
        return quiet

    def _is_own_child(self, pid: int) -> bool:
        own = any(rank.child.pid == pid for rank in self.generation.ranks)
        own = own or pid in self._others or pid in self._guard.pids
        own = own or (self._companions is not None and pid in self._companions.pids)
        return own or pid in self._standby.pids or (self._hangs is not None and pid in self._hangs.pids)

    def _is_left_alone(self, pid: int) -> bool:
        return self._is_own_child(pid) or pid in self._foreign_children

    def accept_hang(self, phase: str, score: int) -> None:
        """The run is restarted for a hang in ``phase``; ``score`` is the weight of the evidence."""
        if self._hangs is not None:
            self._hangs.accept(phase, score)

    @property
    def examining(self) -> bool:
        """Whether a stall of the ranks is being examined, which may excuse them."""
        return self._hangs is not None and self._hangs.examining

    def rank_statuses(self) -> tuple[RankStatus, ...]:
        """The status of the ranks, empty if hang detection is off."""
        return self._hangs.rank_statuses(self.generation) if self._hangs is not None else ()

    def write_dumps(self) -> None:
        """Have the ranks write their flight recorders into the run's folder."""
        if self._hangs is not None:
            self._hangs.write_dumps(self.generation)

    def write_stacks(self) -> str | None:
        """The file with the stacks of a suspected hang, None without one."""
        return self._hangs.write_stacks(self.generation) if self._hangs is not None else None

    def stand_by(self, number: int) -> None:
        """Run no ranks in generation ``number``, and keep standbys for a later one."""
        self._stop.forget()
        self._standby.stand_by()
        self.generation, self.done = Generation(number), False
        self.events.generation = number
        self.set_state("spare")

    # -- failures ------------------------------------------------------------------------------------------------

    def _failing(self, rank: Rank) -> None:
        """The rank's program seems to have failed; its process will end, but that may take seconds."""
        if not rank.failing():
            return
        self._close_channel(rank)
        if self._teardown is None and rank.exit is None and rank.error() is not None:
            self._note_end(rank)
            self._aggregation.note(self.generation)

    def _exited(self, rank: Rank) -> None:
        rank.exit = rank.child.exit()
        self._note_end(rank)
        self._close_channel(rank)
        if self._teardown is not None:
            self._teardown.advance()
        elif rank.exit is not None and not rank.exit.ok and not self._stop.explains(rank):
            self._aggregation.note(self.generation)
        elif not self.generation.running and not self._aggregation.open and not self._reported:
            self._all_ended()
        elif len(self.generation.running) == len(self.generation.ranks) - 1:
            self.loop.later(LATE_S, partial(self._tell_who_is_late, self.generation, rank))

    def _tell_who_is_late(self, generation: Generation, first: Rank) -> None:
        """Say it where ranks stay: an upload, or a deadlock of a library as it ends, which torch's gloo has had."""
        if generation is self.generation and self._teardown is None and generation.running:
            late = f"rank {ranges(rank.rank for rank in generation.running)}"
            waits = "" if self._hangs is None else f". In {duration(FINISH_S)} without progress it counts as hung"
            print_message(f"{late} has not ended {LATE_S:g} s after rank {first.rank}{waits}")

    def _note_end(self, rank: Rank) -> None:
        if rank.ended is None:
            rank.ended = time.monotonic()
            rank.noticed_s = rank.ended - self.loop.last_idle

    def _close_channel(self, rank: Rank) -> None:
        if rank.channel.fileno() >= 0:
            self.loop.unwatch(rank.channel.fileno())
            rank.channel.close()

    def _settle(self) -> None:
        """Report new failures: a rank may fail, report it, and end only later."""
        self.progress.update(self.generation)
        failed = [pair for pair in self.generation.failures() if not self._stop.explains(pair[1])]
        found = [pair for pair in failed if pair[1].rank not in self._reported]
        if found:
            self._reported |= {rank.rank for _, rank in found}
            self._report(found)
        elif not failed and not self.generation.running:
            # The signal to stop reached the ranks before it reached us.
            self._all_ended()

    def _report(self, found: Sequence[RankFailure]) -> None:
        """A companion that has failed is the cause of what ranks say, and is named instead."""
        number = self.generation.number

        def asked(culprit: str) -> None:
            if self.generation.number != number:
                return
            if culprit:
                self._control.companion_failed(culprit)
            else:
                self._control.failed(found)

        if self._companions is None:
            self._control.failed(found)
        else:
            self._companions.culprit(asked)

    # -- ending --------------------------------------------------------------------------------------------------

    def end(self, then: Callable[[], None], *, gracefully: bool = False) -> None:
        """Kill and collect all processes of the generation, then call ``then``."""
        self._after = then
        if self._teardown is None:
            self._tear_down(gracefully=gracefully)
        elif self._teardown.interrupting:
            self._teardown.kill()

    def interrupt(self, then: Callable[[], None]) -> None:
        """Let SIGINT end the ranks within the stop timeout, then call ``then``.

        A second call shortens the timeout to 20 s, a third to 0.
        """
        self._after = then
        self._interrupts += 1
        if self._teardown is None:
            self._stop.forget()
            self.set_state("stopping")
            if self.generation.running:
                seconds = f"{self.settings.stop_timeout_s:g} s"
                print_message(
                    f"SIGINT: the ranks have {seconds} to end; a second one leaves {SECOND_STOP_S:g} s, a third none"
                )
            self._tear_down(interrupt_s=self.settings.stop_timeout_s)
        elif self._teardown.interrupting and self._interrupts == 2:
            self._teardown.within(min(SECOND_STOP_S, self.settings.stop_timeout_s))
        elif self._interrupts > 2:
            self._teardown.kill()

    def _tear_down(self, *, gracefully: bool = False, interrupt_s: float | None = None) -> None:
        self._aggregation.forget()
        if self._companions is not None:
            self._companions.collect()
        if self._hangs is not None:
            self._hangs.reset()
        self._teardown = Teardown(
            self.generation,
            self.loop,
            self._is_left_alone,
            done=self._ended,
            stuck=self._unkillable,
            gracefully=gracefully,
            interrupt_s=interrupt_s,
        )
        self._teardown.advance()

    @property
    def ending(self) -> bool:
        """True while the generation is being ended."""
        return self._teardown is not None

    def _ended(self) -> None:
        self._teardown = None
        self._guard.watch(())
        self._console.end_generation()
        self._after()

    def _unkillable(self, culprits: str) -> None:
        self.finish(exitcodes.FAILED, f"{culprits} cannot be killed: stuck in the kernel; the node needs a reboot")

    def _all_ended(self) -> None:
        self.done, self.cut_off = True, any(map(self._stop.explains, self.generation.ranks))
        self.progress.update(self.generation)
        self.end(self._control.ended, gracefully=True)

    # -- stopping ------------------------------------------------------------------------------------------------

    def _on_signal(self, number: signal.Signals) -> None:
        if number is signal.SIGINT:
            self._control.interrupted()
        else:
            self._control.asked_to_stop(number.name)

    @property
    def stopping(self) -> str:
        """The origin of the orderly stop that is in progress, "" without one."""
        return self._stop.by

    def stop(self, by: str) -> None:
        """Let the ranks checkpoint at the next step boundary and end; repeated calls shorten the wait."""
        if not self.stopping:
            self.set_state("stopping")
        self._stop.ask(by, self.generation)

    def _stop_too_slow(self, reason: str) -> None:
        self._control.stop_too_slow(reason)

    def answer(self, request: Request) -> Request:
        """Answer a request from the control socket."""
        command = request.get("cmd")
        if command == "stop":
            self._control.asked_to_stop(CONTROL)
            return {"ok": True}
        answer = self._control.request(request)
        if command == "status":
            return {"ok": True, **self._run_state(self.state), "standby": self._standby.ready, **answer}
        return answer

    # -- the end -------------------------------------------------------------------------------------------------

    def finish(self, code: int, reason: str) -> None:
        """End the launcher with the exit code ``code``; the ranks have ended."""
        self._exit_code, self.reason = code, reason
        self.steps.flush()
        self.set_state("finished" if code in (exitcodes.OK, exitcodes.REQUEUE) else "failed")
        self.events.emit("finished", **Finished(exit_code=code, reason=reason))
        if code != exitcodes.OK:
            print_message(reason)
        self.loop.stop()

    def set_state(self, state: State) -> None:
        """Publish the launcher's state."""
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


_AGAIN_S = 1.0


class Guard:
    """A guard that is there while the launcher is: one that ends is replaced."""

    def __init__(self, loop: Loop, folder: Path) -> None:
        """``folder`` is that of the run, as its ranks know it."""
        self._loop = loop
        self._folder = folder
        self._child: Child | None = None
        self._channel: socket.socket | None = None
        self._leaders = "leaders"
        self._start()

    @property
    def pids(self) -> Collection[int]:
        """Its process, which is no rank's."""
        return () if self._child is None else (self._child.pid,)

    def watch(self, leaders: Collection[int]) -> None:
        """From now on these are the ranks and companions; they have not been collected yet."""
        self._leaders = " ".join(["leaders", *(f"{pid}:{process_start(pid)}" for pid in leaders)])
        self._say(self._leaders)

    def close(self) -> None:
        """The launcher is about to end, and has ended its ranks."""
        self._say(leftovers.DONE)
        self._collect()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = (sys.executable, "-I", "-S", leftovers.__file__, launcher_mark(), str(self._folder))
        env = {name: value for name, value in os.environ.items() if name != leftovers.LAUNCHER}
        with theirs:
            ours.send(self._leaders.encode())  # before it begins: the launcher may be killed at any time
            try:
                self._child = spawn(
                    command, env=env, cwd=Path("/"), stdin=theirs.fileno(), output=subprocess.DEVNULL, error_output=2
                )
            except OSError as error:
                ours.close()
                print_message(f"there is no guard over what ranks and companions leave: {error.strerror}")
                return
        self._channel = ours
        ours.setblocking(False)
        self._child.watch(self._loop, self._ended)

    def _ended(self) -> None:
        self._collect()
        self._loop.later(_AGAIN_S, self._start)

    def _collect(self) -> None:
        if self._child is not None and self._channel is not None:
            self._channel.close()
            self._child.reap(GONE_S)
            self._child = self._channel = None

    def _say(self, message: str) -> None:
        if self._channel is not None:
            with contextlib.suppress(OSError):  # it has ended, and is replaced, or it is stopped
                self._channel.send(message.encode())
