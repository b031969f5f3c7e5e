"""How two launchers that connect find out that they belong together: versions, run, names, and proof of their secret.

The caller greets, the other one greets back and proves that it knows the secret, then the caller proves it. Proofs and
the keys of the connection depend on both greetings, and these on random numbers, so that nothing can be replayed or
changed on its way. No sockets here: messages come in and go out.

Versions: ``VERSION`` grows by one with every change of what launchers say to each other. A launcher talks with those of
the version before and the one after, which is enough to replace the nodes of a run one by one; see ``protocol`` for how
a message may grow. A change that the version before cannot live with sets ``OLDEST`` to the new version.
"""

from __future__ import annotations

import hmac
import json
import os
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from opsd.launch.io.protocol import Codec, JsonMessage, Member, ProtocolError

SECRET_FILE = ".secret"  # noqa: S105  # no password, a file's name
"""The file with the secret in the run's folder."""
SECRET_VARIABLE = "OPSD_JOB_SECRET"  # noqa: S105
_SECRET_BYTES = 32
VERSION = 2
OLDEST = 2
"""The oldest version that this one still understands."""


def new_incarnation() -> str:
    """What tells one process of a launcher from the next: later ones are greater, unless the clock was set back."""
    return f"{time.time_ns():016x}{os.urandom(4).hex()}"


@dataclass(frozen=True, slots=True)
class Identity:
    """What a launcher says of itself, and the secret that proves it."""

    member: Member
    run: str
    secret: bytes = field(repr=False)
    incarnation: str = field(default_factory=new_incarnation)


@dataclass(frozen=True, slots=True)
class Greeting:
    """What each side says first."""

    opsd: int
    run: str
    member: Member
    nonce: str
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class Proof:
    """That the sender knows the secret: the code of both greetings."""

    proof: str


_CODEC = Codec((Greeting, Proof))


class WireError(Exception):
    """What comes over a connection is not from a launcher of this run; the message says why, in a sentence."""


class Refusal(WireError):
    """The other side is a launcher, but none to work with; it is told why."""


class Superseded(WireError):
    """A proven launcher works with a process of this launcher's name that was started later."""


class Handshake:
    """One side of it; ``expected`` is whom this side calls, None if it is called itself.

    Once ``proven``, ``key_in`` and ``key_out`` secure the connection with ``peer``.
    """

    def __init__(self, own: Identity, expected: Member | None) -> None:
        self._own = own
        self._expected = expected
        self._theirs: JsonMessage = {}
        self.peer: Member | None = None
        """Who the other side says it is, once it has said so."""
        self.incarnation = ""
        self.proven = False

    @cached_property
    def _mine(self) -> JsonMessage:
        own = self._own
        return _CODEC.encode(Greeting(VERSION, own.run, own.member, os.urandom(16).hex(), own.incarnation))

    def begin(self) -> Sequence[JsonMessage]:
        """What this side says without being asked."""
        return [self._mine] if self._expected is not None else []

    def hear(self, message: JsonMessage) -> Sequence[JsonMessage]:
        """What to answer. Raises WireError, and Refusal if the other side should be told."""
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
        """What the other side's messages are proven with."""
        return self._code(f"key of the {'called' if self._expected is not None else 'caller'}")

    @property
    def key_out(self) -> bytes:
        """What this side's messages are proven with."""
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
        """A key or a proof for one purpose and this connection, that only who knows the secret can make.

        It is of both greetings; what a newer version says in its greeting is part of it.
        """
        pair = (self._mine, self._theirs) if self._expected is not None else (self._theirs, self._mine)
        greetings = [json.dumps(greeting, sort_keys=True) for greeting in pair]
        return hmac.digest(self._own.secret, json.dumps([label, *greetings]).encode(), "sha256")


def _neighbours(version: int) -> bool:
    return version >= OLDEST and abs(version - VERSION) <= 1


class SecretError(Exception):
    """There is no secret that can be used; the message says what to do."""


def job_secret(folder: Path, environ: Mapping[str, str] = os.environ) -> bytes:
    """The secret in ``OPSD_JOB_SECRET`` (hexadecimal), or that in the run's folder, made if there is none.

    Launchers that make it at the same moment end up with the same one. Raises SecretError.
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
    draft = path.with_name(f"{SECRET_FILE}.{os.urandom(8).hex()}")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(os.urandom(_SECRET_BYTES))
        file.flush()
        os.fsync(file.fileno())
    with suppress(FileExistsError):
        os.link(draft, path)
    draft.unlink()
