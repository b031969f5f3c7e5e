"""How launchers talk: JSON in frames over TCP, each side proven to know the job's secret, each frame proven to be its.

A connection begins with frames in the clear, see ``handshake``. Its keys come from them, and every later frame has a
counter in its tag, so that nothing can be replayed or moved to another connection. Nothing is encrypted: what launchers
say is no secret.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MAX_GREETING, MAX_FRAME = 4096, 8 << 20
_LENGTH = struct.Struct(">I")
_COUNTER = struct.Struct(">Q")
_TAG_BYTES = 16


class WireError(Exception):
    """What comes over a connection is not from a launcher of this run; the message says why, in a sentence."""


def mac(key: bytes, *parts: bytes) -> bytes:
    """Keyed BLAKE2b (RFC 7693) over the parts."""
    return hashlib.blake2b(b"".join(parts), key=key, digest_size=_TAG_BYTES).digest()


def session_key(secret: bytes, label: str, *parts: str) -> bytes:
    """A key, or a proof, that only who knows ``secret`` can make, for one purpose and one connection."""
    return hmac.digest(secret, json.dumps([label, *parts]).encode(), "sha256")


def new_nonce() -> str:
    """A random number that is used once, as text."""
    return os.urandom(16).hex()


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
            tag = mac(self.key_out, _COUNTER.pack(self._count_out), payload)
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
            if not hmac.compare_digest(tag, mac(self.key_in, _COUNTER.pack(self._count_in), frame)):
                raise WireError("a message was changed on its way")
            self._count_in += 1
        try:
            message = json.loads(frame)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise WireError("it does not speak the language of opsd launch")
        return message
