"""Which generation of a run may write, and who said so: claims in the run's folder, which all nodes share.

``generations/000013.json`` is the claim of generation 13: its number, who made it, for which start of the run, and the
plan of what runs in it. It is made whole and durable beside its place and then put there by an operation that exactly
one of several claimants can succeed with, link(2), or rename(2) of a folder where a file system knows no links. Nothing
else decides about a run. A generation holds until a higher number is claimed; a plan with an ``end`` is the run's last
word. Standard library only.

``generations/lease`` is written anew once a second by the launcher that leads the newest generation. It proves
nothing; it tells those who cannot reach that launcher that somebody goes on, and spares them from reading the folder.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = "generations"
LEASE = "lease"
KEPT = 100
"""Claims that are kept for whoever looks into a run afterwards; of use is only the newest."""
EXIT_FENCED = 76
"""What a rank ends with that finds its generation superseded when it starts."""
MAX_BYTES = 8 << 20
"""A claim of 10,000 launchers has about one."""


class ClaimError(OSError):
    """The claims cannot be read or written; ``strerror`` is one sentence."""


class Fenced(ClaimError):
    """A later generation of the run has begun elsewhere; this one may not write any more."""


@dataclass(frozen=True, slots=True)
class End:
    """How a run has ended: the exit code of its launchers, and why in one sentence."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class Claim:
    """Generation ``number``, made by the process ``launcher`` for one ``start`` of the run.

    ``start`` is what the launchers of one start have in common and no other copy of the run (see
    ``opsd.launch.run.fellows.start_of``); ``launcher`` names the node and the process. ``alone`` is the launcher of a
    run on one node: what its earlier generations still save may be completed, since nothing else is left of them.
    ``keeps`` is the generation whose ranks run on under this claim, or may still save after the end; 0 if none do.
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
        """The run's last word, None while it goes on."""
        end = self.plan.get("end")
        return End(int(end["code"]), str(end["reason"])) if isinstance(end, Mapping) else None


def try_primitive(folder: Path) -> str:
    """How claims are made in ``folder``: "link", else "rename". Raises ClaimError if neither excludes a second."""
    claims = folder / FOLDER
    with _explained(claims, "claims cannot be made"):
        claims.mkdir(parents=True, exist_ok=True)
        target, drafts = _draft(claims), []
        try:
            for _ in range(2):
                drafts.append(_draft(claims))
                _write(drafts[-1], b"{}\n")
            if _link(drafts[0], target):
                if _link(drafts[1], target):
                    raise ClaimError(errno.ENOTSUP, "two links to one name succeed")
                return "link"
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                raise
        finally:
            for path in (*drafts, target):
                path.unlink(missing_ok=True)
        if _put_folder(b"{}\n", target) and not _put_folder(b"{}\n", target):
            _remove(target)
            return "rename"
    raise ClaimError(errno.ENOTSUP, f"{claims} is on a file system on which two can claim the same; choose --run-dir")


def create(folder: Path, claim: Claim) -> bool:
    """Make ``claim``; True if it is this one that holds, also if it was made before.

    False if somebody else has the number, or a later one. Raises ClaimError if that is not known: the claim may have
    been made all the same, and is found by ``newest`` then.
    """
    claims = folder / FOLDER
    with _explained(claims, f"generation {claim.number} cannot be claimed"):
        claims.mkdir(parents=True, exist_ok=True)
        target = claims / f"{claim.number:06d}.json"
        content = _encode(claim)
        draft = _draft(claims)
        try:
            _write(draft, content)
            _link(draft, target)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                raise
            _put_folder(content, target)
        finally:
            draft.unlink(missing_ok=True)
        _sync(claims)
        found = _claims(claims)
        holder = _read(found[claim.number]) if claim.number in found else None
        mine = max(found) == claim.number and holder is not None and holder.launcher == claim.launcher
    if mine:
        _forget(claims, claim.number)
    return mine


def newest(folder: Path) -> Claim | None:
    """The claim that holds, None without any. Raises ClaimError, also for one that cannot be understood."""
    claims = folder / FOLDER
    with _explained(claims, "the generations of the run cannot be read"):
        if not claims.is_dir():
            return None
        _see_anew(claims)
        found = _claims(claims)
        return _read(found[max(found)]) if found else None


def newest_number(folder: Path) -> int:
    """The highest number that has been claimed, 0 without any. Raises ClaimError."""
    with _explained(folder / FOLDER, "the generations of the run cannot be read"):
        return max(_claims(folder / FOLDER), default=0)


def renew(folder: Path, number: int, beat: int) -> None:
    """Let it be seen that generation ``number`` is led; ``beat`` is another one each time. Raises ClaimError.

    Written in place: a reader who opens the file sees what was there when it was last closed, over NFS too.
    """
    path = folder / FOLDER / LEASE
    with _explained(path, "the lease cannot be renewed"):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.pwrite(descriptor, f'{{"number": {number:9d}, "beat": {beat:20d}}}\n'.encode(), 0)
        finally:
            os.close(descriptor)


def lease(folder: Path) -> tuple[int, int]:
    """The number and the beat that were last written, (0, 0) if none were. Raises ClaimError."""
    path = folder / FOLDER / LEASE
    with _explained(path, "the lease cannot be read"):
        try:
            raw = json.loads(path.read_bytes())
            return int(raw["number"]), int(raw["beat"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return 0, 0


@dataclass(frozen=True, slots=True)
class Fence:
    """The right of generation ``number`` to write into the run's ``folder``."""

    folder: Path
    number: int

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Fence | None:
        """The fence of a rank of ``opsd launch``, None for one that was started otherwise."""
        folder, number = environ.get("OPSD_RUN_DIR", ""), environ.get("OPSD_GENERATION", "")
        return cls(Path(folder), int(number)) if folder and number.isdecimal() else None

    def check(self) -> None:
        """Raises Fenced if a later generation has been claimed, ClaimError if that cannot be seen."""
        claims = self.folder / FOLDER
        with _explained(claims, f"whether generation {self.number} may write cannot be seen"):
            if not claims.is_dir():
                return
            _see_anew(claims)
            found = _claims(claims)
            later = max(found, default=0)
            overtaken = later > self.number and not self._goes_on(found, later)
        if overtaken:
            why = f"generation {later} of the run has begun elsewhere; generation {self.number} may not write any more"
            raise Fenced(errno.EPERM, why)

    def _goes_on(self, found: Mapping[int, Path], later: int) -> bool:
        """Whether the newest claim leaves this generation its right to write."""
        return _read(found[later]).keeps == self.number or _by_one_launcher(found, self.number, later)

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
    return (json.dumps(raw) + "\n").encode()


def _read(path: Path) -> Claim:
    """A claim, or what is left of one. Raises OSError."""
    number = int(path.stem)
    inner = path / "claim.json"
    with open(inner if path.is_dir() else path, "rb") as file:
        text = file.read(MAX_BYTES)
    try:
        raw = json.loads(text)
        plan = raw.get("plan", {})
        if not isinstance(plan, dict):
            raise TypeError(plan)
        return Claim(
            number, str(raw.get("start", "")), str(raw.get("launcher", "")),
            raw.get("alone") is True, plan, float(raw.get("time", 0.0)), int(raw.get("keeps", 0)),
        )  # fmt: skip
    except (ValueError, TypeError, AttributeError, RecursionError):
        # Claims are whole before they are in place: this one was changed since. Its number still counts.
        return Claim(number, "", "")


def _write(path: Path, content: bytes) -> None:
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # some file systems know no fsync of folders
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _link(draft: Path, target: Path) -> bool:
    try:
        os.link(draft, target)
    except FileExistsError:
        # Over NFS the answer to a link that was made may be lost; the number of links tells (open(2), O_EXCL).
        return draft.stat().st_nlink == 2
    except OSError:
        if draft.stat().st_nlink != 2:
            raise
    return True


def _put_folder(content: bytes, target: Path) -> bool:
    """The same without links: a folder cannot be renamed to one that is not empty, nor to a file."""
    draft = target.with_name(f"{_draft(target.parent).name}.d")
    draft.mkdir()
    try:
        _write(draft / "claim.json", content)
        _sync(draft)
        draft.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        return False
    finally:
        _remove(draft)
    return True


def _remove(folder: Path) -> None:
    with suppress(FileNotFoundError):
        (folder / "claim.json").unlink(missing_ok=True)
        folder.rmdir()


def _see_anew(claims: Path) -> None:
    """Have an NFS client fetch the folder's list again, which it may keep for a minute unless it changes it itself."""
    draft = _draft(claims)
    try:
        draft.touch()
        draft.unlink()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):  # there claims cannot be made either
            raise


def _draft(claims: Path) -> Path:
    return claims / f".{os.uname().nodename}.{secrets.token_hex(8)}"


def _claims(claims: Path) -> dict[int, Path]:
    try:
        found = list(claims.iterdir())
    except FileNotFoundError:
        return {}
    return {int(path.stem): path for path in found if path.suffix == ".json" and path.stem.isdecimal()}


def _by_one_launcher(claims: Mapping[int, Path], *numbers: int) -> bool:
    """Whether a launcher without fellows has made all these claims."""
    try:
        made = [_read(claims[number]) for number in numbers]
    except (KeyError, FileNotFoundError):
        return False
    return all(claim.alone and claim.launcher and claim.launcher == made[0].launcher for claim in made)


def _forget(claims: Path, number: int) -> None:
    """Remove the claims that are of no use any more."""
    with suppress(OSError):
        for old, path in _claims(claims).items():
            if old <= number - KEPT:
                if path.is_dir():
                    _remove(path)
                else:
                    path.unlink(missing_ok=True)
