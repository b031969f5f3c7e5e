"""The log of a run on several nodes: its events, in one file that only the leader writes, and ``job.log`` for people.

``job.log`` has a readable line for each event that matters:

2026-11-22 08:15:04 n4 is lost with its ranks: silent for 2.1 s
2026-11-22 08:15:05 generation 3 runs on n1, n2, n5: n5 in the place of n4
2026-11-22 08:15:08 it goes on with step 121 after 3.6 s; 1 step is done again
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from opsd.launch.io.reporting import EventFile, EventLog, Work, WorkQueue, encoded, print_message

OF_ONE_LAUNCHER = ("generation_started", "finished")
"""Each launcher has its own of these events; the leader's are those of the run."""
JOB_LOG = "job.log"
OF_THEIR_NODE = ("hang_detected", "straggler_found", "straggler_gone")
"""The launcher of the node that they are about writes them, too."""
BATCH_HOST = "OPSD_BATCH_HOST"
"""The node with the batch script, which copies ``job.log`` to the job's output while it lives."""
JOB_OUTPUT = "OPSD_JOB_OUTPUT"
"""``INODE:PATH`` of that output, where it is a file."""
EventRecord = Mapping[str, Any]
_LOOK_BACK = 1 << 18
_LONGEST = 400


class RunEventLog(Protocol):
    """The leader's record of the events of the run; ``generation`` is the one that runs."""

    generation: int

    def emit(self, event: str, age_s: float = 0.0, /, **fields: object) -> None:
        """Append an event of the run that happened ``age_s`` seconds ago."""

    def relay(self, record: Mapping[str, Any], age_s: float) -> None:
        """Append an event that a node recorded ``age_s`` seconds ago."""


class LocalRunLog:
    """For a run on one node: the launcher's own events, which already have most of the leader's."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self.generation = 0

    def emit(self, event: str, age_s: float = 0.0, /, **fields: object) -> None:
        if event not in (*OF_ONE_LAUNCHER, *OF_THEIR_NODE):
            self._events.write(event, time.time() - age_s, fields, relayed=False)

    def relay(self, record: Mapping[str, Any], age_s: float) -> None:
        """The launcher has written it."""


class RunLog:
    """``events.jsonl`` of the run folder. Opened at the first event, since only a leader has any.

    Read and written by ``work``, if given, since the folder is on a file server.
    """

    def __init__(self, run: str, node: str, path: Path, work: WorkQueue | None = None) -> None:
        self._run, self._node = run, node
        self._file = EventFile(path)
        self._job_log = JobLog(path.parent)
        self._do: Callable[[Work], None] = work.put if work is not None else lambda now: now()
        self._once: set[tuple[object, ...]] = set()
        self.generation = 0
        self._do(self._read)

    def emit(self, event: str, age_s: float = 0.0, /, **fields: object) -> None:
        t = time.time() - age_s
        record = {"t": t, "event": event, "generation": self.generation, "node": self._node, **fields}
        self._do(lambda: self._write(record))

    def relay(self, record: Mapping[str, Any], age_s: float) -> None:
        """Append an event that a node recorded ``age_s`` seconds ago.

        Events that ranks on several nodes record at the same time are one event: a durable checkpoint, the first step
        of a generation.
        """
        if record["event"] in OF_ONE_LAUNCHER:
            return
        dated = {**record, "t": time.time() - age_s}
        self._do(lambda: self._write(dated) if self._note(dated) else None)

    def _read(self) -> None:
        for record in _written(self._file.path):
            self._note(record)
            self._job_log.remember(record)

    def _note(self, record: Mapping[str, Any]) -> bool:
        """False for an event that is known."""
        kind = record["event"]
        if kind == "checkpoint_rejected":
            self._once = {key for key in self._once if key[0] != "checkpoint_committed"}
        if kind not in ("checkpoint_committed", "resumed"):
            return True
        key = (kind, record.get("step") if kind == "checkpoint_committed" else record["generation"])
        known = key in self._once
        self._once.add(key)
        return not known

    def _write(self, record: Mapping[str, Any]) -> None:
        self._file.append(encoded({"run": self._run, **record}))
        self._job_log.tell(record)


def _written(path: Path) -> Iterator[dict[str, Any]]:
    """The newest events that earlier leaders have written."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOOK_BACK))
            lines = file.read().splitlines()
    except OSError:
        return
    for line in lines:
        with suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and {"event", "generation"} <= record.keys():
                yield record


class JobLog:
    """Writes ``job.log`` in ``folder``. A failure to write is reported once."""

    def __init__(self, folder: Path, environ: Mapping[str, str] = os.environ) -> None:
        self._path = folder / JOB_LOG
        self._job_log = EventText()
        self._batch_host = environ.get(BATCH_HOST, "")
        inode, _, path = environ.get(JOB_OUTPUT, "").partition(":")
        self._output = Path(path) if path and inode.isdecimal() else None
        self._inode = int(inode) if inode.isdecimal() else 0
        self._orphaned = False
        self._failed = False

    def tell(self, event: Mapping[str, Any]) -> None:
        """Append the line of ``event``, if it has one."""
        line = self.remember(event)
        if not line:
            return
        try:
            _append_line(self._path, line)
        except OSError as error:
            if not self._failed:
                print_message(f"the log of the run is not written to {self._path}: {error.strerror}")
            self._failed = True
        if self._orphaned and self._output is not None:
            with suppress(OSError):
                if self._output.stat().st_ino == self._inode:
                    _append_line(self._output, f"opsd: {line}", create=False)

    def remember(self, event: Mapping[str, Any]) -> str:
        """Take ``event`` into account, which an earlier leader may have written; returns its line."""
        if self._batch_host and event.get("event") == "node_lost" and event.get("lost") == self._batch_host:
            self._orphaned = True
        elif self._batch_host in _present(event):
            self._orphaned = False  # it was lost in an earlier start, or came back: the job's output is its own again
        return self._job_log.line(event)


def _present(event: Mapping[str, Any]) -> tuple[object, ...]:
    """The nodes that have a launcher, as far as ``event`` tells."""
    if event.get("event") == "generation_started":
        return (*(event.get("nodes") or ()), *(event.get("spares") or ()))
    return (event.get("joined"),)


def tell(folder: Path, sentence: str) -> None:
    """Append a line to ``job.log`` of the run in ``folder`` for what no event tells. Raises OSError."""
    _append_line(folder / JOB_LOG, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {_one_line(sentence)}")


def _append_line(path: Path, line: str, *, create: bool = True) -> None:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_CREAT if create else 0)
    descriptor = os.open(path, flags, 0o644)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


class EventText:
    """Describes the events of a run, in order (see the table of events in the documentation)."""

    def __init__(self) -> None:
        self._nodes: tuple[str, ...] = ()

    def line(self, event: EventRecord) -> str:
        """The line of ``event`` with its time, without a line end; "" for one that does not matter."""
        if event.get("event") not in _TOLD and event.get("event") != "generation_started":
            return ""
        told = self.sentence(event)
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(_number(event.get("t"))))
        return f"{stamp} {told}" if told else ""

    def sentence(self, event: EventRecord) -> str:
        """``event`` in one line; "" for one that does not matter."""
        try:
            kind = str(event["event"])
            told = self._generation(event) if kind == "generation_started" else _TOLD[kind](event)
        except (KeyError, TypeError, ValueError, AttributeError):
            told = f"{event.get('event')}"  # of another release: its time and kind are worth a line all the same
        return _one_line(told)

    def _generation(self, event: EventRecord) -> str:
        nodes = tuple(map(str, event.get("nodes") or ()))
        before, self._nodes = self._nodes, nodes
        if not nodes:
            return ""
        spares = list(map(str, event.get("spares") or ()))
        told = f"generation {event['generation']} runs on {names(nodes)}"
        came = [name for name in nodes if name not in before]
        went = [name for name in before if name not in nodes]
        if before and came and went:
            told += f": {names(came)} in the place of {names(went)}"
        elif before and went:
            told += f", without {names(went)}"
        elif before and came:
            told += f", with {names(came)} again or for the first time"
        return f"{told}; {names(spares)} stand{'s' if len(spares) == 1 else ''} by" if spares else told


def _rank_exited(event: EventRecord) -> str:
    if not event.get("culprit"):
        return ""
    step, error = event.get("step"), event.get("error")
    when = "before a step was seen" if step is None else f"after step {step}"
    told = f"rank {event['rank']} on {event['node']} failed {when}"
    return f"{told}: {error.get('type')}: {error.get('message')}" if error else f"{told}: {event['exit']}"


def _hang(event: EventRecord) -> str:
    who = f"rank {event['rank']}" if event.get("rank") is not None else "the run, no rank more than others,"
    where = f" on {event['culprit_node']}" if event.get("culprit_node") else ""
    stacks = f"; stacks in {event['stacks']}" if event.get("stacks") else ""
    return f"{who}{where} hangs in {event['phase']} since {_number(event['stuck_s']):.0f} s{stacks}"


def _straggler(event: EventRecord) -> str:
    evidence = event.get("evidence") or ("",)
    return f"{event['cause']}, {_number(event['slowdown']):.2f} times the usual step: {evidence[0]}"


def _straggler_gone(event: EventRecord) -> str:
    where = f" on {names(event['culprit_nodes'])}" if event.get("culprit_nodes") else ""
    return f"no longer: {event['cause']}{where}"


def without_numbers(event: EventRecord) -> str:
    """How a run went on whose program counts its steps from the start of the process."""
    return (
        f"it goes on after {_number(event['recovered_s']):.1f} s; how many steps are done again is not known, because "
        "the program reports steps without their number: reporter.step(step=…)"
    )


def _resumed(event: EventRecord) -> str:
    if event.get("step") is None:
        return without_numbers(event)
    lost = int(event.get("lost_steps") or 0)
    again = f"{lost} step{'s are' if lost != 1 else ' is'} done again" if lost else "no step is lost"
    return f"it goes on with step {event['step']} after {_number(event['recovered_s']):.1f} s; {again}"


def _loaded(event: EventRecord) -> str:
    return "" if event.get("rank") else f"the state of step {event['step']} is loaded from {event['tier']}"


def _node_lost(event: EventRecord) -> str:
    what = " with its ranks" if event.get("ranks") else ", which stood by"
    return f"{event['lost']} is lost{what}: silent for {_number(event['silent_s']):.1f} s"


def _stopped(event: EventRecord) -> str:
    step = event.get("step")
    return f"{f'saved at step {step} and ' if step is not None else ''}stopped after {event['signal']}"


def _finished(event: EventRecord) -> str:
    return f"the run ends with {event['exit_code']}: {event['reason']}"


def _spare_joined(event: EventRecord) -> str:
    told = [f"{event['joined']} stands by and takes place {event['place']}"]
    if "hops" in event:
        old = f"{event['replaces']} was {event['hops_before']:.1f}"
        told.append(f"it is {event['hops']:.1f} hops from the others, {old}")
    return "; ".join([*told, *event.get("bad_ways", ())])


def _segment_split(event: EventRecord) -> str:
    where = "; ".join(f"{', '.join(nodes)} in {place}" for place, nodes in event["places"].items())
    return (
        f"node ranks {event['first']} to {event['last']} were to be in one NVLink domain or below one leaf switch and "
        f"are not ({where}): their TP and EP groups leave it"
    )


_TOLD: Mapping[str, Callable[[EventRecord], str]] = {
    "rank_exited": _rank_exited,
    "hang_detected": _hang,
    "straggler_found": _straggler,
    "straggler_gone": _straggler_gone,
    "resumed": _resumed,
    "restart_requested": lambda event: f"a restart is asked for: {event['reason']}",
    "stopped": _stopped,
    "finished": _finished,
    "node_lost": _node_lost,
    "ranks_gone": lambda event: f"the ranks of {event['gone']} ended while no launcher led the run",
    "launcher_joined": lambda event: f"{event['joined']} has joined",
    "spare_joined": _spare_joined,
    "segment_split": _segment_split,
    "node_retired": lambda event: f"{event['retired']} is replaced: {event['reason']}",
    "node_cleared": lambda event: f"{event['cleared']} was given back to service and may be used again",
    "swap_refused": lambda event: f"{event['swap']} cannot be replaced: {event['reason']}",
    "spare_refused": lambda event: f"{event['refused']} must not be used as a spare: {event['reason']}",
    "spare_wanted": lambda event: f"a spare is wanted in the place of {event['swap']}: {event['reason']}",
    "checkpoint_loaded": _loaded,
    "checkpoint_rejected": lambda event: f"the checkpoint of step {event['step']} is not used: {event['why']}",
    "checkpoint_unproved": lambda event: (
        f"the checkpoint of step {event['step']} is complete, but may not outlive a power loss: {event['why']}"
    ),
    "checkpoint_failed": lambda event: f"the checkpoint of step {event['step']} was not made: {event['why']}",
    "update_skipped": lambda event: f"the update of step {event['step']} was left out: {event['why']}",
    "replicas_differ": lambda event: (
        f"ranks {names(event['ranks'])} hold different bits of {event['tensor']} since step {event['step']}"
    ),
    "replay_differs": lambda event: (
        f"ranks {names(event['ranks'])} got other bits when they computed a micro-batch of step {event['step']} again"
    ),
}


def names(of: Sequence[object]) -> str:
    """The names in a sentence, at most eight of them."""
    shown = ", ".join(map(str, of[:8]))
    return f"{shown} and {len(of) - 8} more" if len(of) > 8 else shown


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0


def _one_line(text: str) -> str:
    plain = "".join(character if character.isprintable() else " " for character in text)
    return plain if len(plain) <= _LONGEST else f"{plain[: _LONGEST - 2]} …"
