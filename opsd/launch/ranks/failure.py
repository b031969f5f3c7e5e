"""Failures: their kind, the first cause, and whether a restart can help. Pure: no clock, no I/O."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from opsd import exitcodes

Kind = Literal["signal", "user", "communication", "hardware", "environment", "hang"]

PROGRAM_NOT_FOUND = "ProgramNotFound"
"""The error type with which ``worker.py`` reports that there is no program to run."""

COMPANION_REFUSED = "CompanionRefusedError"
"""The error type of a companion that may not run as it is configured: it would be the same at each start."""

REFUSALS = {
    "AuditRefusedError": "the audit of the first batches refuses the run",
    "ResumeRefusedError": "no checkpoint to go on from is complete",
}
"""The error types with which an adapter refuses a run, and what is said: the next start would end in the same way."""

_COMMUNICATION = re.compile(
    r"connection (reset|closed|refused|was closed|was reset|aborted)|broken pipe|closed by (the )?(remote )?peer"
    r"|remote (process )?(has )?(exited|error)|ncclRemoteError|ncclSystemError|DistBackendError|DistStoreError"
    r"|DistNetworkError|gloo|watchdog|process ?group ?nccl|socket timeout|wait timeout|store.*timed? ?out",
    re.IGNORECASE,
)
_COLLECTIVE = re.compile(r"gloo|nccl|ProcessGroup|Dist(Backend|Network|Store)Error", re.IGNORECASE)
_HARDWARE = re.compile(
    r"CUDA error|cuda(Error|_error)|uncorrectable|ECC error|CUBLAS_STATUS|CUDNN_STATUS"
    r"|unspecified launch failure|AcceleratorError|fallen off the bus|ncclUnhandledCudaError|ncclInternalError"
)
_ASSERTION = re.compile("device-side assert")
"""An assertion in a kernel of the program, an index out of range for instance, and no fault of the GPU."""
_ENVIRONMENT = re.compile(
    r"EADDRINUSE|address already in use|no space left|quota exceeded|stale file handle|input/output error"
    r"|(?-i:\b(ESTALE|EIO)\b)|too many open files|cannot allocate memory"
    r"|resource temporarily unavailable|read-only file system",
    re.IGNORECASE,
)
_SIZES = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
"""gloo, in the rank that receives more than it asked for; the rank whose size is wrong only loses a connection."""
_MISSING = re.compile(r"No module named '([\w.]+)'")
_VARIABLE = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(frozen=True, slots=True)
class RankError:
    """The exception that ended a rank; ``where`` is "file:line in function" of the program's innermost frame."""

    type: str
    message: str
    where: str


@dataclass(frozen=True, slots=True)
class Failure:
    """A rank that ended, or hung, when it should not have.

    ``exit`` is its exit in words: "signal SIGKILL", "exit code 1", "hung in backward". ``step`` is the last completed
    step. ``t`` is the time of its error or exit, in seconds of one clock for all. ``detail`` is an explanation.
    ``at_once``: the run has only just begun. ``soon``: its ranks have only just been started. ``reports``: the program
    itself reports its steps, so that it has done none if ``step`` is None. Otherwise nobody knows.
    """

    rank: int
    exit: str
    kind: Kind
    t: float
    step: int | None = None
    phase: str | None = None
    error: RankError | None = None
    detail: str = ""
    at_once: bool = False
    soon: bool = False
    reports: bool = False

    @property
    def shows_progress(self) -> bool:
        """Whether it is known how far the program had come."""
        return self.step is not None or self.reports

    @property
    def when(self) -> str:
        """How far the program had come, as part of a sentence."""
        if self.step is not None:
            return f"after step {self.step}"
        return "before its first step" if self.reports else "before a step was seen"

    @property
    def signature(self) -> tuple[str, ...]:
        """Equal for two failures with the same cause: numbers and addresses in messages are ignored."""
        if self.error is None:
            return (self.exit,)
        return (self.error.type, self.error.where, _VARIABLE.sub("#", self.error.message)[:200])

    @property
    def lost_a_peer(self) -> bool:
        """Whether it only says that another rank is gone."""
        error = self.error
        return (
            self.kind == "communication"
            and _COLLECTIVE.search(f"{error.type} {error.message}" if error else "") is not None
        )

    @property
    def cause(self) -> str:
        """The failure as part of a sentence."""
        if self.error is None:
            return f"{self.exit} ({self.detail})" if self.detail else self.exit
        message = self.error.message.strip().splitlines()
        text = f"{self.error.type}: {message[0][:200]}" if message else self.error.type
        return f"{text} ({self.error.where})" if self.error.where else text


def classify(exit: str, error: RankError | None, log_tail: str) -> Kind:
    """The kind of a failure from its exit, its exception and, without one, the end of its log.

    An exception that only says that another rank is gone is ``communication``; ``user`` is an error of the program
    itself, a deliberate exit code included.
    """
    text = f"{error.type}: {error.message}" if error else log_tail
    if exit.startswith("signal ") and not (exit == "signal SIGABRT" and _COMMUNICATION.search(text)):
        return "signal"
    for kind, pattern in _KINDS:
        if pattern.search(text):
            return kind
    return "user"


def size_mismatch(log: str) -> str:
    """The explanation of an abort by gloo for a message of another size than expected, "" if it was none."""
    sizes = _SIZES.search(log)
    if sizes is None:
        return ""
    got, expected = sizes.groups()
    return f"gloo got {got} bytes for {expected}: the ranks' calls differ in size; a neighbour's may be the wrong one"


_KINDS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("user", _ASSERTION),
    ("communication", _COMMUNICATION),
    ("hardware", _HARDWARE),
    ("environment", _ENVIRONMENT),
)


def first_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that the others follow from: the earliest that is not a lost connection."""
    return min(failures, key=lambda failure: (failure.kind == "communication", failure.t))


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The verdict that a restart would not help: the launcher's exit code and the reason."""

    code: int
    reason: str


def explain(stop: GiveUp, cause: Failure, node: str, log: str, log_tail: str, hint: str = "") -> str:
    """The reason why the run stops, in one paragraph: rule, rank and error, then a hint and the end of the log.

    ``log`` is "" where there is none to point to: of a lost node, and of a rank that said nothing about its hang.
    """
    lines = log_tail.splitlines()[-10:]
    if len(lines) == 1 and cause.error is not None and cause.error.message in lines[0]:
        lines = []  # the cause says the same
    tail = "\n".join(f"    {line}" for line in lines)
    text = f"stopped: {stop.reason}. Rank {cause.rank} on {node} failed {cause.when} with {cause.cause}{hint}."
    if not log:
        return text
    return f"{text} Its log is {log}" + (f"; it ends in\n{tail}" if tail else ".")


def missing_module(error: RankError | None) -> str:
    """The module that the failed rank's Python does not have, "" if it failed for another reason.

    One that a file of the program hides ("…; 'x' is not a package") is missing in any Python.
    """
    found = _MISSING.fullmatch(error.message.strip()) if error and error.type == "ModuleNotFoundError" else None
    return found[1] if found else ""


class RestartPolicy:
    """Decides after each failure whether to restart. Five rules end a run, so that it never loops:

    - An audit refuses the first batches.
    - The program itself fails as soon as the run has begun, as with a wrong argument or a missing module. A user who
      has ``asked`` for restarts gets them all the same.
    - The program itself fails at the same step twice, or twice before a first step without progress in between. Where
      steps are unknown, twice soon after its start: one that has run for long may have done some. Not if
      ``same_limit`` is 0.
    - The same failure comes ``same_limit`` times without progress. A failure of hardware counts by node. A node that
      fails twice is left out (see ``NodeHealth``). An error that comes with every node is the program's.
    - There are more than ``max_restarts`` restarts within ``refill_steps`` committed steps. After so much durable
      progress earlier restarts no longer count, so no run is ended by its length.
    """

    def __init__(self, max_restarts: int, *, same_limit: int = 3, refill_steps: int = 100, asked: bool = False) -> None:
        self._max_restarts = max_restarts
        self._same_limit = same_limit
        self._refill_steps = refill_steps
        self._asked = asked
        self._used = 0
        self._refilled_at: int | None = None
        self._furthest = -1
        self._same: defaultdict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
        """Failures without progress in between, by node."""
        self._user_errors: set[tuple[int | None, tuple[str, ...]]] = set()

    def snapshot(self) -> dict[str, Any]:
        """The policy's state for JSON; another policy continues from it after ``restore``."""
        return {"used": self._used, "refilled_at": self._refilled_at, **self.memory()}

    def memory(self) -> dict[str, Any]:
        """The part of ``snapshot`` that holds in the next start of the run as well: what failed, and where."""
        return {
            "furthest": self._furthest,
            "same": [[list(signature), nodes] for signature, nodes in self._same.items()],
            "user_errors": [[step, list(signature)] for step, signature in self._user_errors],
        }

    def restore(self, memory: Mapping[str, Any]) -> None:
        """Continue from another policy's ``snapshot`` or ``memory``. Raises KeyError, TypeError, ValueError."""
        same = {tuple(signature): Counter(nodes) for signature, nodes in memory["same"]}
        user_errors = {(step, tuple(signature)) for step, signature in memory["user_errors"]}
        self._furthest, self._same, self._user_errors = int(memory["furthest"]), defaultdict(Counter, same), user_errors
        self._used, self._refilled_at = int(memory.get("used", 0)), memory.get("refilled_at")

    def repeats(self, failure: Failure, node: str) -> int:
        """How often ``failure`` has come from ``node`` without progress in between."""
        return self._same[failure.signature][node]

    def judge(self, failure: Failure, node: str, *, furthest: int | None, committed: int | None) -> GiveUp | None:
        """None to restart after ``failure`` on ``node``; ``furthest`` and ``committed`` are the run's highest steps."""
        if committed is not None and committed - (self._refilled_at or 0) >= self._refill_steps:
            self._used, self._refilled_at = 0, committed
        if furthest is not None and furthest > self._furthest:
            self._furthest = furthest
            self._same.clear()
            self._forget_starts()
        self._same[failure.signature][node] += 1
        if failure.error is not None and (refused := REFUSALS.get(failure.error.type)):
            return GiveUp(exitcodes.FAILED, refused)
        at_once = failure.at_once and failure.step is None and not self._asked
        if failure.kind == "user" and at_once and self._max_restarts > 0:
            return GiveUp(exitcodes.FAILED, "the program failed as soon as it was started")
        if self._max_restarts > 0 and (twice := self._comes_again(failure)):
            return GiveUp(exitcodes.REPEATED, twice)
        if self._max_restarts > 0 and (came := self._too_often(failure, node)):
            rest = "without the run getting any further" if failure.shows_progress else "and no step was seen"
            return GiveUp(exitcodes.REPEATED, f"the same failure came {came} {rest}")
        self._used += 1
        if self._used > self._max_restarts:
            return GiveUp(exitcodes.FAILED, self._exhausted())
        return None

    def _comes_again(self, failure: Failure) -> str:
        """How an error of the program has come at the same place before, in words, "" if it has not."""
        if not failure.shows_progress and not failure.soon:
            self._forget_starts()
            return ""
        if failure.kind != "user" or self._same_limit == 0:
            return ""
        place = (failure.step, failure.signature)
        known = place in self._user_errors
        self._user_errors.add(place)
        if not known:
            return ""
        if not failure.shows_progress:
            return "the program failed twice soon after its start with the same error, and no step was seen"
        at_step = "before the first step" if failure.step is None else f"after step {failure.step}"
        return f"the program failed twice {at_step} with the same error"

    def _forget_starts(self) -> None:
        """The program may have done steps."""
        self._user_errors = {place for place in self._user_errors if place[0] is not None}

    def _too_often(self, failure: Failure, node: str) -> str:
        """How often it came, in words, if that is too often, else ""."""
        nodes, limit = self._same[failure.signature], self._same_limit
        if failure.kind == "hardware" and len(nodes) >= limit > 0:
            return f"on {limit} nodes"
        count = nodes[node] if failure.kind == "hardware" else nodes.total()
        return f"{limit} times" if count >= limit > 0 else ""

    def _exhausted(self) -> str:
        if self._max_restarts == 0:
            return "restarts are off (--max-restarts 0)"
        return f"all {self._max_restarts} restarts are used up and fewer than {self._refill_steps} steps were committed"
