"""What is said of a run: to people, on stderr, and at its end.

Messages to people who are not at the terminal: how a run begins, each restart, no progress, the end.

Sent in a thread: a receiver that does not answer delays nothing and ends nothing.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import opsd
from opsd import exitcodes
from opsd.files import SYSTEM_FILE, read_settings
from opsd.launch.io.reporting import Tone, WorkQueue, flush, print_message
from opsd.launch.io.run_log import EventRecord, EventText, RunEventLog, names, without_numbers
from opsd.notify.receiver import NotifyError, Receiver, read_receivers
from opsd.slurm.allocation import AllocationError, allocation, in_job
from opsd.slurm.commands import CommandSlurm
from opsd.slurm.port import Slurm, SlurmError
from opsd.words import duration, plural

Send = Callable[[str, Mapping[str, object]], None]

RESTART_S = 60.0
"""After this time a restart is reported alone. A restart that succeeds sooner is reported with its success."""
STUCK_S = 1800.0
"""Seconds without a step after which a run is stuck, unless ten of its usual steps are longer."""
LOOK_S = 5.0
LAST_S = 5.0
"""Seconds at the end for the last message."""
MAX_WAITING = 100


class Sender:
    """Sends to all receivers that ``where`` names; one that is slow delays no other. Each one's failure is said once.

    Files with URLs are read for each message, so that a renewed URL is used.
    """

    def __init__(self, where: Sequence[str], say: Callable[[str], None] = print_message) -> None:
        self._where = where
        self._say = say
        self._failed: set[str] = set()
        self._read = _queue()
        self._queues: dict[str, WorkQueue] = {}
        self.children: set[int] = set()
        """Processes that deliver a message."""

    def __call__(self, text: str, fields: Mapping[str, object]) -> None:
        """Send a message, after the earlier ones; never blocks."""
        if self._where:
            self._read.put(lambda: self._send(text, fields))

    def flush(self, timeout_s: float) -> None:
        """Wait for at most ``timeout_s`` seconds until all is sent."""
        deadline = time.monotonic() + timeout_s
        done = self._read.flush(timeout_s) and all(
            queue.flush(max(0.0, deadline - time.monotonic())) for queue in self._queues.values()
        )
        if not done:
            self._say(f"the last notification was not sent within {timeout_s:g} s")

    def _send(self, text: str, fields: Mapping[str, object]) -> None:
        for where in self._where:
            try:
                receivers = read_receivers(where)
            except NotifyError as error:
                self._note_failure(where, str(error))
                continue
            for receiver in receivers:
                queue = self._queues.setdefault(receiver.url, _queue())
                queue.put(partial(self._deliver, receiver, text, fields))

    def _deliver(self, receiver: Receiver, text: str, fields: Mapping[str, object]) -> None:
        try:
            receiver.send(text, fields, self.children)
        except NotifyError as error:
            self._note_failure(receiver.url, f"{receiver.name}: {error}")

    def _note_failure(self, key: str, why: str) -> None:
        if key not in self._failed:
            self._failed.add(key)
            self._say(f"not notified: {why}; its later failures are not mentioned")


def _queue() -> WorkQueue:
    return WorkQueue("notifications", limit=MAX_WAITING, awaited=False)


class Notices:
    """Tells people about the run ``run``. The launcher that leads calls it, and ``look`` once in a while."""

    def __init__(self, run: str, job: str, send: Send, clock: Callable[[], float] = time.monotonic) -> None:
        self._common = {"run": run, "job": job}
        self._run = run
        self._send = send
        self._clock = clock
        self.lead(lambda: None)

    def lead(self, furthest: Callable[[], int | None]) -> None:
        """This launcher begins to lead. ``furthest`` is the last step that was completed, None without any."""
        self._furthest = furthest
        self._why = ""
        self._since = self._moved = self._clock()
        self._told = self._stuck = False
        self._step: int | None = None
        self._step_s = self._repeated_s = 0.0

    def began(self, event: Mapping[str, Any]) -> None:
        """The first generation of this start of the run."""
        self._tell(
            "started", f"started: {plural(int(event.get('world_size') or 0), 'rank')} on {names(event['nodes'])}"
        )

    def interrupted(self, why: str) -> None:
        """The run makes no progress because of ``why``; all ranks are restarted."""
        if not self._why:
            self._since, self._told = self._clock(), False
        self._why = why

    def ranks_started(self) -> None:
        """The ranks of another generation run. Of a program without steps nothing else will be known."""
        if self._furthest() is None:
            self.resumed("the ranks run again", 0)

    def resumed(self, how: str, repeated: int) -> None:
        """The run goes on after an interruption, and does ``repeated`` steps again."""
        if self._why:
            self._tell("restarted", f"restarted: {self._why}; {how}", reason=self._why)
        self._why, self._stuck, self._moved = "", False, self._clock()
        self._repeated_s = repeated * self._step_s

    def look(self) -> None:
        """Compare with the last look."""
        now, furthest = self._clock(), self._furthest()
        if furthest is not None and furthest != self._step:
            self._note_step(furthest, now)
        if self._why and not self._told and now - self._since >= RESTART_S:
            self._told = True
            self._tell("restarting", f"is being restarted: {self._why}", reason=self._why)
        limit_s = max(STUCK_S, 10 * self._step_s) + self._repeated_s
        if not self._stuck and self._step is not None and now - self._moved >= limit_s:
            self._stuck = True
            why = f"; {self._why}" if self._why else ""
            said = f"is stuck: no step for {duration(now - self._moved)}; the last one is step {self._step}{why}"
            self._tell("stuck", said, reason=self._why)

    def _note_step(self, step: int, now: float) -> None:
        if self._step is not None and step > self._step:
            self._step_s = (now - self._moved) / (step - self._step)
        if self._stuck:
            self._tell("resumed", f"makes progress again, with step {step}")
        self._step, self._moved, self._stuck, self._repeated_s = step, now, False, 0.0

    def finished(self, code: int, reason: str, summary: str, report: Path | None) -> None:
        """The run has ended with ``code``; ``summary`` says how, what was done, and what it cost."""
        place = f"; report: {report}" if report is not None else ""
        self._tell("finished", f"{summary}{place}", exit_code=code, reason=reason, report=str(report or ""))

    def _tell(self, event: str, text: str, **fields: object) -> None:
        furthest = self._furthest()
        step = {} if furthest is None else {"step": furthest}
        self._send(f"{self._run} {text}", {"event": event, **self._common, **step, **fields})


# The last words of the launcher that leads: ``opsd.report``, in a process of its own, so that nothing holds it up.


REPORT_S = 15.0
STOPPED_S = 5.0
"""The same for a run that a signal stops: Slurm ends its job soon."""
RESUME = "OPSD_RESUME"
"""Set by the batch script: the command that resumes a run whose job Slurm does not requeue."""
SLURM_S = 3.0
"""Time for each of at most three of Slurm's commands."""


@dataclass(frozen=True, slots=True)
class Closing:
    """The ``summary`` of a run that has ended, in one line, and its report, None if there is none."""

    summary: str
    report: Path | None = None


def print_closing_block(folder: Path, code: int, reason: str, resume: str) -> Closing:
    """Make the report of the run in ``folder``, which ends with ``code``, and print its closing block.

    A report that cannot be made in time is left out; `opsd report` makes it later.
    """
    told = [] if code in (exitcodes.OK, exitcodes.NOT_FOUND) else [resume]
    closing = Closing(f"ended with {code}: {reason}")
    try:
        made = subprocess.run(
            [sys.executable, "-m", "opsd.report", str(folder.resolve()), *told],
            cwd=Path(opsd.__file__).parents[1],  # where -m finds this opsd, not one of the user's
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            timeout=STOPPED_S if code in (exitcodes.REQUEUE, exitcodes.INTERRUPTED) else REPORT_S,
            start_new_session=True, check=True,
        )  # fmt: skip
        said = json.loads(made.stdout)
    except subprocess.TimeoutExpired:
        print_message(f"the report is not made in time; `opsd report {shlex.quote(str(folder))}` makes it")
    except (OSError, subprocess.SubprocessError, ValueError):
        pass
    else:
        print_message(said["block"], tone="good" if code == exitcodes.OK else "bad")
        closing = Closing(said["summary"], Path(said["page"]) if said["page"] else None)
    flush()
    return closing


def summarize_job(
    summary: str,
    slurm: Callable[[], Slurm] = lambda: CommandSlurm(deadline_s=SLURM_S),
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Put how the run ended into the comment of the Slurm job, if it is in one; a failure is one line."""
    if in_job(environ):
        try:
            slurm().summarize(allocation(environ).job, summary)
        except (SlurmError, AllocationError) as error:
            print_message(f"the job's comment has no summary of the run: {error}")
            flush()


def resume_command(
    arguments: Sequence[str],
    run: str,
    *,
    named: bool,
    several: bool,
    secrets: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> str:
    """The command that continues a run started with ``opsd`` and these ``arguments``.

    Without Slurm, each start on one node has a name of its own unless it is ``named``. The command is printed and
    stored, and has ``URL`` in the place of each of ``secrets``.
    """
    if again := environ.get(RESUME):
        return again
    if job := environ.get("SLURM_JOB_ID"):
        array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
        return f"scontrol requeue {f'{array}_{task}' if array and task else job}"
    if several:
        return "the same command on each node"
    if arguments[:1] not in (["launch"], ["train"]):
        return "the same command" if named else f"the same command with --run-id {run}"
    own = [] if named else ["--run-id", run]
    for secret in secrets:
        arguments = [argument.replace(secret, "URL") for argument in arguments]
    return shlex.join(["opsd", arguments[0], *own, *arguments[1:]])


# What the leader of a run says on its stderr: how the run begins, each failure, and how it went on afterwards.
#
# A failure and its restart are two lines. The text of the opening is made by ``opening_block``.


DEFAULT_LISTEN = "127.0.0.1:9477"
"""``agent.listen`` where no file says otherwise."""
_CONNECT_S = 0.2
_EVERYWHERE = ("0.0.0.0", "[::]", "", "*")  # noqa: S104  # compared with, not listened on


class Announcer:
    """A ``RunEventLog`` that passes everything on to ``log`` and tells people what they want to know.

    Those at the terminal by ``say``, the others by ``notices``.

    ``opening`` makes the opening block from the event of the first generation; it is None in a launcher that takes over
    a run which has begun.
    """

    def __init__(
        self,
        log: RunEventLog,
        opening: Callable[[EventRecord], str] | None,
        notices: Notices,
        say: Callable[[str, Tone], None] = lambda text, tone: print_message(text, tone=tone),
    ) -> None:
        self._log = log
        self._opening = opening
        self._notices = notices
        self._say = say
        self._nodes: tuple[str, ...] = ()
        self._moved = ""
        self._loaded: EventRecord | None = None
        self._resumed = 0

    @property
    def generation(self) -> int:
        """The generation that runs."""
        return self._log.generation

    @generation.setter
    def generation(self, number: int) -> None:
        self._log.generation = number

    def emit(self, event: str, age_s: float = 0.0, /, **fields: object) -> None:
        self._log.emit(event, age_s, **fields)
        self._note({"event": event, "generation": self.generation, **fields})

    def relay(self, record: Mapping[str, Any], age_s: float) -> None:
        self._log.relay(record, age_s)
        self._note(record)

    def interrupted(self, why: str) -> None:
        """Ranks or a node have failed, which is ``why`` all ranks are restarted."""
        self._say(f"{why}; restarting all ranks", "bad")
        self._notices.interrupted(why)

    def _note(self, event: EventRecord) -> None:
        kind = event["event"]
        if kind == "generation_started" and "nodes" in event:
            self._begun(event)
        elif kind == "checkpoint_loaded" and not event.get("rank"):
            self._loaded = event
        elif kind == "resumed" and event.get("generation") == self.generation != self._resumed:
            self._resumed = self.generation
            how = f"{restarted(event, self._loaded)}{self._moved}"
            self._say(f"restarted: {how}", "good")
            self._notices.resumed(how, int(event.get("lost_steps") or 0))
        elif kind == "segment_split":
            self._say(EventText().sentence(event), "bad")
        elif kind in ("restart_requested", "node_retired"):
            self._notices.interrupted(EventText().sentence(event))

    def _begun(self, event: EventRecord) -> None:
        nodes = tuple(map(str, event["nodes"]))
        came, went = [n for n in nodes if n not in self._nodes], [n for n in self._nodes if n not in nodes]
        self._moved = f"; {names(came)} took the place of {names(went)}" if came and went else ""
        self._moved = self._moved or (f"; without {names(went)}" if went else "")
        self._nodes, self._loaded = nodes, None
        if self._opening is None:
            self._notices.ranks_started()
        else:
            self._say(self._opening(event), "title")
            self._notices.began(event)
            self._opening = None


def restarted(event: EventRecord, loaded: EventRecord | None) -> str:
    """How a run went on, from its event ``resumed`` and the checkpoint that it has ``loaded``."""
    if event.get("step") is None:
        return without_numbers(event)
    lost = int(event.get("lost_steps") or 0)
    again = f"{lost:,} step{'s are' if lost != 1 else ' is'} done again" if lost else "no step is lost"
    seconds = float(event.get("recovered_s") or 0.0)
    source = f" from the checkpoint of step {loaded.get('step')}" if loaded is not None else ""
    return f"it goes on with step {event.get('step')}{source} after {seconds:.1f} s; {again}"


def opening_block(run: str, event: EventRecord, *, folder: Path, logs: Path, page: str, resume: str) -> str:
    """The first words of a run: its shape, where its files are, how to look at it and how to go on later."""
    nodes: Sequence[object] = event.get("nodes") or ()
    spares: Sequence[object] = event.get("spares") or ()
    ranks = int(event.get("world_size") or 0)
    shape = f"{ranks:,} rank{'s' * (ranks != 1)} on {names(nodes)}"
    lines = {
        "spares": names(spares),
        "folder": str(folder),
        "logs": str(logs),
        "page": page,
        "resume": resume,
    }
    return "\n".join([f"{run}: {shape}", *(f"  {name:<10}{text}" for name, text in lines.items() if text)])


def agent_page(run: str, node: str, environ: Mapping[str, str] = os.environ, system: Path = SYSTEM_FILE) -> str:
    """The URL of the run on its node's agent; "" if none listens."""
    file = Path(environ.get("OPSD_CONFIG") or system)
    settings: Any = {}
    with suppress(OSError, ValueError):
        if file.is_file():  # a pipe can be read only once
            settings = tomllib.loads(read_settings(file).decode()).get("agent", {})
    settings = settings if isinstance(settings, dict) else {}
    listen = str(settings.get("listen", DEFAULT_LISTEN))
    host, _, port = listen.rpartition(":")
    everywhere = host in _EVERYWHERE
    try:
        with socket.create_connection(("127.0.0.1" if everywhere else host.strip("[]"), int(port)), _CONNECT_S):
            pass
    except (OSError, ValueError):
        return ""
    scheme = "https" if settings.get("web_config") else "http"
    return f"{scheme}://{node if everywhere else host}:{port}/job/{run}"
