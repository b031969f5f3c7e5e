"""TLS and passwords for the agent's HTTP server, in the file format of Prometheus' exporter-toolkit.

It has those keys of https://github.com/prometheus/exporter-toolkit/blob/master/docs/web-configuration.md that matter to
a metrics server; relative file names are relative to the file's own folder. Everything is read once, when the agent
starts and when it reloads its configuration; `systemctl reload opsd` after a certificate was renewed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from opsd import pip_install
from opsd.files import read_settings

if TYPE_CHECKING:
    import ssl

MAX_REMEMBERED = 32
"""Size of the cache of correct passwords, as a bcrypt hash takes a tenth of a second."""
_VERSIONS = {"TLS12": "TLSv1_2", "TLS13": "TLSv1_3"}
_VERIFY = {
    "NoClientCert": "CERT_NONE",
    "VerifyClientCertIfGiven": "CERT_OPTIONAL",
    "RequireAndVerifyClientCert": "CERT_REQUIRED",
}
_NOBODY = b"$2b$10$SgcCAQoAAAAAAAAAAAAAAOsw9oEvY3bZ9WbC1K0sJqPqHzqTqjRzW"
"""Hash checked for unknown users, so that they take as long as known ones."""


class WebConfigError(Exception):
    """An invalid web configuration; the message is one sentence."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class _Tls(_Model):
    cert_file: str
    key_file: str
    client_auth_type: Literal["NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"] = "NoClientCert"
    client_ca_file: str = ""
    min_version: Literal["TLS12", "TLS13"] = "TLS12"


class _File(_Model):
    tls_server_config: _Tls | None = None
    basic_auth_users: Mapping[str, str] = {}


class WebConfig:
    """TLS and passwords of the server: ``context`` is None without TLS. Thread-safe."""

    def __init__(self, context: ssl.SSLContext | None = None, users: Mapping[str, bytes] | None = None) -> None:
        self.context = context
        self._users = users or {}
        self._right: set[bytes] = set()
        self._guard = threading.Lock()

    def recalls(self, authorization: str) -> bool:
        """Whether a request with this ``Authorization`` header may be answered, as far as is known without a hash."""
        return not self._users or _digest(authorization) in self._right

    def admits(self, authorization: str) -> bool:
        """Whether a request with this ``Authorization`` header may be answered.

        Takes a tenth of a second for a password that was not seen before; only one hash at a time is computed.
        """
        if self.recalls(authorization):
            return True
        digest = _digest(authorization)
        with self._guard:
            if not self._matches(authorization):
                return False
            if len(self._right) >= MAX_REMEMBERED:
                self._right.clear()
            self._right.add(digest)
            return True

    def _matches(self, authorization: str) -> bool:
        import bcrypt

        scheme, _, encoded = authorization.partition(" ")
        try:
            user, separator, password = base64.b64decode(encoded, validate=True).decode().partition(":")
        except (binascii.Error, ValueError):
            return False
        if scheme.lower() != "basic" or not separator or "\0" in password:
            return False
        right = bcrypt.checkpw(password.encode()[:72], self._users.get(user, _NOBODY))
        return right and user in self._users


def _digest(authorization: str) -> bytes:
    return hashlib.sha256(authorization.encode("utf-8", "surrogateescape")).digest()


def load(path: Path) -> WebConfig:
    """The configuration in ``path``. Raises WebConfigError."""
    file = _read(path)
    users = {name: _hash(name, text, path) for name, text in file.basic_auth_users.items()}
    return WebConfig(_context(file.tls_server_config, path) if file.tls_server_config else None, users)


def has_tls(path: Path) -> bool:
    """Whether an agent with this configuration uses TLS; True if this user cannot read the file."""
    try:
        return _read(path).tls_server_config is not None
    except WebConfigError:
        return True


def client_certificate(path: Path) -> tuple[Path, Path] | None:
    """Certificate and key with which an agent with this configuration asks others; None if they ask for none.

    Agents are configured alike: where they ask clients for a certificate they have their own. None as well if this
    user cannot read the file.
    """
    try:
        tls = _read(path).tls_server_config
    except WebConfigError:
        return None
    if tls is None or tls.client_auth_type == "NoClientCert":
        return None
    return path.parent / tls.cert_file, path.parent / tls.key_file


def _read(path: Path) -> _File:
    try:
        import bcrypt  # noqa: F401
        import yaml
    except ImportError as error:
        raise WebConfigError(f"{path}: {error}; install what TLS and passwords need: {pip_install('web')}") from error
    try:
        data: Any = yaml.safe_load(read_settings(path).decode())
        return _File.model_validate(data if data is not None else {})
    except OSError as error:
        raise WebConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise WebConfigError(f"{path}: not valid YAML: {str(error).splitlines()[0]}") from error
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in problem["loc"]) or "the file"
        said = "is not a key that opsd knows" if problem["type"] == "extra_forbidden" else problem["msg"].lower()
        raise WebConfigError(f"{path}: {where}: {said}") from error


def _hash(user: str, text: str, path: Path) -> bytes:
    import bcrypt

    try:
        bcrypt.checkpw(b"", text.encode())
    except ValueError as error:
        raise WebConfigError(
            f"{path}: basic_auth_users.{user}: not a bcrypt hash; `htpasswd -nBC 10 {user}` makes one"
        ) from error
    return text.encode()


def _context(tls: _Tls, path: Path) -> ssl.SSLContext:
    import ssl  # takes three megabytes

    if tls.client_auth_type != "NoClientCert" and not tls.client_ca_file:
        raise WebConfigError(f"{path}: client_auth_type {tls.client_auth_type} needs a client_ca_file")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.minimum_version = ssl.TLSVersion[_VERSIONS[tls.min_version]]
    certificate, key = path.parent / tls.cert_file, path.parent / tls.key_file
    try:
        for file in (certificate, key, *([path.parent / tls.client_ca_file] if tls.client_ca_file else [])):
            read_settings(file)
        context.load_cert_chain(certificate, key, password=lambda: "")
    except ssl.SSLError as error:
        raise WebConfigError(
            f"{path}: {certificate} and {key} are not a certificate and its key: {error.reason or error}"
        ) from error
    except OSError as error:
        raise WebConfigError(f"{path}: {error.filename or tls.client_ca_file}: {error.strerror}") from error
    try:
        if tls.client_ca_file:
            context.load_verify_locations(path.parent / tls.client_ca_file)
    except ssl.SSLError as error:
        raise WebConfigError(f"{path}: client_ca_file {tls.client_ca_file} holds no certificates") from error
    context.verify_mode = ssl.VerifyMode[_VERIFY[tls.client_auth_type]]
    return context
