"""What NCCL and PyTorch's NCCL watchdog write into the log of a rank. Pure."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

KINDS: Final = ("warning", "timeout", "error")
MAX_TEXT: Final = 300


class LogMessage(NamedTuple):
    """One message: a warning of NCCL, a collective that timed out, or an asynchronous error.

    ``operation`` and ``sequence`` are those of the collective, "" and None where the line names none.
    """

    kind: str
    text: str
    operation: str = ""
    sequence: int | None = None


_WARNING = re.compile(r"\bNCCL WARN (.+)")
_TIMEOUT = re.compile(r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d{1,20}), OpType=(\w+)")
_RESULTS = "UnhandledCudaError|SystemError|InternalError|InvalidArgument|InvalidUsage|RemoteError|Timeout"
_PHRASES = r"Watchdog thread terminated with exception|NCCL communicator was aborted|\bNCCL error\b"
_ERROR = re.compile(rf"(?:\bnccl(?:{_RESULTS})\b|{_PHRASES}).*")


def parse_line(line: bytes) -> LogMessage | None:
    """The message in a line of a rank's log, None in all others."""
    if b"NCCL" not in line and b"nccl" not in line and b"Watchdog" not in line:
        return None
    text = line.decode("utf-8", "replace")
    if match := _WARNING.search(text):
        return LogMessage("warning", _clean(match[1]))
    if match := _TIMEOUT.search(text):
        return LogMessage("timeout", _clean(text[match.start() :]), match[2], int(match[1]))
    if match := _ERROR.search(text):
        return LogMessage("error", _clean(match[0]))
    return None


def _clean(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)[:MAX_TEXT].strip()
