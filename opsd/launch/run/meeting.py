"""Launchers that nobody has named find each other in the run's folder: where torchrun has an endpoint, and no list.

Each writes ``launchers/NAME.json`` twice a second for as long as the others may look; whose file changes is there. Who
has come is only a beginning: the claims in the same folder decide about the run, and who comes later joins it.
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
from opsd.launch.claims.authority import Plan
from opsd.launch.io.protocol import Member
from opsd.launch.io.reporting import say
from opsd.launch.ranks.settings import free_port
from opsd.launch.run.fellows import Fellows, FellowsError, resolve, way_to

FOLDER = "launchers"
BEAT_S = 0.5
SAY_S = 10.0
LINGER_S = 60.0
"""For so long a launcher that has met the others can still be seen by those who are late."""
MAX_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the launchers of several nodes meet when no Slurm and no ``--nodes`` says who they are.

    ``host`` is a name or an address of the first node, which listens at ``port``; ``least`` nodes must come and
    ``most`` are of use, spares included. ``node_rank``: the place that the user has given this node, None if any is
    fine.
    ``local_address`` is what the others should call this node, "" if it is to be found out.
    """

    host: str
    port: int
    least: int
    most: int
    node_rank: int | None
    local_address: str


@dataclass(frozen=True, slots=True)
class Comer:
    """A launcher whose file was read; ``beat`` is another one each time."""

    member: Member
    rank: int | None
    beat: int

    @classmethod
    def read(cls, path: Path) -> Comer | None:
        """What stands in ``path``, None if that is nothing of use."""
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                raw: Any = json.loads(file.read(MAX_BYTES))
            rank = raw["rank"]
            member = Member(str(raw["name"]), str(raw["address"]), int(raw["port"]))
            return cls(member, None if rank is None else int(rank), int(raw["beat"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None


class Presence:
    """This launcher's file. ``beat`` says that it is there."""

    def __init__(self, folder: Path, member: Member, rank: int | None) -> None:
        self._path = folder / f"{member.name}.json"
        self._member = member
        self._rank = rank

    def beat(self) -> None:
        """Raises OSError."""
        member = self._member
        content = {
            "name": member.name, "address": member.address, "port": member.port, "rank": self._rank,
            "beat": time.time_ns(),
        }  # fmt: skip
        draft = self._path.with_name(f".{member.name}.{os.getpid()}")
        draft.write_text(json.dumps(content) + "\n", encoding="utf-8")
        draft.replace(self._path)

    def linger(self) -> None:
        """Go on for a while, beside the launcher's work."""

        def go_on() -> None:
            until = time.monotonic() + LINGER_S
            while time.monotonic() < until:
                time.sleep(BEAT_S)
                with suppress(OSError):
                    self.beat()

        threading.Thread(target=go_on, daemon=True, name="presence").start()


class Watch:
    """Who is there, from looks at the folder that are some time apart."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[str, Comer] = {}
        self.there: dict[str, Comer] = {}
        """Those whose file has changed between two looks."""

    def look(self) -> None:
        """Look again. Raises OSError."""
        for path in sorted(self._folder.glob("[!.]*.json")):
            comer = Comer.read(path)
            if comer is None:
                continue
            before = self._seen.get(path.name)
            if before is not None and before.beat != comer.beat:
                self.there[comer.member.name] = comer
            self._seen[path.name] = comer

    @property
    def members(self) -> tuple[Member, ...]:
        """Those who are there, by the ranks that were given to them, then by name."""
        order = sorted(self.there.values(), key=lambda one: (one.rank is None, one.rank or 0, one.member.name))
        return tuple(one.member for one in order)


def meet(
    meeting: Meeting,
    folder: Path,
    own_name: str,
    port: int | None,
    limit_s: float,
    last_call_s: float,
    *,
    start: str,
    pause: Callable[[float], None] = time.sleep,
) -> Fellows:
    """The launchers that have come to the run's ``folder``. Raises FellowsError, OSError.

    The least of them have to come within ``limit_s``, and more of them, or spares, may within ``last_call_s`` after
    that. A run of this ``start`` that has begun is joined, whoever has come.
    """
    host = resolve(meeting.host)
    own = Member(own_name, meeting.local_address or _own_address(host), port or free_port())
    launchers = folder / FOLDER
    launchers.mkdir(exist_ok=True)
    presence, watch = Presence(launchers, own, meeting.node_rank), Watch(launchers)
    begun = time.monotonic()
    enough_at, said_at = None, begun
    while True:
        presence.beat()
        if (plan := _running(folder, start)) is not None:
            presence.linger()
            return Fellows(own, (*(one for one in plan.members if one.name != own.name), own), meeting=start)
        watch.look()
        now, count = time.monotonic(), len(watch.there)
        if count >= meeting.least and own.name in watch.there:
            enough_at = enough_at or now
            if count >= meeting.most or now - enough_at >= last_call_s:
                presence.linger()
                return Fellows(own, watch.members, meeting=start)
        elif now - begun > limit_s:
            raise FellowsError(_missing(count, meeting, folder, f"within {limit_s:g} s"))
        elif now - said_at > SAY_S:
            said_at = now
            say(_missing(count, meeting, folder, "so far"))
        pause(BEAT_S)


def _missing(count: int, meeting: Meeting, folder: Path, when: str) -> str:
    return (
        f"{max(count, 1)} of {meeting.least} launchers have come to {folder} {when}; all nodes must see this folder "
        "under the same name, see --run-dir"
    )


def _running(folder: Path, start: str) -> Plan | None:
    """The plan of this start of the run if it has begun; its launchers need not be there any more."""
    claim = newest(folder)
    if claim is None or claim.start != start or claim.end is not None:
        return None
    try:
        return Plan.from_json(claim.number, claim.plan)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _own_address(host: str) -> str:
    """Where the others reach this node: the address from which it would reach the place of the meeting."""
    try:
        return way_to(host)
    except OSError as error:
        raise FellowsError(f"{host}, where the launchers are to meet, cannot be reached: {error.strerror}") from error
