"""Where shards come from: a folder, or any URL that fsspec supports."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO, Protocol

from opsd import pip_install


class StorageError(Exception):
    """The storage cannot be used or lacks a file; the message is one sentence."""


class AbsentError(StorageError):
    """There is no such file."""


class Storage(Protocol):
    """Files by their path relative to the root. Methods raise StorageError; ``open`` raises AbsentError for no file."""

    def folders(self) -> list[str]:
        """The folders right under the root."""

    def open(self, path: str, offset: int = 0) -> BinaryIO:
        """The file at ``path``, opened at byte ``offset``. The caller closes it."""


def open_storage(source: str) -> Storage:
    """The storage at the folder or URL ``source``. Raises StorageError."""
    if "://" not in source:
        return Folder(Path(source))
    try:
        from fsspec.core import url_to_fs

        return Url(*url_to_fs(source))
    except (ImportError, ValueError) as error:
        raise StorageError(f"{source} cannot be used: {error}; {pip_install('storage')}") from error


class Folder:
    """A folder, for instance on a shared file system."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def folders(self) -> list[str]:
        try:
            return sorted(path.name for path in self._root.iterdir() if path.is_dir())
        except OSError as error:
            raise StorageError(f"{self._root} cannot be read: {error.strerror}") from error

    def open(self, path: str, offset: int = 0) -> BinaryIO:
        try:
            file = open(self._root / path, "rb")  # noqa: SIM115 # the caller closes it
            file.seek(offset)
        except OSError as error:
            kind = AbsentError if isinstance(error, FileNotFoundError) else StorageError
            raise kind(f"{self._root / path} cannot be read: {error.strerror}") from error
        return file


class Url:
    """A folder of an fsspec file system: object storage, or a web server, for instance on another node."""

    def __init__(self, filesystem: Any, base: str) -> None:
        self._files, self._base = filesystem, base.rstrip("/")
        # Simple web servers such as Python's have no range requests: files are read as a stream.
        self._options = {"block_size": 0} if "http" in filesystem.protocol else {}

    def folders(self) -> list[str]:
        try:
            found = self._files.ls(self._base, detail=True)
        except Exception as error:  # clients of object storages raise arbitrary exceptions
            raise StorageError(f"{self._base} cannot be listed: {_said(error)}") from error
        return sorted(str(e["name"]).rstrip("/").rpartition("/")[2] for e in found if e["type"] == "directory")

    def open(self, path: str, offset: int = 0) -> BinaryIO:
        try:
            file: BinaryIO = self._files.open(f"{self._base}/{path}", "rb", **self._options)
            _go_to(file, offset)
        except Exception as error:  # clients of object storages raise arbitrary exceptions
            kind = AbsentError if isinstance(error, FileNotFoundError) else StorageError
            raise kind(f"{self._base}/{path} cannot be read: {_said(error)}") from error
        return file


def _go_to(file: BinaryIO, offset: int) -> None:
    """Move ``file`` to ``offset``; a stream is read up to there."""
    try:
        file.seek(offset)
    except ValueError:
        while offset > 0 and (block := file.read(min(offset, 1 << 20))):
            offset -= len(block)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error) or 'no reason given'}".splitlines()[0]
