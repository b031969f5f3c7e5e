"""NCCL's RAS service without NCCL: a server that speaks its protocol, and answers in the forms of three releases."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Mapping
from typing import Self

GREETING = "SERVER PROTOCOL 2\nOK\n"
OPERATIONS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce", "SendRecv", "Send", "Recv")


class FakeRas:
    """A server on a port of its own that gives ``answer`` to each client and closes; a context manager.

    With ``hold`` it never closes. ``requests`` are what clients have sent.
    """

    def __init__(self, answer: str | bytes, *, hold: bool = False) -> None:
        self.answer = answer.encode() if isinstance(answer, str) else answer
        self.requests: list[bytes] = []
        self._hold = hold
        self._held: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = ("127.0.0.1", self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(30)
        for connection in self._held:
            connection.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            request = b""
            while not request.endswith(b"STATUS\n") and (chunk := connection.recv(4096)):
                request += chunk
            self.requests.append(request)
            connection.sendall(self.answer)
            if self._hold:
                self._held.append(connection)
            else:
                connection.close()


def ras_rank(rank: int, counts: Mapping[str, int], **status: object) -> dict[str, object]:
    """A rank as NCCL 2.28 prints it in JSON; counts not given are 0."""
    good = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}
    return {
        "rank": rank,
        "host": f"10.0.0.{1 + rank // 8}",
        "pid": 1000 + rank,
        "cuda_dev": rank % 8,
        "nvml_dev": rank % 8,
        "status": {**good, **status},
        "collective_counts": {operation: counts.get(operation, 0) for operation in OPERATIONS},
    }


def missing_rank(rank: int) -> dict[str, object]:
    """A rank that does not answer, as NCCL 2.28 prints it in JSON."""
    place = {"rank": rank, "host": "10.0.0.9", "pid": 1000 + rank, "cuda_dev": 0, "nvml_dev": 0}
    return {**place, "status": {"unresponsive": True, "considered_dead": False}}


def ras_json(ranks: list[dict[str, object]], missing: list[dict[str, object]] | None = None) -> str:
    """The answer of NCCL 2.28.9 about one communicator, its missing comma included."""
    missing = missing or []
    communicator = {
        "hash": "0x8a1b", "secondary_hash": "0x1:0x2", "size": len(ranks) + len(missing), "ranks_count": len(ranks),
        "missing_ranks_count": len(missing), "ranks": ranks, "missing_ranks": missing,
    }  # fmt: skip
    body = {
        "nccl_version": "2.28.9", "cuda_runtime_version": 12090, "cuda_driver_version": 13000,
        "timestamp": "2025-11-20 12:00:00", "communicators_count": 1, "communicators": [communicator],
        "ras": {"collection_time_sec": 0.01, "timeouts_count": 0},
    }  # fmt: skip
    text = re.sub(r'("nvml_dev": 0),(\s*"status": \{\s*"unresponsive")', r"\1\2", json.dumps(body, indent=2))
    return GREETING + "OK\n" + text + "\n"


_TEXT = """\
SERVER PROTOCOL 2
OK
ERROR: Unknown command SET FORMAT json
NCCL version 2.24.3 compiled with CUDA 12.8
CUDA runtime version 12080, driver version 12080

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         32       32

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4         8        32        32   RUNNING  {errors}
    1         4         1         8         8        32   RUNNING      OK

Errors
======
{error}
Warnings
========
{warning}
"""


def ras_text(error: str = "", warning: str = "") -> str:
    """The answer of NCCL 2.24.3, which knows no JSON; ``error`` and ``warning`` are the bodies of these sections."""
    return _TEXT.format(errors="MISMATCH" if warning else "OK", error=error, warning=warning)
