"""One TCP connection to another launcher: the handshake, then messages both ways.

Messages are JSON in frames. A connection begins with frames in the clear, see ``handshake``. Its keys come from them,
and every later frame has a counter in its tag, so that nothing can be replayed or moved to another connection. Nothing
is encrypted: what launchers say is no secret.
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
"""How long a connection may take to be made and proven."""
RETRY_S = 0.02
MAX_WAITING = 16 << 20
"""Bytes that may wait for a launcher that does not read; then the connection is cut."""
USER_TIMEOUT_MS = 3000
"""Unconfirmed for so long, a connection is given up, so that a healed network is not met with TCP's long retries."""
MESSAGES_PER_S, BYTES_PER_S = 1_000.0, 16e6
"""What a launcher may say for good; it says some twenty messages a second."""
PATIENCE_S = 30.0
"""What a launcher was sent while it was stopped, it reads at once: that is held against nobody."""
MAX_GREETING, MAX_FRAME = 4096, 8 << 20
_LENGTH = struct.Struct(">I")
_COUNTER = struct.Struct(">Q")
_TAG_BYTES = 16
_CHUNK = 1 << 16
"""Bytes that are read of one connection before the others have their turn."""


def encode(message: dict[str, Any]) -> bytes:
    """A message as it is sent. Raises ValueError if it is too large."""
    payload = json.dumps(message, separators=(",", ":")).encode()
    if len(payload) > MAX_FRAME:
        raise ValueError(f"a message of {len(payload)} bytes is larger than {MAX_FRAME}")
    return payload


@dataclass(slots=True)
class Frames:
    """Cuts a stream of bytes into frames and checks them once there are keys."""

    limit: int = MAX_GREETING
    key_in: bytes = b""
    key_out: bytes = b""
    _buffer: bytearray = field(default_factory=bytearray)
    _count_in: int = 0
    _count_out: int = 0

    def secure(self, key_in: bytes, key_out: bytes) -> None:
        """From now on frames carry tags."""
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
    """How much a launcher may say, so that one that has gone wild does not keep this one from the others.

    It grows with time up to what may be said within ``PATIENCE_S``.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = clock()
        self._messages = MESSAGES_PER_S * PATIENCE_S
        self._bytes = BYTES_PER_S * PATIENCE_S

    def spend(self, messages: int, size: int) -> None:
        """Take what was said, ``size`` in bytes. Raises WireError once there is nothing left."""
        now = self._clock()
        passed, self._at = now - self._at, now
        self._messages = min(self._messages + passed * MESSAGES_PER_S, MESSAGES_PER_S * PATIENCE_S) - messages
        self._bytes = min(self._bytes + passed * BYTES_PER_S, BYTES_PER_S * PATIENCE_S) - size
        if min(self._messages, self._bytes) < 0:
            self._messages, self._bytes = max(self._messages, 0.0), max(self._bytes, 0.0)
            raise WireError(f"it says more than {MESSAGES_PER_S:.0f} messages or {BYTES_PER_S / 1e6:.0f} MB a second")


class Connection:
    """``opened`` is called once the other side is proven, ``closed`` with the reason at the end, both at most once.

    ``expected`` is whom this side has called; None if it was called itself. Raises OSError if the socket is dead.
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
        """Who the other side is, once it is proven."""
        self.expected = expected
        self.rate_limit: RateLimit | None = None
        """How much the other side may say from now on; without limit if None."""
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
        """Which process of the launcher the other side is, "" until it has said so."""
        return self._handshake.incarnation

    def send(self, payload: bytes) -> None:
        """Send an encoded message once the other side is proven, until then keep it."""
        if self._over:
            return
        if self.peer is not None:
            self._write(self._frames.pack(payload))
        elif sum(map(len, self._held)) + len(payload) <= MAX_WAITING:
            self._held.append(payload)

    def refuse(self, why: str, *, superseded: bool = False) -> None:
        """End the connection and tell the other side why; ``superseded``: its part in the run is over."""
        if not self._over:
            self._write(self._frames.pack(encode({"refused": why} | ({"superseded": True} if superseded else {}))))
            self.close(WireError(why))

    def close(self, why: Exception | None = None) -> None:
        """End the connection; what has not been sent is lost."""
        if self._over:
            return
        self._over = True
        self._deadline.cancel()
        self._loop.unwatch(self._sock.fileno())
        self._sock.close()
        self._closed(self, why)

    def drain(self, timeout_s: float) -> None:
        """Wait until what is to be sent has been handed to the kernel, for at most so long."""
        if self._out and not self._over:
            self._sock.settimeout(timeout_s)
            try:
                self._sock.sendall(self._out)
            except OSError:
                return
            self._out.clear()

    def _connect(self, target: Member) -> None:
        result = self._sock.connect_ex((target.address, target.port))
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
