"""The secret that the launchers of a run share."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

NAME = ".secret"
VARIABLE = "OPSD_JOB_SECRET"
_BYTES = 32


class SecretError(Exception):
    """There is no secret that can be used; the message says what to do."""


def job_secret(folder: Path, environ: Mapping[str, str] = os.environ) -> bytes:
    """The secret in ``OPSD_JOB_SECRET`` (hexadecimal), or that in the run's folder, made if there is none.

    Launchers that make it at the same moment end up with the same one. Raises SecretError.
    """
    if given := environ.get(VARIABLE):
        try:
            secret = bytes.fromhex(given)
        except ValueError:
            secret = b""
        if len(secret) < 16:
            raise SecretError(
                f"{VARIABLE} is not a hexadecimal number of at least 16 bytes; openssl rand -hex 32 makes one"
            )
        return secret
    path = folder / NAME
    try:
        if not path.exists():
            _make(path)
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            info = os.fstat(file.fileno())
            secret = file.read(4096)
    except OSError as error:
        raise SecretError(f"the secret of the run, {path}, cannot be had: {error.strerror}") from error
    if info.st_uid not in (os.getuid(), 0) or stat.S_IMODE(info.st_mode) & 0o077:
        raise SecretError(f"{path} could be read or made by others; remove it, or set {VARIABLE}")
    if len(secret) != _BYTES:
        raise SecretError(f"{path} is damaged; remove it while no launcher of the run is running")
    return secret


def _make(path: Path) -> None:
    draft = path.with_name(f"{NAME}.{os.urandom(8).hex()}")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(os.urandom(_BYTES))
        file.flush()
        os.fsync(file.fileno())
    with suppress(FileExistsError):
        os.link(draft, path)
    draft.unlink()
