"""Rendezvous through the run's folder, for launchers that nobody has listed: the counterpart of torchrun's endpoint.

Each launcher rewrites ``launchers/NAME.json`` twice a second; one whose file changes is present. This only finds the
initial members: the claims in the same folder decide about the run, and launchers that come later join it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opsd.checkpoints.claims import newest
from opsd.launch.claims.claim_store import Plan
from opsd.launch.io.protocol import Member
from opsd.launch.io.reporting import print_message
from opsd.launch.ranks.settings import free_port
from opsd.launch.run.launchers import Launchers, RendezvousError, resolve, source_address

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
    """This launcher's file."""

    def __init__(self, folder: Path, member: Member, rank: int | None) -> None:
        self._path = folder / f"{member.name}.json"
        self._member = member
        self._rank = rank

    def beat(self) -> None:
        """Write it. Raises OSError."""
        member = self._member
        content = {
            "name": member.name, "address": member.address, "port": member.port, "rank": self._rank,
            "beat": time.time_ns(),
        }  # fmt: skip
        draft = self._path.with_name(f".{member.name}.{os.getpid()}")
        draft.write_text(json.dumps(content) + "\n", encoding="utf-8")
        draft.replace(self._path)

    def linger(self) -> None:
        """Keep writing for ``LINGER_S`` in a thread."""

        def go_on() -> None:
            until = time.monotonic() + LINGER_S
            while time.monotonic() < until:
                time.sleep(BEAT_S)
                with suppress(OSError):
                    self.beat()

        threading.Thread(target=go_on, daemon=True, name="presence").start()


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


def join_rendezvous(
    options: RendezvousOptions,
    folder: Path,
    own_name: str,
    port: int | None,
    limit_s: float,
    last_call_s: float,
    *,
    start: str,
    pause: Callable[[float], None] = time.sleep,
) -> Launchers:
    """The launchers that have come to the run's ``folder``. Raises RendezvousError, OSError.

    The least number must come within ``limit_s``; more, or spares, may come within ``last_call_s`` after that
    (torchrun's last call). If a run of this ``start`` is already going on, it is joined at once.
    """
    host = resolve(options.host, "give --rdzv-endpoint a host that every node can resolve, or an address")
    own = Member(own_name, options.local_address or _own_address(host), port or free_port())
    arrivals = folder / FOLDER
    arrivals.mkdir(exist_ok=True)
    presence, watch = PresenceFile(arrivals, own, options.node_rank), PresenceWatch(arrivals)
    begun = time.monotonic()
    enough_at, said_at = None, begun
    while True:
        presence.beat()
        if (plan := _running(folder, start)) is not None:
            presence.linger()
            return Launchers(own, (*(one for one in plan.members if one.name != own.name), own), start=start)
        watch.look()
        now, count = time.monotonic(), len(watch.present)
        if count >= options.least and own.name in watch.present:
            enough_at = enough_at or now
            if count >= options.most or now - enough_at >= last_call_s:
                presence.linger()
                return Launchers(own, watch.members, start=start)
        elif now - begun > limit_s:
            raise RendezvousError(_missing(count, options, folder, f"within {limit_s:g} s"))
        elif now - said_at > REPORT_INTERVAL_S:
            said_at = now
            print_message(_missing(count, options, folder, "so far"))
        pause(BEAT_S)


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
