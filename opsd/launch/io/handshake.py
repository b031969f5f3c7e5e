"""How two launchers find and recognise each other.

Addresses of other launchers by name: asked for when first needed, in a thread, and kept.

A launcher calls few others, so it asks the name service for few names, however many nodes the run has. An address that
was found is used until a newer answer comes: a name service that is down or slow ends no connection that worked.
"""

from __future__ import annotations

import errno
import hmac
import json
import os
import socket
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from ipaddress import ip_address
from pathlib import Path

from opsd import durable
from opsd.launch.io.loop import Timers
from opsd.launch.io.protocol import Codec, JsonMessage, Member, ProtocolError

FRESH_S = 60.0
"""An older answer is used, and asked for again meanwhile."""
RETRY_S = 5.0
"""After an error the name is not asked for again before this."""


def lookup(host: str) -> str:
    """The address of ``host``, one of IPv4 if it has several. Raises OSError."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a label that is empty or longer than 63 characters
        raise OSError(errno.EINVAL, "this cannot be a host name") from error
    return min((str(entry[4][0]) for entry in found), key=lambda address: ":" in address)


def host_is_up(host: str, ports: Sequence[int], timeout_s: float = 2.0) -> bool:
    """Whether ``host`` answers on one of ``ports``, if only to refuse. True if it has no address."""
    try:
        address = lookup(host)
    except OSError:
        return True
    for port in ports:
        try:
            socket.create_connection((address, port), timeout_s).close()
        except ConnectionError:
            return True
        except OSError:
            continue
        return True
    return False


def is_address(host: str) -> bool:
    """Whether ``host`` is an IP address, for which nobody has to be asked."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


Found = Callable[[str | None], None]


@dataclass(slots=True)
class _Entry:
    address: str = ""
    asked_at: float = 0.0
    asking: bool = False
    waiting: list[Found] = field(default_factory=list)


class AddressBook:
    """``lookup`` raises OSError; ``failed`` is called with the host and the error if no address is known."""

    def __init__(
        self, loop: Timers, failed: Callable[[str, OSError], None], lookup: Callable[[str], str] = lookup
    ) -> None:
        self._loop = loop
        self._failed = failed
        self._lookup = lookup
        self._entries: dict[str, _Entry] = {}

    def find(self, host: str, found: Found) -> None:
        """Call ``found`` with the address of ``host``, at once if it is known; with None if there is none now."""
        if is_address(host):
            found(host)
            return
        entry = self._entries.setdefault(host, _Entry(asked_at=-FRESH_S))
        age_s = self._loop.time() - entry.asked_at
        if not entry.asking and age_s >= (FRESH_S if entry.address else RETRY_S):
            entry.asking, entry.asked_at = True, self._loop.time()
            self._loop.run_in_thread(partial(self._lookup, host), partial(self._answered, host, entry))
        if entry.address:
            found(entry.address)
        elif entry.asking:
            entry.waiting.append(found)
        else:
            found(None)

    def _answered(self, host: str, entry: _Entry, answer: str | OSError) -> None:
        entry.asking, entry.asked_at = False, self._loop.time()
        if not isinstance(answer, OSError):
            entry.address = answer
        elif not entry.address:
            self._failed(host, answer)
        waiting, entry.waiting = entry.waiting, []
        for found in waiting:
            found(entry.address or None)


# The handshake of two launchers: versions, run, names, and proof that both know the secret.
#
# The caller greets, the other side greets back and proves that it knows the secret, then the caller proves it.
# Proofs and connection keys depend on both greetings, and these on random numbers, so that nothing can be replayed
# or changed in transit. No sockets here: messages come in and go out.
#
# Versions: ``VERSION`` increases with every change of the messages. A launcher works with the version before and the
# one after, which is enough to replace the nodes of a run one by one; ``protocol`` says how a message may change. A
# change that is incompatible with the version before sets ``OLDEST`` to the new version.


SECRET_FILE = ".secret"  # noqa: S105  # no password, a file's name
"""The file with the secret in the run's folder."""
SECRET_VARIABLE = "OPSD_JOB_SECRET"  # noqa: S105
_SECRET_BYTES = 32
VERSION = 2
OLDEST = 2
"""The oldest compatible version."""


def new_incarnation() -> str:
    """Identifies a process of a launcher; later ones are greater, unless the clock was set back."""
    return f"{time.time_ns():016x}{os.urandom(4).hex()}"


@dataclass(frozen=True, slots=True)
class Identity:
    """What a launcher says about itself, and the secret that proves it."""

    member: Member
    run: str
    secret: bytes = field(repr=False)
    incarnation: str = field(default_factory=new_incarnation)


@dataclass(frozen=True, slots=True)
class Greeting:
    """The first message of each side."""

    opsd: int
    run: str
    member: Member
    nonce: str
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class Proof:
    """Proves that the sender knows the secret: an HMAC of both greetings."""

    proof: str


_CODEC = Codec((Greeting, Proof))


class WireError(Exception):
    """The other side is not a launcher of this run; the message says why, in a sentence."""


class Refusal(WireError):
    """The other side is a launcher that this one cannot work with; it gets the reason."""


class Superseded(WireError):
    """An authenticated launcher works with a later process of this launcher's name."""


class Handshake:
    """One side of it; ``expected`` is the launcher that this side connects to, None if the other side connected.

    Once ``proven``, ``key_in`` and ``key_out`` secure the connection with ``peer``.
    """

    def __init__(self, own: Identity, expected: Member | None) -> None:
        self._own = own
        self._expected = expected
        self._theirs: JsonMessage = {}
        self.peer: Member | None = None
        """Who the other side claims to be, once it has said so."""
        self.incarnation = ""
        self.proven = False

    @cached_property
    def _mine(self) -> JsonMessage:
        own = self._own
        return _CODEC.encode(Greeting(VERSION, own.run, own.member, os.urandom(16).hex(), own.incarnation))

    def begin(self) -> Sequence[JsonMessage]:
        """The messages that this side sends first."""
        return [self._mine] if self._expected is not None else []

    def hear(self, message: JsonMessage) -> Sequence[JsonMessage]:
        """The answers to a message. Raises WireError, or Refusal if the other side should be told."""
        if "refused" in message:
            raise WireError(f"it refuses: {str(message['refused'])!r:.200}")
        if self.peer is None:
            self._greeted(message)
            return [] if self._expected is not None else [self._mine, self._proof("called")]
        self._check_proof(message)
        self.proven = True
        return [self._proof("caller")] if self._expected is not None else []

    @property
    def key_in(self) -> bytes:
        """Key of the other side's messages."""
        return self._code(f"key of the {'called' if self._expected is not None else 'caller'}")

    @property
    def key_out(self) -> bytes:
        """Key of this side's messages."""
        return self._code(f"key of the {'caller' if self._expected is not None else 'called'}")

    def _greeted(self, message: JsonMessage) -> None:
        version = message.get("opsd")
        if isinstance(version, int) and not _neighbours(version):
            raise Refusal(
                f"its opsd speaks version {version} and this one {VERSION}; install the same opsd on all nodes"
            )
        try:
            greeting = _CODEC.decode(message)
        except ProtocolError as error:
            raise WireError("it does not speak the language of opsd launch") from error
        if not isinstance(greeting, Greeting):
            raise WireError("it does not speak the language of opsd launch")
        if greeting.run != self._own.run:
            raise Refusal(f"it belongs to the run {greeting.run!r:.80} and not to {self._own.run!r}")
        if greeting.member.name == self._own.member.name:
            raise Refusal(f"it has the same name, {greeting.member.name!r:.80}; give each its own with --node-name")
        if self._expected is not None and greeting.member.name != self._expected.name:
            raise Refusal(f"{greeting.member.name!r:.80} answers where {self._expected.name!r} should be")
        self._theirs, self.peer, self.incarnation = message, greeting.member, greeting.incarnation

    def _check_proof(self, message: JsonMessage) -> None:
        try:
            given = _CODEC.decode(message)
        except ProtocolError as error:
            raise WireError("it does not speak the language of opsd launch") from error
        code = self._code(f"proof of the {'called' if self._expected is not None else 'caller'}").hex()
        proof = given.proof if isinstance(given, Proof) else ""
        if not hmac.compare_digest(proof.encode(errors="replace"), code.encode()):
            raise Refusal("it does not know the secret of this run")

    def _proof(self, who: str) -> JsonMessage:
        return _CODEC.encode(Proof(self._code(f"proof of the {who}").hex()))

    def _code(self, label: str) -> bytes:
        """A key or proof for one purpose and this connection, which requires the secret.

        It covers both greetings, including fields of a newer version.
        """
        return hmac.digest(self._own.secret, json.dumps([label, *self._greetings]).encode(), "sha256")

    @cached_property
    def _greetings(self) -> tuple[str, str]:
        """The caller's and the other's, once both are known."""
        mine, theirs = (json.dumps(greeting, sort_keys=True) for greeting in (self._mine, self._theirs))
        return (mine, theirs) if self._expected is not None else (theirs, mine)


def _neighbours(version: int) -> bool:
    return version >= OLDEST and abs(version - VERSION) <= 1


class SecretError(Exception):
    """There is no usable secret; the message says what to do."""


def job_secret(folder: Path, environ: Mapping[str, str] = os.environ) -> bytes:
    """The secret in ``OPSD_JOB_SECRET`` (hexadecimal), or the one in the run's folder, created if there is none.

    Launchers that create it at the same time end up with the same one. Raises SecretError.
    """
    if given := environ.get(SECRET_VARIABLE):
        try:
            secret = bytes.fromhex(given)
        except ValueError:
            secret = b""
        if len(secret) < 16:
            raise SecretError(
                f"{SECRET_VARIABLE} is not a hexadecimal number of at least 16 bytes; openssl rand -hex 32 makes one"
            )
        return secret
    path = folder / SECRET_FILE
    try:
        if not path.exists():
            _make_secret(path)
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            info = os.fstat(file.fileno())
            secret = file.read(4096)
    except OSError as error:
        raise SecretError(f"the secret of the run, {path}, cannot be had: {error.strerror}") from error
    if info.st_uid not in (os.getuid(), 0) or stat.S_IMODE(info.st_mode) & 0o077:
        raise SecretError(f"{path} could be read or made by others; remove it, or set {SECRET_VARIABLE}")
    if len(secret) != _SECRET_BYTES:
        raise SecretError(f"{path} is damaged; remove it while no launcher of the run is running")
    return secret


def _make_secret(path: Path) -> None:
    durable.create(path, os.urandom(_SECRET_BYTES), mode=0o600)
