"""Rendezvous through the run's folder, for launchers that nobody has listed: the counterpart of torchrun's endpoint.

Each launcher rewrites ``launchers/NAME.json`` twice a second; one whose file changes is present. One launcher reads
these files and lists for the others who is there (``roster.py``), so that reads grow with the number of launchers, not
with its square. This only finds the initial members: the claims in the same folder decide about the run, and launchers
that come later join it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opsd.checkpoints.claims import newest
from opsd.launch.claims.claim_store import Plan
from opsd.launch.io.protocol import Member
from opsd.launch.io.reporting import print_message
from opsd.launch.run.launchers import Launchers, RendezvousError, resolve, source_address
from opsd.launch.run.roster import FOLDER as ROSTERS
from opsd.launch.run.roster import SharedRoster
from opsd.ports import free_port

FOLDER = "launchers"
BEAT_S = 0.5
REPORT_INTERVAL_S = 10.0
LINGER_S = 60.0
"""For so long a launcher that has found the others remains visible to late ones."""
MAX_BYTES = 4096


@dataclass(frozen=True, slots=True)
class RendezvousOptions:
    """Where the launchers of several nodes find each other if neither Slurm nor ``--nodes`` lists them.

    ``host`` is a name or address of the first node, which listens at ``port``. At least ``least`` and at most ``most``
    nodes take part, spares included. ``node_rank`` is the place that the user gave this node, None for any.
    ``local_address`` is the address under which the others reach this node, "" to detect it.
    """

    host: str
    port: int
    least: int
    most: int
    node_rank: int | None
    local_address: str


@dataclass(frozen=True, slots=True)
class Arrival:
    """A launcher whose file was read; ``beat`` changes with every write."""

    member: Member
    rank: int | None
    beat: int

    @classmethod
    def read(cls, path: Path) -> Arrival | None:
        """The content of ``path``, None if it is not usable."""
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                raw: Any = json.loads(file.read(MAX_BYTES))
            rank = raw["rank"]
            member = Member(str(raw["name"]), str(raw["address"]), int(raw["port"]))
            return cls(member, None if rank is None else int(rank), int(raw["beat"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None


class PresenceFile:
    """This launcher's file.

    It is put in place from the folder of the rosters: an NFS client may show a folder as it was half a minute ago
    (nfs(5), acdirmin), but not one that it has just changed itself.
    """

    def __init__(self, folder: Path, member: Member, rank: int | None) -> None:
        self._path = folder / f"{member.name}.json"
        self._draft = folder / ROSTERS / f".{member.name}.{os.getpid()}"
        self._member = member
        self._rank = rank

    def beat(self) -> None:
        """Write it. Raises OSError."""
        member = self._member
        content = {
            "name": member.name, "address": member.address, "port": member.port, "rank": self._rank,
            "beat": time.time_ns(),
        }  # fmt: skip
        self._draft.write_text(json.dumps(content) + "\n", encoding="utf-8")
        self._draft.replace(self._path)


class PresenceWatch:
    """Which launchers are present, from repeated reads of the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[str, Arrival] = {}
        self.present: dict[str, Arrival] = {}
        """Those whose file has changed between two reads."""

    def look(self) -> None:
        """Read the folder. Raises OSError."""
        for path in sorted(self._folder.glob("[!.]*.json")):
            arrival = Arrival.read(path)
            if arrival is None:
                continue
            before = self._seen.get(path.name)
            if before is not None and before.beat != arrival.beat:
                self.present[arrival.member.name] = arrival
            self._seen[path.name] = arrival

    @property
    def members(self) -> tuple[Member, ...]:
        """Those present, ordered by the ranks given to them, then by name."""
        order = sorted(self.present.values(), key=lambda one: (one.rank is None, one.rank or 0, one.member.name))
        return tuple(one.member for one in order)


class Meeting:
    """The part of one launcher until it knows the others: ``step``, every ``BEAT_S``."""

    def __init__(
        self, options: RendezvousOptions, folder: Path, own: Member, last_call_s: float, *, start: str
    ) -> None:
        """Raises OSError, as all methods do."""
        arrivals = folder / FOLDER
        (arrivals / ROSTERS).mkdir(parents=True, exist_ok=True)
        self.count = 0
        """How many launchers are known to be present."""
        self._options, self._folder, self._own, self._start = options, folder, own, start
        self._last_call_s = last_call_s
        self._presence = PresenceFile(arrivals, own, options.node_rank)
        self._watch, self._roster = PresenceWatch(arrivals), SharedRoster(arrivals, own)
        self._enough_at: float | None = None
        self.beats = [self._presence.beat]
        """Rewrite what keeps this launcher, and its roster if it is the author, visible."""

    def step(self, now: float) -> Launchers | None:
        """The launchers, once they are known: those of the run if it goes on, else those who have come if enough."""
        self._presence.beat()
        if (plan := _running(self._folder, self._start)) is not None:
            return self._together(plan.members)
        if self._roster.is_author(now):
            self._watch.look()
            self.count = len(self._watch.present)
            members = self._watch.members if self._are_enough(now) else None
            self._roster.write(self.count, members)
            if members is not None:
                self.beats.append(self._roster.beat)
                return Launchers(self._own, members, start=self._start)
        elif (roster := self._roster.newest) is not None:
            self.count = roster.count
            if roster.members is not None:
                return self._together(roster.members)
        return None

    def linger(self) -> None:
        """Remain visible to late launchers for ``LINGER_S``, in a thread."""

        def go_on() -> None:
            until = time.monotonic() + LINGER_S
            while time.monotonic() < until:
                time.sleep(BEAT_S)
                for beat in self.beats:
                    with suppress(OSError):
                        beat()

        threading.Thread(target=go_on, daemon=True, name="presence").start()

    def _are_enough(self, now: float) -> bool:
        if self.count < self._options.least or self._own.name not in self._watch.present:
            return False
        self._enough_at = self._enough_at or now
        return self.count >= self._options.most or now - self._enough_at >= self._last_call_s

    def _together(self, members: Sequence[Member]) -> Launchers:
        """Those ``members`` and this one, which comes last if it is not listed as it is."""
        if self._own in members:
            return Launchers(self._own, tuple(members), start=self._start)
        others = (one for one in members if one.name != self._own.name)
        return Launchers(self._own, (*others, self._own), start=self._start)


def join_rendezvous(
    options: RendezvousOptions, folder: Path, own_name: str, port: int | None, limit_s: float, last_call_s: float,
    *, start: str,
) -> Launchers:  # fmt: skip
    """The launchers that have come to the run's ``folder``. Raises RendezvousError, OSError.

    The least number must come within ``limit_s``; more, or spares, may come within ``last_call_s`` after that
    (torchrun's last call). If a run of this ``start`` is already going on, it is joined at once.
    """
    host = resolve(options.host, "give --rdzv-endpoint a host that every node can resolve, or an address")
    own = Member(own_name, options.local_address or _own_address(host), port or free_port())
    meeting = Meeting(options, folder, own, last_call_s, start=start)
    begun = said_at = time.monotonic()
    while (launchers := meeting.step(now := time.monotonic())) is None:
        if meeting.count < options.least and now - begun > limit_s:
            raise RendezvousError(_missing(meeting.count, options, folder, f"within {limit_s:g} s"))
        if meeting.count < options.least and now - said_at > REPORT_INTERVAL_S:
            said_at = now
            print_message(_missing(meeting.count, options, folder, "so far"))
        time.sleep(BEAT_S)
    meeting.linger()
    return launchers


def _missing(count: int, options: RendezvousOptions, folder: Path, when: str) -> str:
    return (
        f"{max(count, 1)} of {options.least} launchers have come to {folder} {when}; all nodes must see this folder "
        "under the same name, see --run-dir"
    )


def _running(folder: Path, start: str) -> Plan | None:
    """The plan of this start of the run if it has begun; its launchers may be gone."""
    claim = newest(folder)
    if claim is None or claim.start != start or claim.end is not None:
        return None
    try:
        return Plan.from_json(claim.number, claim.plan)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _own_address(host: str) -> str:
    """The address of this node for the others: the one from which it reaches the rendezvous endpoint."""
    try:
        return source_address(host)
    except OSError as error:
        raise RendezvousError(
            f"{host}, where the launchers are to meet, cannot be reached: {error.strerror}"
        ) from error
