"""NCCL's RAS service: what the ranks of a job say about their communicators, without any help of the trainer.

The protocol is lines of text on localhost:28028 (NCCL 2.24 and newer): the client names its protocol, may set a timeout
and, from NCCL 2.28.7 on, the format, and asks for the status; the server answers and closes. Sources: NCCL's
src/ras/client.cc and client_support.cc. One answer takes a message to every process of the job: ask rarely, from one
node.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, takewhile
from typing import Any, Final

from opsd.collectors.lib.listener import peer_uid

ADDRESSES: Final = (("127.0.0.1", 28028), ("::1", 28028))
"""NCCL binds to whatever localhost resolves to; see NCCL_RAS_ADDR."""
REQUEST: Final = b"CLIENT PROTOCOL 2\nTIMEOUT 5\nSET FORMAT json\nVERBOSE STATUS\n"
MAX_ANSWER: Final = 20 << 20
MAX_PROBLEMS: Final = 256
"""Limits of an answer in bytes, and of the problems that are reported from it."""
MAX_TEXT: Final = 400
_MOST_GREETINGS: Final = 8
OK_RESULTS: Final = (0, 7)
"""ncclSuccess and ncclInProgress in nccl.h."""
KINDS: Final = ("mismatch", "error", "incomplete", "dead", "timeout")
MAX_RANKS: Final = 32
"""Ranks named in one problem. A problem of all ranks names none."""


class RasError(Exception):
    """RAS gave no usable answer; the message says why in one sentence."""


@dataclass(frozen=True, slots=True)
class RasRank:
    """A rank as RAS names it: ``rank`` counts within its communicator, ``gpu`` is the NVML index."""

    rank: int
    host: str = ""
    pid: int = -1
    gpu: int = -1


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with one communicator.

    ``kind`` is one of ``KINDS``: ranks have launched fewer operations or are in another state than others (mismatch),
    report an NCCL error (error), do not answer (incomplete), are taken for dead (dead), or RAS timed out (timeout).
    ``ranks`` are those that lag, erred or are silent; ``communicator`` is "" where RAS names none.
    """

    communicator: str
    kind: str
    text: str
    ranks: tuple[RasRank, ...] = ()


@dataclass(frozen=True, slots=True)
class RasStatus:
    """One answer: how many communicators there are, and what is wrong with which."""

    nccl_version: str
    communicators: int
    problems: tuple[Problem, ...]

    @property
    def mismatches(self) -> tuple[Problem, ...]:
        """The mismatches. Two answers in a row with the same ones are the sign of a hang: running ranks move on."""
        return tuple(problem for problem in self.problems if problem.kind == "mismatch")


class RasQuery:
    """One question to RAS that never blocks: ``poll`` from time to time until there is an answer.

    It is sent once the process that accepts it is known to belong to one of the users ``uids``: any user can listen on
    the port. ``user`` is whose it is then. Raises RasError if this node cannot ask at such an address, as without IPv6.
    """

    def __init__(self, address: tuple[str, int], now: float, uids: Collection[int], deadline_s: float = 20.0) -> None:
        self.user: int | None = None
        self._uids = uids
        self._deadline = now + deadline_s
        self._to_send = REQUEST
        self._received = bytearray()
        try:
            self._socket = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
        except OSError as error:
            raise RasError(f"RAS cannot be asked at {address[0]}: {error.strerror}") from error
        try:
            self._socket.setblocking(False)
            self._refused = self._socket.connect_ex(address)
        except OSError as error:
            self.close()
            raise RasError(f"RAS cannot be asked at {address[0]}: {error.strerror}") from error

    def poll(self, now: float) -> bytearray | None:
        """The whole answer, None while it is not complete. Raises RasError; the query is over then."""
        try:
            if self.user is None and not self._find_user(now):
                return None
            if self._to_send:
                self._to_send = self._to_send[self._socket.send(self._to_send) :]
            while chunk := self._socket.recv(1 << 20):
                self._received += chunk
                if len(self._received) > MAX_ANSWER:
                    raise RasError(f"RAS has sent more than {MAX_ANSWER >> 20} MiB")
        except (BlockingIOError, InterruptedError):
            if now < self._deadline:
                return None
            self.close()
            raise RasError("RAS has not answered in time") from None
        except OSError as error:
            # Before the connection stands, its other end has no name yet.
            if error.errno == errno.ENOTCONN and now < self._deadline:
                return None
            self.close()
            raise RasError(f"RAS does not answer: {error.strerror}") from error
        except RasError:
            self.close()
            raise
        self.close()
        return self._received

    def _find_user(self, now: float) -> bool:
        """True once the owner of the listener is known. Raises OSError, and RasError if it is none of ``uids``."""
        refused = self._refused
        if refused == errno.EINPROGRESS:
            refused = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if refused:
            raise OSError(refused, os.strerror(refused))
        self.user = peer_uid(self._socket)
        if self.user is None:
            if now < self._deadline:
                return False
            raise RasError("RAS has not accepted in time")
        if self.user not in self._uids:
            raise RasError(f"what listens on the RAS port belongs to user {self.user}, who leads no run here")
        return True

    def close(self) -> None:
        """Give the question up."""
        self._socket.close()


def parse_status(answer: bytes | bytearray) -> RasStatus:
    """The status in a complete answer, JSON or text. Raises RasError for anything else, half an answer included."""
    text = answer.decode("utf-8", "replace")
    body = _without_greeting(text)
    if body.startswith("{"):
        return _parse_json(body)
    return _parse_text(body)


def restored(raw: Mapping[str, Any]) -> RasStatus:
    """The status that ``asdict`` has made this of."""
    problems = (
        Problem(**{**problem, "ranks": tuple(RasRank(**rank) for rank in problem["ranks"])})
        for problem in raw["problems"]
    )
    return RasStatus(raw["nccl_version"], raw["communicators"], tuple(problems))


def _without_greeting(text: str) -> str:
    at = text.find("\n") + 1
    if not text.upper().startswith("SERVER PROTOCOL", 0, at or None):
        raise RasError(f"what listens on the RAS port is not NCCL: {text[:60]!r}")
    for _ in range(_MOST_GREETINGS):
        if at and (text.startswith("ERROR:", at) or text[at : at + 8].partition("\n")[0].strip() == "OK"):
            at = text.find("\n", at) + 1
    return text[at:] if at else ""


def _parse_json(body: str) -> RasStatus:
    # NCCL 2.28.7 and 2.28.9 forget a comma where ranks are missing (jsonWriteMissingRank), which is when it matters.
    mended = re.sub(r'("nvml_dev": -?\d+)(\s*"status")', r"\1,\2", body)
    try:
        raw = json.loads(mended)
        communicators = raw["communicators"]
        problems = (problem for communicator in communicators for problem in _json_problems(communicator))
        told = tuple(islice(problems, MAX_PROBLEMS))
        return RasStatus(str(raw["nccl_version"])[:32], len(communicators), told)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise RasError(f"RAS's answer is cut short or of an unknown form ({type(error).__name__})") from error


def _json_problems(communicator: Mapping[str, Any]) -> Iterator[Problem]:
    name, ranks = str(communicator["hash"])[:32], communicator["ranks"]
    if missing := communicator["missing_ranks"]:
        yield _problem(name, "incomplete", f"{len(missing)} of {communicator['size']} ranks do not answer", missing)
    erred = [rank for rank in ranks if not _in_order(rank["status"])]
    if erred:
        codes = sorted({int(rank["status"]["async_error"]) or int(rank["status"]["init_state"]) for rank in erred})
        yield _problem(name, "error", f"{len(erred)} ranks report NCCL errors {codes}", erred)
    for operation in ranks[0]["collective_counts"] if ranks else ():
        counts = [int(rank["collective_counts"][operation]) for rank in ranks]
        if min(counts) != max(counts):
            behind = [rank for rank, count in zip(ranks, counts, strict=True) if count == min(counts)]
            text = (
                f"{len(behind)} of {len(ranks)} ranks are at {operation} {min(counts)}, others at up to {max(counts)}"
            )
            yield _problem(name, "mismatch", text, behind)


def _in_order(status: Mapping[str, Any]) -> bool:
    return status["async_error"] in OK_RESULTS and status["init_state"] in OK_RESULTS and not status["abort_flag"]


def _problem(communicator: str, kind: str, text: str, ranks: Sequence[Mapping[str, Any]]) -> Problem:
    for each in (communicator, text, *(str(r["host"]) for r in ranks[:MAX_RANKS])):
        each.encode()  # JSON can hold half a character, which can be neither stored nor sent
    named = [RasRank(int(r["rank"]), str(r["host"])[:64], int(r["pid"]), int(r["nvml_dev"])) for r in ranks[:MAX_RANKS]]
    return Problem(communicator, kind, text[:MAX_TEXT], tuple(named))


_VERSION = re.compile(r"NCCL version (\S+)")
_GROUP = re.compile(r"^ *\d+ +(\d{1,9}) +\d+ +\S+ +\d+ +\d+ +[A-Z]+ +[A-Z,]+$", re.MULTILINE)
_HEAD = re.compile(r"^(?:#\d+-\d+ \(([0-9a-f]+)\) )?(INCOMPLETE|ERROR|MISMATCH|DEAD|TIMEOUT)$")
_RANK = re.compile(
    r"^  Rank (\d{1,9})\b.*? -- GPU (\d{1,9})(?: \(NVML (\d{1,9})\))? managed by process (\d{1,9}) on node (\S+)"
)
_PROCESS = re.compile(r"^  Process (\d{1,9}) on node (\S+) managing GPUs? (\d{1,9})")
_LAUNCHED = re.compile(r"launched up to operation (\d{1,20})|not launched any operations")


def _parse_text(body: str) -> RasStatus:
    version = _VERSION.search(body)
    if version is None or "\nWarnings\n" not in body:
        raise RasError("RAS's answer is cut short or of an unknown form")
    communicators = sum(int(match[1]) for match in _GROUP.finditer(body))
    return RasStatus(version[1][:32], communicators, tuple(islice(_text_problems(body.split("\n")), MAX_PROBLEMS)))


def _text_problems(lines: Sequence[str]) -> Iterator[Problem]:
    """Each headline such as ``#0-0 (hash) MISMATCH`` with the indented lines below it."""
    heads = [(index, match) for index, line in enumerate(lines) if (match := _HEAD.match(line))]
    ends = [*(index for index, _ in heads[1:]), len(lines)]
    for (index, head), end in zip(heads, ends, strict=False):
        below = list(takewhile(lambda line: line.startswith("  "), lines[index + 1 : end]))
        told = "; ".join(line.strip() for line in below if not line.startswith(("  Rank ", "  Process ")))
        ranks = _lagging(below) if head[2] == "MISMATCH" else [rank for line in below if (rank := _named(line))]
        yield Problem(head[1] or "", head[2].lower(), told[:MAX_TEXT], tuple(ranks[:MAX_RANKS]))


def _named(line: str) -> RasRank | None:
    if match := _RANK.match(line):
        return RasRank(int(match[1]), match[5][:64], int(match[4]), int(match[3] or match[2]))
    if match := _PROCESS.match(line):
        return RasRank(-1, match[2][:64], int(match[1]), int(match[3]))
    return None


def _lagging(lines: Sequence[str]) -> list[RasRank]:
    """The ranks that have launched least of an operation: RAS names the few, which may also be ahead of the many."""
    lagging: dict[int, RasRank] = {}
    starts = [index for index, line in enumerate(lines) if " have different " in line]
    for start, end in pairwise([*starts, len(lines)]):
        counted: list[tuple[int, RasRank | None]] = []
        count = 0
        for line in lines[start + 1 : end]:
            if match := _LAUNCHED.search(line):
                count = int(match[1] or 0)
            counted.append((count, _named(line)))
        least = min((count for count, _ in counted), default=0)
        lagging |= {rank.rank: rank for count, rank in counted if rank is not None and count == least}
    return list(lagging.values())
