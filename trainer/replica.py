"""A copy of each rank's staged state in the memory of another node, sent over TCP by the persist processes. Torch-free.

The rank with the same local rank on the next node keeps it beside its own (``trainer.memory``). What is sent proves
that it is of this start of this run, and is not encrypted. The receiver answers twice, with what it has against the
record and with what it has against the state, as one byte that gives the length of a sentence; 0 is agreement::

    receiver                             sender
    nonce, 16 bytes              ->
                                 <-      length, 4 bytes; record, JSON; HMAC(nonce, record)
    answer                       ->
                                 <-      state; HMAC(nonce, record, state)
    answer                       ->
"""

from __future__ import annotations

import hmac
import json
import mmap
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer import memory
from trainer.memory import Record

KEY = "OPSD_REPLICA_KEY"
"""In the environment of a persist process, hexadecimal: what both sides know and others do not."""
TIMEOUT_S = 10.0
"""For a block, or an answer."""
_BLOCK = 1 << 22
_NONCE, _PROOF, _LONGEST = 16, 32, 1 << 16
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Pairing:
    """With whom a rank exchanges copies: it sends to ``target``, "ADDRESS PORT", and keeps the state of ``source``.

    ``listener`` is the descriptor of the socket to which ``source`` sends, ``key`` hexadecimal.
    """

    target: str
    listener: int
    source: int
    key: str


class Refused(OSError):
    """What the other side has against it."""


class Sending(threading.Thread):
    """A state on its way to the other node, which ``stop`` ends early."""

    def __init__(self, target: str, key: bytes, record: Record, state: mmap.mmap) -> None:
        super().__init__(daemon=True)
        self._key, self._record, self._state = key, record, state
        host, port = target.split()
        self._target = host, int(port)
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.settimeout(TIMEOUT_S)
        self.why = ""
        """Why the copy was not made."""

    def run(self) -> None:
        """Send."""
        try:
            with self._socket, memoryview(self._state) as view:
                self._socket.connect(self._target)
                _send(self._socket, self._key, self._record, view)
        except OSError as error:
            self.why = f"{self._target[0]}: {error.strerror or error}"

    def stop(self) -> None:
        """Give up."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.join()

    def finish(self, hopeless: Callable[[float], bool]) -> None:
        """Wait for the end, or until ``hopeless``, which itself waits for so many seconds at most, says to give up."""
        while self.is_alive():
            if hopeless(_POLL_S):
                self.stop()


def _send(connection: socket.socket, key: bytes, record: Record, view: memoryview) -> None:
    header = json.dumps(asdict(record)).encode()
    proof = hmac.new(key, _read(connection, _NONCE) + header, "sha256")
    connection.sendall(len(header).to_bytes(4, "big") + header + proof.digest())
    _hear(connection)
    for begin in range(0, len(view), _BLOCK):
        with view[begin : begin + _BLOCK] as block:
            proof.update(block)
            connection.sendall(block)
    connection.sendall(proof.digest())
    _hear(connection)


def serve(listener: socket.socket, key: bytes, folder: Path, rank: int, attempt: str) -> None:
    """Keep in ``folder`` what is sent of ``rank`` by this ``attempt`` of the run, one state after the other; no end."""
    while True:
        connection, (host, *_) = listener.accept()
        with connection:
            connection.settimeout(TIMEOUT_S)
            try:
                _take(connection, key, folder, rank, attempt)
            except (OSError, ValueError, TypeError) as error:
                print(f"opsd: a state from {host} was not taken: {error}", file=sys.stderr)


def _take(connection: socket.socket, key: bytes, folder: Path, rank: int, attempt: str) -> None:
    nonce = secrets.token_bytes(_NONCE)
    connection.sendall(nonce)
    length = int.from_bytes(_read(connection, 4), "big")
    if length > _LONGEST:
        raise Refused("it is not of this run")
    header = _read(connection, length)
    proof = hmac.new(key, nonce + header, "sha256")
    if not hmac.compare_digest(proof.digest(), _read(connection, _PROOF)):
        _answer(connection, "it is not of this run")
    record = Record(**json.loads(header))
    if (record.rank, record.attempt) != (rank, attempt):
        _answer(connection, f"it is of rank {record.rank}, not {rank}, or of another start")
    memory.forget(folder, rank)
    try:
        descriptor = memory.open_state(folder, rank, record.size)
    except OSError as error:
        _answer(connection, error.strerror or "no memory")
    _answer(connection, "")
    with mmap.mmap(descriptor, record.size) as state, memoryview(state) as view:
        os.close(descriptor)
        for begin in range(0, record.size, _BLOCK):
            with view[begin : begin + _BLOCK] as block:
                _fill(connection, block)
                proof.update(block)
    if not hmac.compare_digest(proof.digest(), _read(connection, _PROOF)):
        _answer(connection, "it was changed on the way")
    memory.write_record(folder, record)
    _answer(connection, "")


def _answer(connection: socket.socket, objection: str) -> None:
    """Raises Refused if there is an ``objection``, of which the other side has been told."""
    sentence = objection.encode()[:255]
    connection.sendall(bytes([len(sentence)]) + sentence)
    if objection:
        raise Refused(objection)


def _hear(connection: socket.socket) -> None:
    if length := _read(connection, 1)[0]:
        raise Refused(_read(connection, length).decode(errors="replace"))


def _read(connection: socket.socket, count: int) -> bytes:
    content = bytearray(count)
    with memoryview(content) as view:
        _fill(connection, view)
    return bytes(content)


def _fill(connection: socket.socket, view: memoryview) -> None:
    at = 0
    while at < len(view):
        received = connection.recv_into(view[at:])
        if not received:
            raise ConnectionError("the other side has gone")
        at += received
