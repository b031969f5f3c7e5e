"""Checkpoints on object storage or a network folder, through fsspec: upload, verification, listing, download.

Run as a program it does one transfer with a time limit, since a storage client may hang::

    python -m opsd.checkpoints.remote upload ROOT     those that wait for it (``awaiting-upload``), oldest first
    python -m opsd.checkpoints.remote fetch ROOT STEP the newest that is later than STEP

The URL, which may contain a password, is in OPSD_REMOTE. The program prints the steps. Exit codes: 0 done; 1 the
storage refused, failed or took too long.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from opsd import durable
from opsd.checkpoints.manifest import (
    MANIFEST,
    MAX_BYTES,
    CheckpointError,
    FileEntry,
    Manifest,
    checksum,
    commit,
    decode,
    encode,
    folder_of,
    is_there,
    read,
    step_of,
    steps,
)
from opsd.checkpoints.retention import AWAITED
from opsd.client import append_event
from opsd.durable import sync_folder
from opsd.events import CheckpointUploaded, CheckpointUploadFailed
from opsd.progress import shown
from opsd.words import first_line, of_file, remedy

AWAITING = AWAITED[0]
URL = "OPSD_REMOTE"
LIMIT_S = 3600
"""For one run of the program."""
_BLOCK = 1 << 24


_USER = re.compile(r"//[^/@\s]*@")


class RemoteError(Exception):
    """The storage cannot be used; the message is one sentence."""


def without_user(text: str) -> str:
    """``text`` without the user names and passwords of the URLs in it, s3://user:password@bucket for instance."""
    return _USER.sub("//", text)


def reason_of(error: Exception) -> str:
    """What a client of a storage, or the system, has raised, in one line."""
    if isinstance(error, OSError) and error.errno:
        return of_file(error)
    return f"{type(error).__name__}: {first_line(str(error)) or 'no reason given'}"


class Remote:
    """A folder of checkpoints on ``filesystem``, an fsspec file system."""

    def __init__(self, filesystem: Any, base: str) -> None:
        self._files, self._base = filesystem, base.rstrip("/")
        protocols = filesystem.protocol
        self._is_folder = "file" in ((protocols,) if isinstance(protocols, str) else protocols)

    @classmethod
    def open(cls, url: str) -> Remote:
        """The folder at ``url``, for instance s3://bucket/run. Raises RemoteError."""
        try:
            from fsspec.core import url_to_fs

            return cls(*url_to_fs(url))
        except (ImportError, ValueError) as error:
            raise RemoteError(without_user(f"{url} cannot be used: {error}")) from error

    def steps(self) -> list[int]:
        """Steps of the checkpoints there, oldest first. Raises OSError or what the client raises."""
        self._files.invalidate_cache()
        found = []
        with suppress(FileNotFoundError):
            for path in self._files.ls(self._base, detail=False):
                step = step_of(path.rstrip("/").rpartition("/")[2])
                if step is not None and self._files.exists(f"{path.rstrip('/')}/{MANIFEST}"):
                    found.append(step)
        return sorted(found)

    def upload(self, folder: Path) -> None:
        """Copy the checkpoint in ``folder``, read it back and compare; the manifest, which makes it exist, comes last.

        Raises CheckpointError if what was read back differs, OSError or what the client raises if the transfer fails.
        """
        manifest = read(folder)
        target = f"{self._base}/{folder.name}"
        self._make_folder(target)
        for entry in manifest.files:
            self._put(folder / entry.name, f"{target}/{entry.name}")
            if self._checksum(f"{target}/{entry.name}") != entry.checksum:
                raise CheckpointError(f"{target}/{entry.name} is not what was uploaded", entry.name)
        content = encode(replace(manifest, tier="remote"))
        if self._is_folder:
            durable.replace(Path(target, MANIFEST), content)
        else:
            self._files.pipe_file(f"{target}/{MANIFEST}", content)

    def _make_folder(self, path: str) -> None:
        if self._is_folder:
            durable.make_folder(Path(path))
        else:
            self._files.makedirs(path, exist_ok=True)

    def _put(self, source: Path, path: str) -> None:
        """Copy a file, which appears as a whole. Storage of objects does that itself, a folder does not."""
        if self._is_folder:
            with open(source, "rb") as origin, durable.replacing(Path(path)) as file:
                shutil.copyfileobj(origin, file, _BLOCK)
        else:
            self._files.put_file(str(source), path)

    def fetch(self, step: int, root: Path) -> Manifest:
        """Copy the checkpoint of ``step`` to ``root``, where it exists once its files match their checksums.

        Intact files that are already there stay; a damaged one is renamed to ``….rejected``, for the post-mortem.
        Raises CheckpointError if a file does not match, OSError or what the client raises if the transfer fails.
        """
        folder = folder_of(root, step)
        durable.make_folder(folder)
        source = f"{self._base}/{folder.name}"
        manifest = self._manifest(f"{source}/{MANIFEST}", step)
        total, done = sum(entry.size for entry in manifest.files), 0
        with shown(f"fetching the checkpoint of step {step}") as look:
            for entry in manifest.files:
                if not _is_whole(folder / entry.name, entry):
                    self._fetch_file(f"{source}/{entry.name}", folder / entry.name, entry)
                done += entry.size
                look(done, total)
        sync_folder(folder)
        commit(folder, manifest)
        return manifest

    def _manifest(self, place: str, step: int) -> Manifest:
        try:
            with self._files.open(place, "rb") as file:
                content = file.read(MAX_BYTES + 1)
        except (FileNotFoundError, IsADirectoryError) as error:
            raise CheckpointError(f"{place} is missing", MANIFEST) from error
        if len(content) > MAX_BYTES:
            raise CheckpointError(f"{place} has more than {MAX_BYTES} bytes", MANIFEST)
        return decode(content, place, step)

    def _fetch_file(self, source: str, path: Path, entry: FileEntry) -> None:
        draft = path.with_name(f".{path.name}.fetched{durable.DRAFT}")
        try:
            self._files.get_file(source, str(draft))
        except (FileNotFoundError, IsADirectoryError) as error:
            raise CheckpointError(f"{source} is missing", entry.name) from error
        if not _is_whole(draft, entry):
            draft.unlink()
            raise CheckpointError(f"{source} does not match its checksum", entry.name)
        with open(draft, "rb") as file:
            os.fsync(file.fileno())
        if path.exists():
            durable.rename(path, path.with_name(f"{path.name}.rejected"))
        durable.rename(draft, path)

    def _checksum(self, path: str) -> str:
        digest = xxhash.xxh3_128()
        with self._files.open(path, "rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
        return f"xxh3_128:{digest.hexdigest()}"


def _is_whole(path: Path, entry: FileEntry) -> bool:
    try:
        return path.stat().st_size == entry.size and checksum(path) == entry.checksum
    except OSError:
        return False


def upload_waiting(root: Path, remote: Remote) -> Iterator[int]:
    """Upload the checkpoints under ``root`` that wait for it; yields each step once it is verified.

    A failure does not keep the others from being uploaded; the last one is raised at the end.
    """
    failure: Exception | None = None
    for step in steps(root):
        waiting = folder_of(root, step) / AWAITING
        if is_there(waiting.parent, AWAITING):
            try:
                remote.upload(waiting.parent)
                waiting.unlink(missing_ok=True)
            except (CheckpointError, OSError) as error:
                failure = error
            else:
                yield step
    if failure is not None:
        raise failure


def fetch_newer(root: Path, remote: Remote, step: int) -> int | None:
    """Fetch the newest intact checkpoint that is later than ``step``; None if there is none."""
    error: CheckpointError | None = None
    for candidate in reversed([found for found in remote.steps() if found > step]):
        try:
            return remote.fetch(candidate, root).step
        except CheckpointError as damaged:
            error = damaged
    if error is not None:
        raise error
    return None


def main(arguments: list[str]) -> int:
    """Do one transfer; errors are recorded as events of the rank whose page is in OPSD_RANK_PAGE."""
    verb, root, *rest = arguments
    url = os.environ[URL]
    limit_s = int(os.environ.get("OPSD_TRANSFER_LIMIT_S", LIMIT_S))
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(limit_s)
    page = os.environ.get("OPSD_RANK_PAGE")
    began = time.monotonic()
    try:
        remote = Remote.open(url)
        if verb == "upload":
            done = upload_waiting(Path(root), remote)
        else:
            fetched = fetch_newer(Path(root), remote, int(rest[0]))
            done = iter([] if fetched is None else [fetched])
        for step in done:
            print(step, flush=True)
            if page:
                seconds, place = time.monotonic() - began, without_user(url)
                fields = CheckpointUploaded(step=step, url=place, seconds=seconds)
                append_event(Path(page), f"checkpoint_{verb}ed", **fields)
            began = time.monotonic()
    except Exception as error:  # clients of object storages raise what they like
        why = without_user(f"{url}: {reason_of(error)}")
        fix = remedy(error) if isinstance(error, OSError) else ""
        again = "; the next start of the run tries again" if verb == "upload" else ""
        print(f"opsd: {why}{fix}{again}", file=sys.stderr)
        if page:
            append_event(Path(page), f"checkpoint_{verb}_failed", **CheckpointUploadFailed(why=why))
        return 1
    return 0


class StorageTimeout(Exception):
    """The time limit is exceeded; not an OSError, after which other checkpoints would be tried."""


def _too_long(*_: object) -> None:
    raise StorageTimeout("the storage did not answer in time")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
