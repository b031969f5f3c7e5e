"""Has the ranks of this node write torch's flight recorders in a hang, and puts them into the run's folder.

A rank is asked by its worker's channel, which needs the interpreter lock, and if it does not answer by the socket of
torch's own server, which does not. A stopped rank leaves no dump; nothing waits for it long.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from opsd.collectors.lib.nccl.flight_recorder import DumpError, shortened
from opsd.launch.hangs.recorder import MAX_DUMP, dump_path, short_path
from opsd.launch.io.loop import Loop
from opsd.rundir import RunFolders

CHANNEL_S = 0.5
"""After this time a rank that has not answered on its channel is asked by its socket."""
ANSWER_S = 3.0
"""Time for a rank to write its recorder."""
COPY_S = 3.0
"""Time for a file server after that."""
KEPT = "torch"
"""Below the dumps: torch's own files of ranks whose dumps the launcher has written."""
HANDLERS = ("dump_nccl_trace_json", "fr_trace_json")
"""Of torch's server: NCCL has a recorder of its own, all other backends share one."""
_POLL_S = 0.05


class Asked(Protocol):
    """A rank that can be asked for its recorder."""

    @property
    def rank(self) -> int:
        """Its number."""

    @property
    def socket_path(self) -> Path:
        """Where torch's server listens."""

    def ask_for_dump(self, path: Path) -> bool:
        """Whether it has been asked by its channel to write to ``path``."""


@dataclass(slots=True)
class Dumps:
    """Asks ``ranks`` for their recorders, once per hang; each answer is awaited in a thread."""

    ranks: Iterable[Asked]
    folders: RunFolders
    generation: int
    loop: Loop
    answer_s: float = ANSWER_S
    _awaited: set[int] = field(default_factory=set)
    _begun: float = field(default_factory=time.monotonic)

    def start(self) -> None:
        """Ask, and begin to wait."""
        for rank in self.ranks:
            if rank.ask_for_dump(self.folders.dump(rank.rank)):
                self._awaited.add(rank.rank)
                self.loop.run_in_thread(partial(self.collect, rank), partial(self._collected, rank.rank))

    def settled(self) -> bool:
        """Whether the dumps are in the run's folder, or have had their time."""
        return not self._awaited or time.monotonic() > self._begun + self.answer_s + COPY_S

    def _collected(self, rank: int, outcome: bool | OSError) -> None:
        self._awaited.discard(rank)

    def collect(self, rank: Asked) -> bool:
        """Wait for the dump of a rank that has been asked, and keep it; whether there is one. Raises OSError."""
        answer, end = self.folders.dump(rank.rank), time.monotonic() + self.answer_s
        if _appears(answer, CHANNEL_S):
            self._keep(rank.rank, answer.read_bytes())
            return True
        contents = [ask_server(rank.socket_path, handler, end - time.monotonic()) for handler in HANDLERS]
        found = next((content for content in contents if b'"record_id"' in content), b"")
        if not any(contents) and _appears(answer, end - time.monotonic()):
            found = answer.read_bytes()
        if found:
            self._keep(rank.rank, found)
        return bool(found)

    def _keep(self, rank: int, content: bytes) -> None:
        """Put a dump into the run's folder, with the generation at its end; a folder has one dump a rank."""
        path, short = dump_path(self.folders.folder, rank), short_path(self.folders.folder, rank)
        with contextlib.suppress(DumpError):
            short.parent.mkdir(exist_ok=True)
            self._write(short, shortened(content))
        self._write(path, content)
        of_torch = path.with_name(f"rank_{rank}")
        if of_torch.exists():
            path.with_name(KEPT).mkdir(exist_ok=True)
            of_torch.replace(path.with_name(KEPT) / of_torch.name)

    def _write(self, path: Path, content: bytes) -> None:
        draft = path.with_name(f".{path.name}")
        draft.write_bytes(content.rstrip()[:-1] + f', "opsd_generation": {self.generation}}}'.encode())
        draft.replace(path)


def _appears(path: Path, seconds: float) -> bool:
    """Whether a file is there within so many seconds."""
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() >= end:
            return False
        time.sleep(_POLL_S)
    return True


def ask_server(path: Path, handler: str, seconds: float) -> bytes:
    """What a handler of torch's server answers within so many seconds; nothing without an answer."""
    end, answer = time.monotonic() + seconds, bytearray()
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.settimeout(max(0.01, seconds))
            server.connect(str(path))
            server.sendall(f"POST /handler/{handler} HTTP/1.0\r\nContent-Length: 0\r\n\r\n".encode())
            while part := server.recv(1 << 16):
                answer += part
                if len(answer) > MAX_DUMP:
                    return b""
                server.settimeout(max(0.01, end - time.monotonic()))
    except OSError:
        return b""
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    return body if b" 200 " in head.partition(b"\r\n")[0] else b""
