"""One TCP connection to another launcher: the handshake, then messages both ways.

Messages are JSON in frames. The first frames are plain, see ``handshake``. The keys of the connection are derived from
them, and every later frame has a counter in its tag, so that frames cannot be replayed or moved to another connection.
Nothing is encrypted: the messages are not secret.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from opsd.launch.io.handshake import Handshake, Identity, Refusal, Superseded, WireError
from opsd.launch.io.loop import Loop
from opsd.launch.io.protocol import JsonMessage, Member

GREETING_S = 2.0
"""Time to connect and authenticate."""
RETRY_S = 0.02
MAX_WAITING = 16 << 20
"""Bytes queued for a launcher that does not read; beyond that the connection is closed."""
USER_TIMEOUT_MS = 3000
"""A connection is closed after so long without acknowledgement, to avoid TCP's long retries after an outage."""
MESSAGES_PER_S, BYTES_PER_S = 1_000.0, 16e6
"""Sustained limits for one launcher; it sends about twenty messages a second."""
PATIENCE_S = 30.0
"""The burst that is allowed: a launcher that was stopped reads, and answers, everything at once."""
MAX_GREETING, MAX_FRAME = 4096, 8 << 20
_LENGTH = struct.Struct(">I")
_COUNTER = struct.Struct(">Q")
_ENCODER = json.JSONEncoder(separators=(",", ":"))
_TAG_BYTES = 16
_CHUNK = 1 << 16
"""Bytes read from one connection before the others have their turn."""


def encode(message: dict[str, Any]) -> bytes:
    """The encoded message. Raises ValueError if it is too large."""
    payload = _ENCODER.encode(message).encode()
    if len(payload) > MAX_FRAME:
        raise ValueError(f"a message of {len(payload)} bytes is larger than {MAX_FRAME}")
    return payload


@dataclass(slots=True)
class Frames:
    """Splits a stream of bytes into frames, and verifies them once there are keys."""

    limit: int = MAX_GREETING
    key_in: bytes = b""
    key_out: bytes = b""
    _buffer: bytearray = field(default_factory=bytearray)
    _count_in: int = 0
    _count_out: int = 0

    def secure(self, key_in: bytes, key_out: bytes) -> None:
        """Use authentication tags from now on."""
        self.key_in, self.key_out, self.limit = key_in, key_out, MAX_FRAME

    def pack(self, payload: bytes) -> bytes:
        """The frame of an encoded message."""
        tag = b""
        if self.key_out:
            tag = _mac(self.key_out, _COUNTER.pack(self._count_out), payload)
            self._count_out += 1
        return _LENGTH.pack(len(payload) + len(tag)) + tag + payload

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """The messages that ``data`` completes. Raises WireError."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self.limit:
                raise WireError("it does not speak the language of opsd launch")
            if len(self._buffer) < _LENGTH.size + length:
                return
            frame = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
            del self._buffer[: _LENGTH.size + length]
            yield self._open(frame)

    def _open(self, frame: bytes) -> dict[str, Any]:
        if self.key_in:
            tag, frame = frame[:_TAG_BYTES], frame[_TAG_BYTES:]
            if not hmac.compare_digest(tag, _mac(self.key_in, _COUNTER.pack(self._count_in), frame)):
                raise WireError("a message was changed on its way")
            self._count_in += 1
        try:
            message = json.loads(frame)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise WireError("it does not speak the language of opsd launch")
        return message


def _mac(key: bytes, *parts: bytes) -> bytes:
    """Keyed BLAKE2b (RFC 7693) over the parts."""
    return hashlib.blake2b(b"".join(parts), key=key, digest_size=_TAG_BYTES).digest()


class RateLimit:
    """How much a launcher may send, so that a faulty one does not keep this one from the others (token bucket).

    It refills with time, up to the amount for ``PATIENCE_S``.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = clock()
        self._messages = MESSAGES_PER_S * PATIENCE_S
        self._bytes = BYTES_PER_S * PATIENCE_S

    def spend(self, messages: int, size: int) -> None:
        """Count ``messages`` of ``size`` bytes. Raises WireError if the limit is exceeded."""
        now = self._clock()
        passed, self._at = now - self._at, now
        self._messages = min(self._messages + passed * MESSAGES_PER_S, MESSAGES_PER_S * PATIENCE_S) - messages
        self._bytes = min(self._bytes + passed * BYTES_PER_S, BYTES_PER_S * PATIENCE_S) - size
        if min(self._messages, self._bytes) < 0:
            self._messages, self._bytes = max(self._messages, 0.0), max(self._bytes, 0.0)
            raise WireError(f"it says more than {MESSAGES_PER_S:.0f} messages or {BYTES_PER_S / 1e6:.0f} MB a second")


class Connection:
    """``opened`` is called once the peer is authenticated, ``closed`` with the reason at the end, each at most once.

    ``expected`` is the launcher that this side connects to; None if the other side connected. Raises OSError if the
    socket is dead.
    """

    def __init__(
        self,
        sock: socket.socket,
        loop: Loop,
        own: Identity,
        *,
        expected: Member | None,
        opened: Callable[[Connection], None],
        received: Callable[[Connection, JsonMessage], None],
        closed: Callable[[Connection, Exception | None], None],
    ) -> None:
        self.peer: Member | None = None
        """The other side, once it is authenticated."""
        self.expected = expected
        self.rate_limit: RateLimit | None = None
        """The limit for messages of the other side; None for no limit."""
        self._sock = sock
        self._loop = loop
        self._opened, self._received, self._closed = opened, received, closed
        self._handshake = Handshake(own, expected)
        self._frames = Frames()
        self._out = bytearray()
        self._held: list[bytes] = []
        self._over = False
        self._retrying = False
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
        self._deadline = loop.later(GREETING_S, lambda: self.close(TimeoutError(errno.ETIMEDOUT, "no answer")))
        if expected is None:
            loop.watch(sock.fileno(), self._readable)
        else:
            self._connect(expected)

    @property
    def greeted(self) -> bool:
        """Whether the other side has said who it is."""
        return self._handshake.peer is not None

    @property
    def incarnation(self) -> str:
        """Identifies the process of the other side, "" until it is known."""
        return self._handshake.incarnation

    def send(self, payload: bytes) -> None:
        """Send an encoded message; it is queued until the other side is authenticated."""
        if self._over:
            return
        if self.peer is not None:
            self._write(self._frames.pack(payload))
        elif sum(map(len, self._held)) + len(payload) <= MAX_WAITING:
            self._held.append(payload)

    def refuse(self, why: str, *, superseded: bool = False) -> None:
        """Tell the other side why, and close; ``superseded``: a later process has taken its part in the run."""
        if not self._over:
            self._write(self._frames.pack(encode({"refused": why} | ({"superseded": True} if superseded else {}))))
            self.close(WireError(why))

    def close(self, why: Exception | None = None) -> None:
        """Close the connection; unsent data is lost."""
        if self._over:
            return
        self._over = True
        self._deadline.cancel()
        self._loop.unwatch(self._sock.fileno())
        self._sock.close()
        self._closed(self, why)

    def drain(self, timeout_s: float) -> None:
        """Hand queued data to the kernel, for at most ``timeout_s`` seconds."""
        if self._out and not self._over:
            self._sock.settimeout(timeout_s)
            try:
                self._sock.sendall(self._out)
            except OSError:
                return
            self._out.clear()

    def _connect(self, target: Member) -> None:
        result = self._sock.connect_ex((target.host, target.port))
        if result in (0, errno.EINPROGRESS):
            self._loop.watch(self._sock.fileno(), self._connected, writable=True)
        else:
            self._loop.later(0.0, lambda: self.close(OSError(result, os.strerror(result))))
            self._loop.watch(self._sock.fileno(), lambda: None, writable=True)

    def _connected(self) -> None:
        error = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self.close(OSError(error, os.strerror(error)))
            return
        self._loop.unwatch(self._sock.fileno())
        self._loop.watch(self._sock.fileno(), self._readable)
        for message in self._handshake.begin():
            self._write(self._frames.pack(encode(message)))

    def _write(self, data: bytes) -> None:
        self._out += data
        if len(self._out) > MAX_WAITING:
            self.close(WireError("it does not read what it is sent"))
        elif not self._retrying:
            self._push()

    def _push(self) -> None:
        self._retrying = False
        if self._over:
            return
        try:
            while self._out:
                del self._out[: self._sock.send(memoryview(self._out)[:_CHUNK].tobytes())]
        except BlockingIOError:
            self._retrying = True
            self._loop.later(RETRY_S, self._push)
        except OSError as error:
            self.close(error)

    def _readable(self) -> None:
        try:
            data = self._sock.recv(_CHUNK if self.peer is not None else MAX_GREETING)
        except BlockingIOError:
            return
        except OSError as error:
            self.close(error)
            return
        if not data:
            self.close(ConnectionResetError(errno.ECONNRESET, "closed by the other side"))
            return
        try:
            if self.rate_limit is not None:
                self.rate_limit.spend(0, len(data))
            for message in self._frames.feed(data):
                self._hear(message)
                if self._over:
                    return
        except Refusal as refusal:
            self.refuse(str(refusal))
        except WireError as error:
            self.close(error)
        except (KeyError, TypeError, ValueError) as error:
            self.close(WireError(f"it sends what makes no sense: {error!r}"))

    def _hear(self, message: JsonMessage) -> None:
        if self.peer is not None and "refused" not in message:
            if self.rate_limit is not None:
                self.rate_limit.spend(1, 0)
            self._received(self, message)
            return
        if self.peer is not None and message.get("superseded"):
            raise Superseded(str(message["refused"])[:200])
        for answer in self._handshake.hear(message):
            self._write(self._frames.pack(encode(answer)))
        if self._handshake.proven and not self._over:
            self._open()

    def _open(self) -> None:
        self._frames.secure(self._handshake.key_in, self._handshake.key_out)
        self.peer = self._handshake.peer
        self._deadline.cancel()
        self._opened(self)
        for payload in self._held:
            self.send(payload)
        self._held.clear()
