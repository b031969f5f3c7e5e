"""A node's history in its Slurm comment: when it was out of service and why, and whether it is ready as a spare.

Slurm forgets a node's reason when the node is resumed. The comment survives that, and a restart of slurmctld, and
``scontrol reconfigure`` (tested on 22.05). It can be set at run time, and sinfo shows it. Features would be reset by
each reconfigure, and newer releases parse ``Extra`` as a constraint. opsd owns the part in brackets only::

    rack 12 [opsd1 gpu_xid=1763705000-1763708600 ib_link=1763710000- tested=1763710900 spare=ready@1763711000]

``path=leaf7@1763710900`` is a measurement of the network between the node's own leaf switch and another. ``!`` at its
end means that the path was slow; the MB/s of the slowest exchange may follow (``!1200M``). ``?`` means that the
measurement could not be made. ``nvl=UUID.CLIQUE`` is the NVLink domain that the node shares.
``failed=1763705000,1763709000`` are jobs that failed on the node and ran without it, by Slurm's accounting.
``sacct=1763711000`` is when this node's agent last read that for all nodes. A ``?`` at its end means that it failed.
``anew=1763712000`` is when its hardware was replaced: what was before that says nothing of the node.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

KEPT_STAYS = 16
"""With 8 the faults of a lemon, four a month, no longer reach back over the three windows that it is judged by."""
NO_FAULTS: Final = frozenset({"maintenance", "manual"})
"""Kinds of stays out of service that people asked for."""
KEPT_PATHS = 4
MEGA: Final = 1e6
KEPT_FAILED = 8
KEPT_S = 90 * 86_400.0
_RECORD = re.compile(r"\s*\[opsd1( [^\[\]]*)?\]")
_AT: Final = r"\d{1,11}"
"""A moment in epoch seconds; longer numbers are none, and no clock could show them."""
_STAY = re.compile(rf"([\w.-]+)=({_AT})-({_AT})?")
_TESTED = re.compile(rf"tested=({_AT})")
_SPARE = re.compile(rf"spare=([\w,]+)@({_AT})")
_DOMAIN = re.compile(r"nvl=([\w-]+\.\d+)")
_PATH = re.compile(rf"path=([^\s\[\]@=]+)@({_AT})(?:([!?]?)|!(\d{{1,9}})M)")
_FAILED: Final = re.compile(rf"failed=({_AT}(?:,{_AT})*)")
_SACCT: Final = re.compile(rf"sacct=({_AT})(\??)")
_ANEW: Final = re.compile(rf"anew=({_AT})")
_MARKS: Final[dict[bool | None, str]] = {True: "", False: "!", None: "?"}


@dataclass(frozen=True, slots=True)
class Stay:
    """One period out of service, for an incident of ``kind``. Epoch seconds; ``back`` is None while it lasts."""

    kind: str
    out: float
    back: float | None = None


@dataclass(frozen=True, slots=True)
class Path:
    """The newest measurement of the way from this node's leaf switch to another: when, and whether it was well.

    ``passed`` is None if it could not be made. ``rate``, of its slowest exchange in bytes per second, is kept of a way
    that was not well, to the megabyte; 0 if it is not known.
    """

    leaf: str
    at: float
    passed: bool | None
    rate: float = 0.0


@dataclass(frozen=True, slots=True)
class Accounting:
    """When an agent last read Slurm's accounting for all nodes, epoch seconds, and whether it got an answer."""

    at: float
    answered: bool


@dataclass(frozen=True, slots=True)
class NodeHistory:
    """``stays`` are oldest first. ``spare`` is "" for no spare, "ready", or what it lacks, as of ``spare_at``.

    ``tested_at`` is when the newest preflight began that the node has passed, with ``--act`` or for its return, 0 if
    none is known. ``paths`` are the newest measurements that this node took part in, the oldest first. ``domain`` is
    the NVLink domain, ``UUID.CLIQUE``, that the driver told in that preflight; "" if it told none. ``failed`` are the
    moments at which jobs failed here that ran elsewhere, oldest first. ``accounting`` is set on the node whose agent
    read Slurm's accounting. Faults before ``anew`` were those of hardware that is gone.
    """

    stays: tuple[Stay, ...] = ()
    spare: str = ""
    spare_at: float = 0.0
    tested_at: float = 0.0
    paths: tuple[Path, ...] = ()
    domain: str = ""
    failed: tuple[float, ...] = ()
    accounting: Accounting | None = None
    anew: float = 0.0

    @property
    def out(self) -> bool:
        """Whether the node is out of service according to this history."""
        return any(stay.back is None for stay in self.stays)

    @property
    def back_at(self) -> float | None:
        """When opsd last gave the node back to service; None if it never has, or if the node is out."""
        return None if self.out else max((stay.back for stay in self.stays if stay.back is not None), default=None)

    def drained(self, kind: str, at: float) -> NodeHistory:
        """The history after the node was drained at ``at``; old and surplus stays are dropped."""
        kept = [stay for stay in self.stays if at - (stay.back or stay.out) < KEPT_S]
        return replace(self, stays=(*kept, Stay(re.sub(r"[^\w.-]", "_", kind), at))[-KEPT_STAYS:])

    def measured(self, path: Path) -> NodeHistory:
        """The history after the way to another leaf switch was measured; surplus measurements are dropped."""
        others = [one for one in self.paths if one.leaf != path.leaf]
        return replace(self, paths=(*others, path)[-KEPT_PATHS:])

    def blamed(self, failed: Iterable[float], at: float) -> NodeHistory:
        """The history with more moments of failed jobs; those long before ``at`` and surplus ones are dropped."""
        since = max(at - KEPT_S, self.anew)
        kept = sorted({float(round(moment)) for moment in (*self.failed, *failed) if moment > since})
        return replace(self, failed=tuple(kept[-KEPT_FAILED:]))

    def replaced(self, at: float) -> NodeHistory:
        """The history after the node's hardware was replaced; that it is out of service, if it is, stays."""
        return replace(self, stays=tuple(stay for stay in self.stays if stay.back is None), failed=(), anew=at)

    def returned(self, at: float) -> NodeHistory:
        """The history after the node was returned to service at ``at``."""
        stays = tuple(replace(stay, back=at) if stay.back is None else stay for stay in self.stays)
        return replace(self, stays=stays)

    def relapses(self, within_s: float) -> list[tuple[Stay, Stay]]:
        """Pairs of consecutive faults where the second came less than ``within_s`` seconds after the return.

        If a node was resumed without opsd, the time of its drain replaces the unknown time of its return. Times by
        a clock that was wrong since are none.
        """
        faults = [stay for stay in self.stays if stay.kind not in NO_FAULTS and stay.out >= self.anew]
        pairs = pairwise(faults)
        return [(one, next_one) for one, next_one in pairs if abs(next_one.out - (one.back or one.out)) < within_s]


def read(comment: str) -> NodeHistory:
    """The history in a node's comment; unreadable parts are skipped."""
    match = _RECORD.search(comment)
    words = (match[1] or "").split() if match else []
    stays = [
        Stay(m[1], float(m[2]), float(m[3]) if m[3] else None)
        for word in words
        if (m := _STAY.fullmatch(word)) is not None
    ]
    spare = next((m for word in words if (m := _SPARE.fullmatch(word))), None)
    tested = next((float(m[1]) for word in words if (m := _TESTED.fullmatch(word))), 0.0)
    domain = next((m[1] for word in words if (m := _DOMAIN.fullmatch(word))), "")
    passed = {mark: value for value, mark in _MARKS.items()}
    paths = tuple(
        Path(m[1], float(m[2]), m[4] is None and passed[m[3]], float(m[4] or 0) * MEGA)
        for word in words
        if (m := _PATH.fullmatch(word))
    )
    failed = next((tuple(map(float, m[1].split(","))) for word in words if (m := _FAILED.fullmatch(word))), ())
    accounting = next((Accounting(float(m[1]), not m[2]) for word in words if (m := _SACCT.fullmatch(word))), None)
    anew = next((float(m[1]) for word in words if (m := _ANEW.fullmatch(word))), 0.0)
    return NodeHistory(
        tuple(stays), spare[1] if spare else "", float(spare[2]) if spare else 0.0, tested, paths, domain, failed,
        accounting, anew,
    )  # fmt: skip


def _mark(path: Path) -> str:
    rate = round(path.rate / MEGA) if path.passed is False else 0
    return f"{_MARKS[path.passed]}{f'{rate}M' if 0 < rate < 10**9 else ''}"


def domains(comments: Mapping[str, str]) -> dict[str, str]:
    """The NVLink domain of each node whose comment has one."""
    known = {name: read(comment).domain for name, comment in comments.items()}
    return {name: domain for name, domain in known.items() if domain}


def write(comment: str, record: NodeHistory) -> str:
    """``comment`` with ``record`` in place of its previous record; an empty history leaves none."""
    words = [
        f"{stay.kind}={stay.out:.0f}-{f'{stay.back:.0f}' if stay.back is not None else ''}" for stay in record.stays
    ]
    words += [f"anew={record.anew:.0f}"] if record.anew else []
    words += [f"tested={record.tested_at:.0f}"] if record.tested_at else []
    words += [f"nvl={record.domain}"] if record.domain else []
    words += [f"path={path.leaf}@{path.at:.0f}{_mark(path)}" for path in record.paths]
    words += [f"failed={','.join(f'{moment:.0f}' for moment in record.failed)}"] if record.failed else []
    words += [f"sacct={one.at:.0f}{'' if one.answered else '?'}"] if (one := record.accounting) else []
    words += [f"spare={record.spare}@{record.spare_at:.0f}"] if record.spare else []
    others = _RECORD.sub("", comment).strip()
    return f"{others} [opsd1 {' '.join(words)}]".strip() if words else others
