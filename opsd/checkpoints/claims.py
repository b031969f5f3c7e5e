"""Which generation of a run may write, and who decided it: claims in the run's folder, which all nodes share.

``generations/000013.json`` is the claim of generation 13: its number, its maker, the start of the run it is for, and
the plan. It is written completely and durably under another name and then put in place by an operation with which
exactly one of several claimants succeeds: link(2), or rename(2) of a folder if the file system has no links. Nothing
else decides about a run. A generation holds until a higher number is claimed; a plan with an ``end`` ends the run.
docs/shared-folder.md lists the file systems on which this was tested. Standard library only.

``generations/lease`` is rewritten once a second by the leader of the newest generation. It proves nothing; it shows
launchers that cannot reach the leader that it is alive, and saves them from reading the folder.

Creating a file such that exactly one of several processes succeeds, on any file system.

The content is written durably under another name and then linked to the target, link(2), which fails if the target
exists. Without links, a folder with the content in it is renamed to the target. rename(2) fails if the target is a file
or a folder that is not empty, so both ways exclude each other.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from opsd.checkpoints.sealed import CHECKSUM, Damaged, parse, read_regular, seal, unseal
from opsd.durable import FORGOTTEN_S, NO_LINKS, Link, linked, make_folder, sync_folder, write
from opsd.exitcodes import is_full

CONTENT = "claim.json"
"""The file in a target that is a folder."""
_DRAFT = re.compile(r"\..+\.[0-9a-f]{16}")
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
"""Errors of renaming a folder to an existing target (rename(2))."""


def tried(target: Path, link: Link = os.link) -> str:
    """Which way excludes a second creation of ``target``: "link", "rename", or "" if neither does.

    ``target`` does not exist before and after. Raises OSError.
    """
    drafts = [draft_in(target.parent), draft_in(target.parent)]
    try:
        for draft in drafts:
            write(draft, b"{}\n")
        made = [linked(draft, target, link) for draft in drafts]
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        made = []
    finally:
        for path in (*drafts, target):
            path.unlink(missing_ok=True)
    if made == [True, False]:
        return "link"
    try:
        return "rename" if _put_folder(b"{}\n", target) and not _put_folder(b"{}\n", target) else ""
    finally:
        remove_folder(target)


def put(content: bytes, target: Path, link: Link = os.link) -> bool:
    """Create ``target`` durably; False if it existed. Raises OSError if the result is unknown."""
    draft = draft_in(target.parent)
    try:
        write(draft, content)
        done = linked(draft, target, link)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        done = _put_folder(content, target)
    finally:
        draft.unlink(missing_ok=True)
    _remove_forgotten(target)
    sync_folder(target.parent)
    return done


def _remove_forgotten(target: Path) -> None:
    """Remove drafts beside ``target`` that were not removed at the time, as far as possible."""
    with suppress(OSError), os.scandir(target.parent) as entries:
        now = target.lstat().st_mtime
        for entry in entries:
            is_draft = _DRAFT.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
            if is_draft and now - entry.stat(follow_symlinks=False).st_mtime > FORGOTTEN_S:
                Path(entry.path).unlink()


def draft_in(folder: Path) -> Path:
    """An unused name in ``folder``."""
    return folder / f".{os.uname().nodename}.{secrets.token_hex(8)}"


def remove_folder(folder: Path) -> None:
    """Remove a target that is a folder. Raises OSError, also if something else is in it."""
    with suppress(FileNotFoundError, NotADirectoryError):
        (folder / CONTENT).unlink(missing_ok=True)
        folder.rmdir()


def _put_folder(content: bytes, target: Path) -> bool:
    draft = target.with_name(f"{draft_in(target.parent).name}.d")
    draft.mkdir()
    try:
        write(draft / CONTENT, content)
        sync_folder(draft)
        draft.rename(target)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
        return False
    finally:
        remove_folder(draft)
    return True


FOLDER = "generations"
LEASE = "lease"
KEPT = 100
"""Claims kept for a post-mortem; only the newest is in use."""
EXIT_FENCED = 76
"""Exit code of a rank whose generation is superseded when it starts."""
MAX_BYTES = 8 << 20
"""A claim of 10,000 launchers has about one million."""
_ROOMS, _ROOM_BYTES = tuple(f".room-{number}" for number in range(6)), 128 << 10
"""Files that hold space, and inodes, for the claims of a run whose disk or quota becomes full: one or more a claim."""
_NO_WRITING = (errno.EROFS, errno.EACCES, errno.EPERM)
"""Errors for a user who may read and not write; a full disk is another one."""
_POLL_S = 1.0


class ClaimError(OSError):
    """The claims cannot be read or written; ``strerror`` is one sentence."""


class Fenced(ClaimError):
    """A later generation of the run has begun elsewhere; this one may not write any more."""


@dataclass(frozen=True, slots=True)
class End:
    """The end of a run: the exit code of its launchers, and the reason in one sentence."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class Claim:
    """Generation ``number``, made by the process ``launcher`` for one ``start`` of the run.

    ``start`` is what the launchers of one start have in common and no other copy of the run (see
    ``opsd.launch.run.launchers.start_of``); ``launcher`` names the node and the process. ``alone`` is the launcher of a
    run on one node: what its earlier generations still save may be completed, since nothing else is left of them.
    ``keeps`` is the generation whose ranks run on under this claim, or may still save after the end; 0 if none do.
    ``time`` is when it was made, seconds since 1970. A claim that was changed after it was made has no ``start`` and no
    ``launcher``, and its number counts all the same.
    """

    number: int
    start: str
    launcher: str
    alone: bool = False
    plan: Mapping[str, Any] = field(default_factory=dict)
    time: float = 0.0
    keeps: int = 0

    @property
    def end(self) -> End | None:
        """The end of the run, None while it goes on."""
        match self.plan.get("end"):
            case {"code": int(code), "reason": str(reason)}:
                return End(code, reason)
        return None


def try_primitive(folder: Path, link: Link = os.link) -> str:
    """How claims are made in ``folder``: "link", else "rename". Raises ClaimError if neither is exclusive."""
    claims = folder / FOLDER
    with _explained(claims, "claims cannot be made"):
        _make(claims)
        if primitive := tried(draft_in(claims), link):
            return primitive
    raise ClaimError(errno.ENOTSUP, f"{claims} is on a file system on which two can claim the same; choose --run-dir")


def create(folder: Path, claim: Claim, link: Link = os.link) -> bool:
    """Make ``claim``; True if it holds, also if it was made before with the same plan.

    False if another claim has the number, or a later one. Raises ClaimError if the result is unknown: the claim may
    have been made, and is then found by ``newest``. ``link`` makes a hard link.
    """
    claims = folder / FOLDER
    with _explained(claims, f"generation {claim.number} cannot be claimed"):
        _make(claims)
        content = _encode(claim)
        while True:
            try:
                put(content, claims / _name(claim.number), link)
                break
            except OSError as error:
                if not is_full(error.errno) or not _give_room(claims):
                    raise
        found = _claims(claims)
        if max(found, default=0) != claim.number:
            return False
        mine = _same(_read(found[claim.number]), _decode(content, claim.number))
    if mine:
        _forget(claims, claim.number)
        _keep_room(claims)
    return mine


def _keep_room(claims: Path) -> None:
    """Reserve space for the next claims: the end of a run whose last checkpoint has filled the disk, for instance.

    What is given back for one may be gone at once, as other files are written too.
    """
    for name in sorted(set(_ROOMS).difference(path.name for path in claims.iterdir())):
        try:
            with open(claims / name, "xb") as file:
                os.posix_fallocate(file.fileno(), 0, _ROOM_BYTES)
        except FileExistsError:
            continue
        except OSError:
            with suppress(OSError):
                (claims / name).unlink()
            return


def _give_room(claims: Path) -> bool:
    """Free a part of the reserved space; returns whether there was any."""
    for name in _ROOMS:
        with suppress(FileNotFoundError):
            (claims / name).unlink()
            return True
    return False


def newest(folder: Path) -> Claim | None:
    """The claim that holds, None without one. Raises ClaimError."""
    found = newest_unless(folder, None)
    return found.claim if found is not None else None


@dataclass(frozen=True, slots=True)
class Found:
    """A claim that was read, and the inode, size and modification time of its file.

    A claim that its maker sent has none yet, and matches any file with its number.
    """

    claim: Claim
    file: tuple[int, int, int] | None


def newest_unless(folder: Path, before: Found | None) -> Found | None:
    """The claim that holds, None without one; the one found ``before`` is not read again if it is unchanged.

    This saves the file server hundreds of kilobytes per read from each of a thousand launchers. Raises ClaimError.
    """
    claims = folder / FOLDER
    with _explained(claims, "the generations of the run cannot be read"):
        while found := _look(claims):
            number = max(found)
            with suppress(FileNotFoundError):  # so many have been claimed since that this one was removed
                status = found[number].lstat()
                file = (status.st_ino, status.st_size, status.st_mtime_ns)
                known = before is not None and before.claim.number == number and before.file in (file, None)
                # What is in a folder may change without it.
                if before is not None and known and stat.S_ISREG(status.st_mode):
                    return before if before.file else replace(before, file=file)
                return Found(_read(found[number]), file)
        return None


def newest_number(folder: Path) -> int:
    """The highest number claimed, 0 without any. Raises ClaimError."""
    with _explained(folder / FOLDER, "the generations of the run cannot be read"):
        return max(_look(folder / FOLDER), default=0)


def renew(folder: Path, number: int, beat: int) -> None:
    """Show that generation ``number`` is led; ``beat`` differs each time. Raises ClaimError.

    Written in place: a reader that opens the file sees what was there when it was last closed, over NFS too.
    """
    path = folder / FOLDER / LEASE
    with _explained(path, "the lease cannot be renewed"):
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o644)
        try:
            os.pwrite(descriptor, f'{{"number": {number:9d}, "beat": {beat:20d}}}\n'.encode(), 0)
        finally:
            os.close(descriptor)


def lease(folder: Path) -> tuple[int, int]:
    """The number and beat last written, (0, 0) without any. Raises ClaimError."""
    path = folder / FOLDER / LEASE
    with _explained(path, "the lease cannot be read"):
        try:
            raw = parse(read_regular(path, 4096))
            return int(raw["number"]), int(raw["beat"])
        except (FileNotFoundError, ValueError, KeyError, TypeError, OverflowError):
            return 0, 0


@dataclass(frozen=True, slots=True)
class Fence:
    """The right of generation ``number`` to write into the run's ``folder``."""

    folder: Path
    number: int

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Fence | None:
        """The fence of a rank of ``opsd launch``, None for a process started otherwise."""
        folder, number = environ.get("OPSD_RUN_DIR", ""), environ.get("OPSD_GENERATION", "")
        return cls(Path(folder), int(number)) if folder and number.isdecimal() else None

    def check(self, patience_s: float = 0.0) -> None:
        """Raises Fenced if a later generation was claimed, ClaimError if that is unknown for ``patience_s`` seconds.

        A file server that restarts answers with errors for a while (ESTALE, EIO), and blocks or is away for longer.
        """
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return self._check()
            except Fenced:
                raise
            except ClaimError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(min(_POLL_S, patience_s))

    def _check(self) -> None:
        claims = self.folder / FOLDER
        with _explained(claims, f"whether generation {self.number} may write cannot be seen"):
            found = _look(claims, must_be_new=True)
            later = max(found, default=0)
            overtaken = later > self.number and not self._goes_on(found, later)
        if overtaken:
            why = f"generation {later} of the run has begun elsewhere; generation {self.number} may not write any more"
            raise Fenced(errno.EPERM, why)

    def _goes_on(self, found: Mapping[int, Path], later: int) -> bool:
        """Whether the newest claim lets this generation go on writing."""
        return 0 < _read(found[later]).keeps == self.number or _by_one_launcher(found, self.number)

    def shuts_out_saves(self) -> bool:
        """Whether what earlier generations still save cannot be completed. Raises ClaimError."""
        claims = self.folder / FOLDER
        with _explained(claims, "the generations of the run cannot be read"):
            found = _claims(claims)
            return bool(found) and not _by_one_launcher(found, self.number)


@contextmanager
def _explained(claims: Path, what: str) -> Iterator[None]:
    try:
        yield
    except ClaimError:
        raise
    except OSError as error:
        raise ClaimError(error.errno, f"{what} in {claims}: {error.strerror}") from error


def _encode(claim: Claim) -> bytes:
    raw = {
        "number": claim.number, "start": claim.start, "launcher": claim.launcher, "alone": claim.alone,
        "keeps": claim.keeps, "time": claim.time or time.time(), "plan": dict(claim.plan),
    }  # fmt: skip
    return (json.dumps(seal(raw)) + "\n").encode()


def _decode(content: bytes, number: int) -> Claim:
    """Raises Damaged."""
    raw = parse(content)
    if "plan" in raw or CHECKSUM in raw:
        raw = unseal(raw)
    else:  # of a launcher that wrote no plans: it named itself in its claims if it was the only one
        raw = {"start": "", "launcher": "", "plan": {}} | raw | {"alone": bool(raw.get("launcher"))}
    at, keeps = raw.get("time"), raw.get("keeps", 0)
    match raw:
        case {"number": int(found), "start": str(start), "launcher": str(launcher), "plan": dict(plan)} if (
            found == number and isinstance(at, int | float) and math.isfinite(at) and isinstance(keeps, int)
        ):
            return Claim(number, start, launcher, raw.get("alone") is True, plan, float(at), keeps)
    raise Damaged("is no claim")


def _read(path: Path) -> Claim:
    """A claim, or its number alone if it is damaged. Raises OSError."""
    number = int(path.stem)
    try:
        return _decode(_content(path), number)
    except Damaged:
        # Claims are whole before they are in place: this one was changed since. Its number still counts.
        return Claim(number, "", "")


def _content(path: Path) -> bytes:
    """Raises Damaged, OSError."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        return read_regular(path, MAX_BYTES)
    try:
        return read_regular(CONTENT, MAX_BYTES, folder)
    except FileNotFoundError:
        raise Damaged("is an empty folder") from None
    finally:
        os.close(folder)


def _same(one: Claim, other: Claim) -> bool:
    """Whether both are the same claim; made twice, it has two times."""
    return replace(one, time=0.0) == replace(other, time=0.0)


def _make(claims: Path) -> None:
    if not claims.is_dir():
        make_folder(claims)


def _look(claims: Path, *, must_be_new: bool = False) -> dict[int, Path]:
    """The claims as they are now. Raises OSError.

    An NFS client may cache a folder's list, and that a folder does not exist, for a minute, unless it changes them
    itself. A user who may not do that (full disk, a folder of another user) gets what opening the folder shows, which
    all mounts but those with ``nocto`` fetch from the server, unless it ``must_be_new``.
    """
    draft = draft_in(claims)
    try:
        try:
            draft.touch()
        except FileNotFoundError:
            if not claims.parent.is_dir():
                return {}
            make_folder(claims)
            draft.touch()
        draft.unlink()
    except OSError as error:
        if must_be_new or not (error.errno in _NO_WRITING or is_full(error.errno)):
            raise
    return _claims(claims)


def _name(number: int) -> str:
    return f"{number:06d}.json"


def _claims(claims: Path) -> dict[int, Path]:
    try:
        found = list(claims.iterdir())
    except FileNotFoundError:
        return {}
    numbered = {int(path.stem): path for path in found if path.suffix == ".json" and path.stem.isdecimal()}
    return {number: path for number, path in numbered.items() if number and path.name == _name(number)}


def _by_one_launcher(claims: Mapping[int, Path], number: int) -> bool:
    """Whether the only launcher of the run has made the claim ``number`` and all later ones."""
    try:
        first = _read(claims[number])
        rest = [_read(path) for later, path in claims.items() if later > number]
    except (KeyError, FileNotFoundError):
        return False
    return first.alone and bool(first.launcher) and all(c.alone and c.launcher == first.launcher for c in rest)


def _forget(claims: Path, number: int) -> None:
    """Remove old claims."""
    with suppress(OSError):
        for old, path in _claims(claims).items():
            if old <= number - KEPT:
                with suppress(OSError):
                    try:
                        path.unlink()
                    except (IsADirectoryError, PermissionError):  # unlink(2) of a folder says either
                        remove_folder(path)
