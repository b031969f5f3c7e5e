"""Which launchers a run has: those that Slurm or the command line names, and those that find each other.

Which launchers a run has and where they listen: from the command line, or from the Slurm job that it runs in.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import re
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from ipaddress import ip_address
from itertools import islice
from pathlib import Path
from typing import Any

from opsd.checkpoints.claims import newest
from opsd.launch.claims.claim_store import Plan
from opsd.launch.io.handshake import lookup
from opsd.launch.io.protocol import Member
from opsd.launch.io.reporting import print_message
from opsd.ports import free_port
from opsd.slurm.allocation import cloud_addresses
from opsd.slurm.hostlist import HostlistError, compress_in_order, expand

DEFAULT_PORT = 29_480
_JOB_PORTS = range(20_000, 32_000)
"""Below the kernel's range of ephemeral ports."""
ASKED_FOR = 4
"""How many other nodes are looked up, one after the other, if the own name is on loopback."""

BATCH = "OPSD_BATCH"
"""Tells the launchers of one ``opsd slurm run`` from those of another one in the same start of the job."""


class RendezvousError(Exception):
    """The launchers of the run cannot be determined; the message says what to pass."""


@dataclass(frozen=True, slots=True)
class NodeCount:
    """How many nodes run ranks."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> NodeCount:
        """``N`` or ``MIN:MAX`` as in torchrun. Raises ValueError."""
        least, _, most = text.partition(":")
        count = cls(int(least), int(most or least))
        if not 1 <= count.least <= count.most:
            raise ValueError(text)
        return count


@dataclass(frozen=True, slots=True)
class Launchers:
    """All launchers of the run, in the order in which they get work, and the own one among them.

    ``borrowed``: the own node is not the Slurm job's, it came from a pool. ``start`` identifies the start of the run
    (see ``start_of``) if the launchers found each other through an endpoint.
    """

    own: Member
    members: tuple[Member, ...]
    borrowed: bool = False
    start: str = ""


def source_address(address: str) -> str:
    """The own address from which ``address`` is reached; sends nothing. Raises OSError."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, DEFAULT_PORT))
        return str(probe.getsockname()[0])


def find_launchers(
    nodes: str,
    own_name: str,
    port: int,
    environ: Mapping[str, str],
    source_address: Callable[[str], str] = source_address,
    lookup: Callable[[str], str] = lookup,
) -> Launchers:
    """``nodes`` is a hostlist, optionally with addresses, ``n1=10.0.0.1,n2``; "" means the nodes of the Slurm job.

    Only the own address is looked up, those of others when they are called. Raises RendezvousError.
    """
    given = nodes or slurm_nodes(environ)
    if not given:
        raise RendezvousError(
            "more than one node, and no Slurm job that says which: name them with --nodes n1,n2,…, or give all of them "
            "the same --rdzv-endpoint HOST:PORT"
        )
    told = cloud_addresses(environ)
    members: dict[str, Member] = {}
    for name, address in _pairs(given).items():
        members[name] = Member(name, told.get(address, address), port)
    if own_name not in members:
        shown = ", ".join(list(members)[:8])
        raise RendezvousError(f"this node, {own_name}, is not among the nodes of the run ({shown}); see --node-name")
    listens = _own_address(members, own_name, source_address, lookup)
    members[own_name] = replace(members[own_name], listens=listens)
    job = environ.get("SLURM_JOB_NODELIST", "")
    borrowed = bool(nodes and job) and own_name not in _pairs(job)
    return Launchers(members[own_name], tuple(members.values()), borrowed)


def slurm_nodes(environ: Mapping[str, str]) -> str:
    """The nodes of the step if it has several (``srun -N2`` in a job of six), otherwise those of the job."""
    if environ.get("SLURM_STEP_NUM_NODES", "1") != "1" and environ.get("SLURM_STEP_NODELIST"):
        return environ["SLURM_STEP_NODELIST"]
    return environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST") or ""


def too_many_here(environ: Mapping[str, str]) -> str:
    """What to say of a second launcher on this node if Slurm has started several, "" if it has not."""
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    most = max(map(int, re.findall(r"(?:^|,)(\d+)", tasks)), default=1)
    if most < 2:
        return ""
    return (
        f"; Slurm starts up to {most} tasks on a node here, and one is needed: use srun --ntasks-per-node=1, "
        "and --nproc-per-node for the ranks"
    )


def start_of(run: str, environ: Mapping[str, str], launchers: Launchers, launcher: str) -> str:
    """The identity that the launchers of one start of ``run`` share, and no other copy of the run.

    Slurm may start the job again while a node that was cut off still runs a launcher of the start before. That launcher
    must not join when it is back: it may be told to stop next. A single launcher is a start of its own, and so is a
    step of several nodes, and a group outside Slurm whose first launcher differs.
    """
    if launchers.start:
        return launchers.start
    name, first = start_of_job(run, environ), launchers.members[0]
    if len(launchers.members) == 1:
        return f"{name}, {launcher}"
    if (step := _step(environ)) is not None:
        return f"{name}, step {step}"
    return name if "SLURM_JOB_ID" in environ else f"{name}, {first.name} at {first.address}:{first.port}"


def start_of_job(run: str, environ: Mapping[str, str]) -> str:
    """The start of every launcher in this start of the Slurm job, or its beginning; ``run`` outside Slurm."""
    job, batch = environ.get("SLURM_JOB_ID", ""), environ.get(BATCH, "")
    if not job:
        return run
    name = f"{run}, job {job}.{environ.get('SLURM_RESTART_COUNT') or '0'}"
    return f"{name}, {batch}" if batch else name


def is_single_attempt(environ: Mapping[str, str]) -> bool:
    """Whether no later launchers will have the same start, so that the end of the run is final for it.

    Outside Slurm, and for launchers that a script starts one by one, a later attempt has the same start.
    """
    return "SLURM_JOB_ID" in environ and (BATCH in environ or _step(environ) is not None)


def _step(environ: Mapping[str, str]) -> str | None:
    """The number of the step if it has several nodes."""
    return environ.get("SLURM_STEP_ID") if environ.get("SLURM_STEP_NUM_NODES", "1") != "1" else None


def _pairs(given: str) -> dict[str, str]:
    if "=" not in given:
        try:
            return {name: name for name in expand(given)}
        except HostlistError as error:
            raise RendezvousError(f"the nodes cannot be read: {error}") from error
    pairs = [item.strip().partition("=") for item in given.split(",")]
    return {name: address or name for name, _, address in pairs}


def _own_address(
    members: Mapping[str, Member], own_name: str, source_address: Callable[[str], str], lookup: Callable[[str], str]
) -> str:
    """Where this launcher listens. Debian and cloud-init map the own name to 127.0.1.1, out of reach for the others."""
    own = resolve(members[own_name].address, f"give it as --nodes {own_name}=ADDRESS", lookup)
    if not ip_address(own).is_loopback:
        return own
    others = (member.address for name, member in members.items() if name != own_name)
    unknown: OSError | None = None
    for host in islice(others, ASKED_FOR):
        try:
            if not ip_address(address := lookup(host)).is_loopback:
                return source_address(address)
        except OSError as error:
            unknown = OSError(error.errno, error.strerror, host)
    if unknown is None:
        return own
    raise RendezvousError(
        f"{own_name} is {own} here (/etc/hosts), where no other node can reach it, and {unknown.filename} cannot be "
        f"reached ({unknown.strerror}); give the addresses as --nodes {own_name}=ADDRESS,…"
    ) from unknown


def resolve(host: str, otherwise: str, lookup: Callable[[str], str] = lookup) -> str:
    """The address of ``host``. Raises RendezvousError, which says what to do ``otherwise``."""
    try:
        return lookup(host)
    except OSError as error:
        raise RendezvousError(f"{host} has no address here ({error.strerror}); {otherwise}") from error


def default_port(run: str, environ: Mapping[str, str]) -> int:
    """Where the launchers of ``run`` listen by default: each run of a Slurm job has its own port.

    All launchers compute the same one. Jobs may share nodes, and the runs of one job usually do.
    """
    job = environ.get("SLURM_JOB_ID", "")
    if not job:
        return DEFAULT_PORT
    mark = hashlib.blake2b(f"{job} {run}".encode(), digest_size=8).digest()
    return _JOB_PORTS[int.from_bytes(mark) % len(_JOB_PORTS)]


def cannot_listen(own: Member, error: OSError) -> str:
    """The remedy for the user if ``own`` cannot listen."""
    place = f"cannot listen at {own.host}:{own.port}"
    if error.errno == errno.EADDRINUSE:
        return f"{place}: another program does; give all launchers of the run the same --port, one that is free"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{place}: that is no address of this machine; give the right one as --nodes {own.name}=ADDRESS,…"
    return f"{place}: {error.strerror or error}; choose with --port and --nodes"


# One launcher's list of those that have come to a rendezvous, so that not each has to read the files of all others.
#
# ``launchers/roster/NUMBER.json.gz`` is rewritten with each beat by the launcher that made it. The highest number is
# in use; the next one is made, exclusively, by a launcher for which the newest has not changed for ``SILENT_S``. Two
# authors at once do no harm: the lists may differ, and the claims decide about the run.
#
# All launchers read all of it at once, so it is short: names and addresses are hostlists.


ROSTERS = "roster"
SILENT_S = 2.0
MAX_BYTES = 8 << 20
"""Of JSON: 10,000 launchers take a tenth of a million, or half a million if their names have no numbers."""


@dataclass(frozen=True, slots=True)
class Roster:
    """How many launchers are present, and who they are once they are enough; ``beat`` changes with every write."""

    beat: int
    count: int
    members: tuple[Member, ...] | None

    @classmethod
    def read(cls, path: Path) -> Roster | None:
        """The content of ``path``, None if it is not usable."""
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                raw: Any = json.loads(gzip.GzipFile(fileobj=file).read(MAX_BYTES))
            members = raw["members"]
            listed = None if members is None else _members(members)
            return cls(int(raw["beat"]), int(raw["count"]), listed)
        except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError):
            return None


class SharedRoster:
    """The roster below ``folder`` as one launcher sees it; raises OSError if the files cannot be used."""

    def __init__(self, folder: Path, own: Member) -> None:
        self.newest: Roster | None = None
        """The text that another launcher has written since this one first looked."""
        self._folder = folder / ROSTERS
        self._own = own
        self._number = 0
        self._content: dict[str, Any] = {}
        self._seen: tuple[int, int] | None = None
        self._changed_at = 0.0

    def is_author(self, now: float) -> bool:
        """Look into the folder; True if this launcher is to read the others' files, and to ``write``."""
        numbers = (path.name.partition(".")[0] for path in self._folder.iterdir())
        number = max((int(each) for each in numbers if each.isdecimal()), default=0)
        if number == self._number != 0:
            return True
        self._number = 0
        roster = Roster.read(self._path(number)) if number else None
        seen = number, roster.beat if roster is not None else 0
        if seen == self._seen:
            return now - self._changed_at >= SILENT_S and self._take(number + 1)
        first = self._seen is None
        self._seen, self._changed_at = seen, now
        if first:  # a roster may be left over from an earlier start
            return number == 0 and self._take(1)
        if roster is not None and not self._is_of_this_start(roster):
            return self._take(number + 1)
        self.newest = roster
        return False

    def write(self, count: int, members: Sequence[Member] | None) -> None:
        """``count`` launchers are present; ``members`` if they are enough."""
        self._content = {"count": count, "members": None if members is None else _columns(members)}
        self.beat()

    def beat(self) -> None:
        """Write it once more."""
        draft = self._folder / f".{self._own.name}.{os.getpid()}.roster"
        draft.write_bytes(gzip.compress(json.dumps({**self._content, "beat": time.time_ns()}).encode()))
        draft.replace(self._path(self._number))

    def _is_of_this_start(self, roster: Roster) -> bool:
        """Whether it does not list an earlier launcher of this node, which still runs."""
        return all(member == self._own for member in roster.members or () if member.name == self._own.name)

    def _take(self, number: int) -> bool:
        try:
            os.close(os.open(self._path(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError:
            return False
        self._number = number
        return True

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.json.gz"


def _columns(members: Sequence[Member]) -> dict[str, Any]:
    return {
        "names": _hostlist([member.name for member in members]),
        "addresses": _hostlist([member.address for member in members]),
        "ports": [member.port for member in members],
    }


def _members(raw: Any) -> tuple[Member, ...]:
    """The opposite. Raises KeyError, TypeError or ValueError."""
    columns = _texts(raw["names"]), _texts(raw["addresses"]), map(int, raw["ports"])
    return tuple(Member(*row) for row in zip(*columns, strict=True))


def _hostlist(texts: list[str]) -> str | list[str]:
    """``texts`` as a hostlist, or as they are if one of them, such as an address that a user gave, fits into none."""
    hostlist = compress_in_order(texts)
    try:
        return hostlist if list(expand(hostlist)) == texts else texts
    except HostlistError:
        return texts


def _texts(raw: Any) -> Iterable[str]:
    return expand(raw) if isinstance(raw, str) else map(str, raw)


# Rendezvous through the run's folder, for launchers that nobody has listed: the counterpart of torchrun's endpoint.
#
# Each launcher rewrites ``launchers/NAME.json`` twice a second; one whose file changes is present. One launcher
# reads these files and lists for the others who is there (``roster.py``), so that reads grow with the number of
# launchers, not with its square. This only finds the initial members: the claims in the same folder decide about the
# run, and launchers that come later join it.


ARRIVALS = "launchers"
BEAT_S = 0.5
REPORT_INTERVAL_S = 10.0
LINGER_S = 60.0
"""For so long a launcher that has found the others remains visible to late ones."""
ARRIVAL_BYTES = 4096


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
                raw: Any = json.loads(file.read(ARRIVAL_BYTES))
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
        arrivals = folder / ARRIVALS
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
    own = Member(own_name, options.local_address or _reachable_address(host), port or free_port())
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


def _reachable_address(host: str) -> str:
    """The address of this node for the others: the one from which it reaches the rendezvous endpoint."""
    try:
        return source_address(host)
    except OSError as error:
        raise RendezvousError(
            f"{host}, where the launchers are to meet, cannot be reached: {error.strerror}"
        ) from error
