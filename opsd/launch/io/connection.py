"""One TCP connection to another launcher: the greeting, the proofs, then messages both ways."""

from __future__ import annotations

import errno
import hmac
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from opsd.launch.io.loop import Loop
from opsd.launch.io.member import Member, Message, member_from_json, member_to_json
from opsd.launch.io.wire import VERSION, Frames, WireError, encode, new_nonce, session_key

GREETING_S = 2.0
"""How long a connection may take to be made and proven."""
RETRY_S = 0.02
MAX_WAITING = 16 << 20
"""Bytes that may wait for a launcher that does not read; then the connection is cut."""
USER_TIMEOUT_MS = 3000
"""Unconfirmed for so long, a connection is given up, so that a healed network is not met with TCP's long retries."""
_CHUNK = 1 << 18


@dataclass(frozen=True, slots=True)
class Identity:
    """What a launcher says of itself, and the secret that proves it."""

    member: Member
    run: str
    secret: bytes


class Connection:
    """``opened`` is called once the other side is proven, ``closed`` with the reason at the end, both at most once.

    ``expected`` is whom this side has called; None if it was called itself.
    """

    def __init__(
        self,
        sock: socket.socket,
        loop: Loop,
        own: Identity,
        *,
        expected: Member | None,
        opened: Callable[[Connection], None],
        received: Callable[[Member, Message], None],
        closed: Callable[[Connection, Exception | None], None],
    ) -> None:
        self.peer: Member | None = None
        self.expected = expected
        self._sock = sock
        self._loop = loop
        self._own = own
        self._opened, self._received, self._closed = opened, received, closed
        self._frames = Frames()
        self._nonce = new_nonce()
        self._out = bytearray()
        self._held: list[bytes] = []
        self._over = False
        self._retrying = False
        self._theirs: dict[str, Any] = {}
        self._deadline = loop.later(GREETING_S, lambda: self.close(TimeoutError(errno.ETIMEDOUT, "no answer")))
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
        if expected is None:
            loop.watch(sock.fileno(), self._readable)
            return
        result = sock.connect_ex((expected.address, expected.port))
        if result in (0, errno.EINPROGRESS):
            loop.watch(sock.fileno(), self._connected, writable=True)
        else:
            loop.later(0.0, lambda: self.close(OSError(result, os.strerror(result))))
            loop.watch(sock.fileno(), lambda: None, writable=True)

    def send(self, payload: bytes) -> None:
        """Send an encoded message once the other side is proven, until then keep it."""
        if self._over:
            return
        if self.peer is None:
            self._held.append(payload)
            return
        self._write(self._frames.pack(payload))

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

    def _connected(self) -> None:
        error = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self.close(OSError(error, os.strerror(error)))
            return
        self._loop.unwatch(self._sock.fileno())
        self._loop.watch(self._sock.fileno(), self._readable)
        self._write(self._frames.pack(encode(self._greeting())))

    def _greeting(self) -> dict[str, Any]:
        return {
            "opsd": VERSION, "run": self._own.run, "member": member_to_json(self._own.member), "nonce": self._nonce,
        }  # fmt: skip

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
            data = self._sock.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError as error:
            self.close(error)
            return
        if not data:
            self.close(ConnectionResetError(errno.ECONNRESET, "closed by the other side"))
            return
        try:
            for message in self._frames.feed(data):
                if self.peer is not None:
                    self._received(self.peer, message)
                elif "refused" in message:
                    raise WireError(f"it refuses: {str(message['refused'])!r:.200}")
                elif self.expected is not None:
                    self._prove_after(message)
                else:
                    self._welcome(message)
                if self._over:
                    return
        except (WireError, KeyError, TypeError, ValueError) as error:
            self.close(error if isinstance(error, WireError) else WireError(f"it sends what makes no sense: {error!r}"))

    # -- the greeting, as the one that was called ----------------------------------------------------------------

    def _welcome(self, message: Message) -> None:
        if not self._theirs:
            self._check(message)
            self._theirs = message
            self._write(self._frames.pack(encode({**self._greeting(), "proof": self._proof("called").hex()})))
            return
        if not hmac.compare_digest(bytes.fromhex(message["proof"]), self._proof("caller")):
            raise WireError("it does not know the secret of this run")
        self._open(self._key("caller"), self._key("called"))

    # -- the greeting, as the one that calls ---------------------------------------------------------------------

    def _prove_after(self, message: Message) -> None:
        self._check(message)
        self._theirs = message
        if not hmac.compare_digest(bytes.fromhex(message["proof"]), self._proof("called")):
            self._refuse("it does not know the secret of this run")
        self._write(self._frames.pack(encode({"proof": self._proof("caller").hex()})))
        self._open(self._key("called"), self._key("caller"))

    def _check(self, message: Message) -> None:
        """Raise WireError, and tell the other side, unless it is a launcher that this one can work with."""
        why = ""
        if message["opsd"] != VERSION:
            why = (
                f"its opsd speaks version {message['opsd']!r:.20} and this one {VERSION}; "
                "install the same opsd on all nodes"
            )
        elif message["run"] != self._own.run:
            why = f"it belongs to the run {message['run']!r:.80} and not to {self._own.run!r}"
        if why:
            self._refuse(why)

    def _refuse(self, why: str) -> NoReturn:
        """Tell the other side why, and raise WireError."""
        self._write(self._frames.pack(encode({"refused": why})))
        raise WireError(why)

    def _proof(self, who: str) -> bytes:
        return session_key(self._own.secret, f"proof of the {who}", *self._transcript())

    def _key(self, who: str) -> bytes:
        return session_key(self._own.secret, f"key of the {who}", *self._transcript())

    def _transcript(self) -> list[str]:
        mine = [self._nonce, *map(str, member_to_json(self._own.member))]
        theirs = [str(self._theirs["nonce"]), *map(str, self._theirs["member"])]
        return [self._own.run, *(mine + theirs if self.expected is not None else theirs + mine)]

    def _open(self, key_in: bytes, key_out: bytes) -> None:
        self._frames.secure(key_in, key_out)
        self.peer = member_from_json(self._theirs["member"])
        self._deadline.cancel()
        self._opened(self)
        for payload in self._held:
            self.send(payload)
        self._held.clear()
