"""Which generation of a run may write: claims in the run's folder, which all nodes share. Standard library only.

``generations/000013.json`` says who has begun generation 13. A claim is made by a hard link, with which of several
claimants on a shared file system exactly one succeeds (link(2); also over NFS). Ranks of a generation may not commit
checkpoints once a higher number has been claimed: what a node that was cut off still runs cannot get in the way of
those who went on without it, nor can a second copy of the run. Only a launcher without fellows lets what its earlier
ranks still save be completed: it knows that nothing else is left of them.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

FOLDER = "generations"
START = "start"
"""In the owner of a claim: what all launchers of one start of the run have in common, and no other copy of it."""
LAUNCHER = "launcher"
"""In the owner of a claim: the launcher that makes all claims of its run, where it has no fellows."""
KEPT = 100
"""Claims that are kept for whoever looks into a run afterwards; of use is only the newest."""
EXIT_FENCED = 76
"""What a rank ends with that finds its generation superseded when it starts."""


class LeaseError(OSError):
    """The claims cannot be read or written; ``strerror`` is one sentence."""


class Fenced(LeaseError):
    """A later generation of the run has begun elsewhere; this one may not write any more."""


def claim(folder: Path, number: int, owner: Mapping[str, str]) -> bool:
    """Claim generation ``number`` of the run in ``folder`` for ``owner``; True if it is theirs, also from before.

    False if somebody else has it, or a later one. Raises LeaseError.
    """
    claims = folder / FOLDER
    with _explained(claims, f"generation {number} cannot be claimed"):
        claims.mkdir(parents=True, exist_ok=True)
        target, draft = claims / f"{number:06d}.json", _draft(claims)
        try:
            draft.write_text(json.dumps({**owner, "number": number, "time": time.time()}) + "\n", encoding="utf-8")
            _link(draft, target)
        finally:
            draft.unlink(missing_ok=True)
        mine = max(_claims(claims)) == number and _owner(target) == dict(owner)
    if mine:
        _forget(claims, number)
    return mine


def newest(folder: Path) -> int:
    """The highest number that has been claimed, 0 if none. Raises LeaseError."""
    with _explained(folder / FOLDER, "the generations of the run cannot be read"):
        return max(_claims(folder / FOLDER), default=0)


def overtaken(folder: Path, start: str) -> bool:
    """Whether the newest generation of the run in ``folder`` belongs to another start of it. Raises LeaseError."""
    claims = folder / FOLDER
    with _explained(claims, "the generations of the run cannot be read"):
        if not claims.is_dir():
            return False
        _see_anew(claims)
        found = _claims(claims)
        owner = _owner(found[max(found)]) if found else None
    return owner is not None and owner.get(START, start) != start


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
        """Raises Fenced if a later generation has been claimed, LeaseError if that cannot be seen."""
        claims = self.folder / FOLDER
        with _explained(claims, f"whether generation {self.number} may write cannot be seen"):
            if not claims.is_dir():
                return
            _see_anew(claims)
            found = _claims(claims)
            later = max(found, default=0)
            overtaken = later > self.number and not _by_one_launcher(found, self.number, later)
        if overtaken:
            why = f"generation {later} of the run has begun elsewhere; generation {self.number} may not write any more"
            raise Fenced(errno.EPERM, why)

    def shuts_out_saves(self) -> bool:
        """Whether what earlier generations still save cannot be completed. Raises LeaseError."""
        claims = self.folder / FOLDER
        with _explained(claims, "the generations of the run cannot be read"):
            found = _claims(claims)
        return bool(found) and not _by_one_launcher(found, self.number)


@contextmanager
def _explained(claims: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LeaseError(error.errno, f"{what} in {claims}: {error.strerror}") from error


def _link(draft: Path, target: Path) -> None:
    try:
        with suppress(FileExistsError):
            os.link(draft, target)
    except OSError:
        # Over NFS the answer to a link that was made may be lost; the number of links tells (open(2), O_EXCL).
        if draft.stat().st_nlink != 2:
            raise


def _see_anew(claims: Path) -> None:
    """Have an NFS client fetch the folder's list again, which it may keep for a minute unless it changes it itself."""
    draft = _draft(claims)
    draft.touch()
    draft.unlink()


def _draft(claims: Path) -> Path:
    return claims / f".{os.uname().nodename}.{secrets.token_hex(4)}"


def _claims(claims: Path) -> dict[int, Path]:
    try:
        found = list(claims.iterdir())
    except FileNotFoundError:
        return {}
    return {int(path.stem): path for path in found if path.suffix == ".json" and path.stem.isdecimal()}


def _owner(path: Path) -> dict[str, str] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return {key: value for key, value in found.items() if key not in ("number", "time")}


def _by_one_launcher(claims: Mapping[int, Path], *numbers: int) -> bool:
    """Whether a launcher without fellows has made all these claims."""
    first, *others = (_owner(claims[number]) if number in claims else None for number in numbers)
    return first is not None and LAUNCHER in first and all(other == first for other in others)


def _forget(claims: Path, number: int) -> None:
    """Remove the claims that are of no use any more."""
    with suppress(OSError):
        for old, path in _claims(claims).items():
            if old <= number - KEPT:
                path.unlink(missing_ok=True)
