"""A replica of each rank's staged state in another node's memory, sent over TCP by the persist processes. Torch-free.

The rank with the same local rank on the next node stores it beside its own state (``opsd.trainer.memory``). Data is
authenticated as belonging to this start of this run, and is not encrypted. The receiver answers twice, with its
objection to the metadata and to the state: one byte for the length of a sentence; 0 means none::

    receiver                             sender
    nonce, 16 bytes              ->
                                 <-      length, 4 bytes; metadata, JSON; HMAC(nonce, metadata)
    answer                       ->
                                 <-      state; HMAC(nonce, metadata, state)
    answer                       ->

Anyone can connect. A connection that is not authenticated within two seconds is closed, and if there are too many, the
oldest one is closed at once; they never delay the partner.
"""

from __future__ import annotations

import errno
import hmac
import json
import mmap
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from opsd.trainer import memory
from opsd.trainer.memory import StateInfo

KEY = "OPSD_REPLICA_KEY"
"""Environment variable of a persist process with the shared key, hexadecimal."""
TIMEOUT_S = 10.0
"""For one block, or one answer."""
AUTHENTICATION_TIMEOUT_S = 2.0
"""For the whole authentication of a sender."""
MAX_UNAUTHENTICATED, MAX_PER_ADDRESS = 16, 4
"""Unauthenticated connections: in total, and from one address."""
ATTEMPTS = 5
"""Connections that a sender makes until one is authenticated."""
LOG_INTERVAL_S = 60.0
_BLOCK = 1 << 22
_NONCE, _PROOF, _LONGEST = 16, 32, 1 << 16
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Pairing:
    """The partners of a rank: it sends to ``target``, "ADDRESS PORT", and stores the state of ``source``.

    ``listener`` is the descriptor of the socket to which ``source`` sends, ``key`` hexadecimal.
    """

    target: str
    listener: int
    source: int
    key: str


class Refused(OSError):
    """The other side's objection."""


class _Gone(ConnectionError):
    """The other side has closed the connection."""


_LOST = (_Gone, BrokenPipeError, ConnectionResetError, ConnectionAbortedError)
"""Errors of a connection that was made and then closed by the other side."""


class Sender(threading.Thread):
    """Sends a state to the other node; ``stop`` ends it early."""

    def __init__(self, target: str, key: bytes, info: StateInfo, state: mmap.mmap) -> None:
        super().__init__(daemon=True)
        self._key, self._info, self._state = key, info, state
        host, port = target.split()
        self._target = host, int(port)
        self._guard = threading.Lock()
        self._socket: socket.socket | None = None
        self._stopped = False
        self.why = ""
        """Why no replica was made."""

    def run(self) -> None:
        """Send the state. Strangers who crowd the port can have a connection closed that has not proven itself yet."""
        for _ in range(ATTEMPTS):
            proven = False
            try:
                with self._connection() as connection, memoryview(self._state) as view:
                    connection.connect(self._target)
                    proof = _send_metadata(connection, self._key, self._info)
                    proven = True
                    _send_state(connection, proof, view)
                self.why = ""
                return
            except OSError as error:
                self.why = f"{self._target[0]}: {error.strerror or error}"
                if proven or self._stopped or not isinstance(error, _LOST):
                    return

    def _connection(self) -> socket.socket:
        """A new socket, closed at once if it is to stop."""
        with self._guard:
            if self._stopped:
                raise ConnectionAbortedError("stopped")
            self._socket = socket.socket(socket.AF_INET6 if ":" in self._target[0] else socket.AF_INET)
            self._socket.settimeout(TIMEOUT_S)
            return self._socket

    def stop(self) -> None:
        """Give up."""
        with self._guard:
            self._stopped = True
            if self._socket is not None:
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
        self.join()

    def finish(self, hopeless: Callable[[float], bool]) -> None:
        """Wait for the end, or until ``hopeless``, which waits for up to the given seconds, returns True."""
        while self.is_alive():
            if hopeless(_POLL_S):
                self.stop()


def _send_metadata(connection: socket.socket, key: bytes, info: StateInfo) -> hmac.HMAC:
    """Prove where the state comes from; the HMAC so far."""
    header = json.dumps(asdict(info)).encode()
    proof = hmac.new(key, _read(connection, _NONCE) + header, "sha256")
    connection.sendall(len(header).to_bytes(4, "big") + header + proof.digest())
    _read_answer(connection)
    return proof


def _send_state(connection: socket.socket, proof: hmac.HMAC, view: memoryview) -> None:
    for begin in range(0, len(view), _BLOCK):
        with view[begin : begin + _BLOCK] as block:
            proof.update(block)
            connection.sendall(block)
    connection.sendall(proof.digest())
    _read_answer(connection)


class Receiver:
    """Stores in ``folder`` the newest state of ``rank`` that this ``attempt`` of the run sends.

    ``authentication_timeout_s`` and ``timeout_s`` default to the constants.
    """

    def __init__(
        self,
        key: bytes,
        folder: Path,
        rank: int,
        attempt: str,
        authentication_timeout_s: float = AUTHENTICATION_TIMEOUT_S,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._proof_s, self._timeout_s = authentication_timeout_s, timeout_s
        self._key, self._folder, self._rank, self._attempt = key, folder, rank, attempt
        self._lock = threading.Lock()
        self._unauthenticated: list[tuple[str, socket.socket]] = []
        self._partner: socket.socket | None = None
        self._taking = threading.Lock()
        self._complained = -LOG_INTERVAL_S

    def serve(self, listener: socket.socket) -> None:
        """Accept connections to ``listener`` until that is closed."""
        while True:
            try:
                connection, (host, *_) = listener.accept()
            except OSError as error:
                if error.errno in (errno.EBADF, errno.EINVAL, errno.ENOTSOCK):
                    return
                time.sleep(_POLL_S)  # no descriptors or memory for now, or it has gone already
                continue
            self._admit(host, connection)
            try:
                threading.Thread(target=self._handle, args=(host, connection), daemon=True).start()
            except RuntimeError:  # no thread is available for now
                self._discard_connection(connection)
                connection.close()

    def _admit(self, host: str, connection: socket.socket) -> None:
        with self._lock:
            self._unauthenticated.append((host, connection))
            alike = [entry for entry in self._unauthenticated if entry[0] == host]
            if len(alike) > MAX_PER_ADDRESS:
                oldest = alike[0]
            elif len(self._unauthenticated) > MAX_UNAUTHENTICATED:
                oldest = self._unauthenticated[0]
            else:
                return
            self._unauthenticated.remove(oldest)
            _cut_off(oldest[1])

    def _discard_connection(self, connection: socket.socket) -> None:
        """It is not counted as unauthenticated any more."""
        with self._lock:
            self._unauthenticated = [entry for entry in self._unauthenticated if entry[1] is not connection]

    def _handle(self, host: str, connection: socket.socket) -> None:
        proven = False
        with connection:
            try:
                info, proof = _authenticate(connection, self._key, self._proof_s)
                proven = True
                self._discard_connection(connection)
                self._replace(connection)
                with self._taking:
                    connection.settimeout(self._timeout_s)
                    _receive_state(connection, info, proof, self._folder, self._rank, self._attempt)
            except (OSError, ValueError) as error:
                self._log_failure(host, error, proven=proven)
            finally:
                self._discard_connection(connection)

    def _replace(self, connection: socket.socket) -> None:
        """The partner sends one state after the other: an unfinished one has been given up."""
        with self._lock:
            before, self._partner = self._partner, connection
            if before is not None:
                _cut_off(before)

    def _log_failure(self, host: str, error: Exception, *, proven: bool) -> None:
        """Log why nothing was stored; for unauthenticated connections at a limited rate."""
        with self._lock:
            if not proven and time.monotonic() < self._complained + LOG_INTERVAL_S:
                return
            self._complained = self._complained if proven else time.monotonic()
        print(f"opsd: a state from {host} was not taken: {error}", file=sys.stderr)


def _cut_off(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _authenticate(
    connection: socket.socket, key: bytes, authentication_timeout_s: float
) -> tuple[StateInfo, hmac.HMAC]:
    """The metadata that the other side sends, and the HMAC so far. Raises OSError, ValueError."""
    deadline = time.monotonic() + authentication_timeout_s
    nonce = secrets.token_bytes(_NONCE)
    connection.settimeout(authentication_timeout_s)
    connection.sendall(nonce)
    length = int.from_bytes(_read(connection, 4, deadline), "big")
    if length > _LONGEST:
        raise Refused("it is not of this run")
    header = _read(connection, length, deadline)
    proof = hmac.new(key, nonce + header, "sha256")
    if not hmac.compare_digest(proof.digest(), _read(connection, _PROOF, deadline)):
        _answer(connection, "it is not of this run")
    return StateInfo.parse(header), proof


def _receive_state(
    connection: socket.socket, info: StateInfo, proof: hmac.HMAC, folder: Path, rank: int, attempt: str
) -> None:
    if (info.rank, info.attempt) != (rank, attempt):
        _answer(connection, f"it is of rank {info.rank}, not {rank}, or of another start")
    memory.forget(folder, rank)
    try:
        descriptor = memory.open_state(folder, rank, info.size)
    except OSError as error:
        _answer(connection, error.strerror or "no memory")
    _answer(connection, "")
    with mmap.mmap(descriptor, info.size) as state, memoryview(state) as view:
        os.close(descriptor)
        for begin in range(0, info.size, _BLOCK):
            with view[begin : begin + _BLOCK] as block:
                _fill(connection, block)
                proof.update(block)
    if not hmac.compare_digest(proof.digest(), _read(connection, _PROOF)):
        _answer(connection, "it was changed on the way")
    memory.write_info(folder, info)
    _answer(connection, "")


def _answer(connection: socket.socket, objection: str) -> None:
    """Send the ``objection`` and, if there is one, raise Refused."""
    sentence = objection.encode()[:255]
    connection.sendall(bytes([len(sentence)]) + sentence)
    if objection:
        raise Refused(objection)


def _read_answer(connection: socket.socket) -> None:
    if length := _read(connection, 1)[0]:
        raise Refused(_read(connection, length).decode(errors="replace"))


def _read(connection: socket.socket, count: int, deadline: float | None = None) -> bytes:
    content = bytearray(count)
    with memoryview(content) as view:
        _fill(connection, view, deadline)
    return bytes(content)


def _fill(connection: socket.socket, view: memoryview, deadline: float | None = None) -> None:
    """Receive all of ``view``, by ``deadline`` of the monotonic clock if given. Raises OSError."""
    at = 0
    while at < len(view):
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
        received = connection.recv_into(view[at:])
        if not received:
            raise _Gone("the other side has gone")
        at += received
