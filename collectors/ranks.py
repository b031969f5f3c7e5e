"""Training ranks on this node: their rank pages, their runs, and what launcher and ranks report as events.

The folder ``<root>/<run>/`` belongs to the user of the run while the agent may be root; ``tail`` says how it is read.
The name of a run is always that of its folder, whatever the files in it claim.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pydantic import Field

from opsd.collectors.base import (
    Collector,
    Context,
    Event,
    Fact,
    Metric,
    Plugin,
    RankFact,
    Reading,
    RunFact,
    Sample,
)
from opsd.collectors.lib import rank_series as series
from opsd.collectors.lib.gpu_owners import GpuOwners
from opsd.collectors.lib.host_pids import HostPids
from opsd.collectors.lib.run_slots import RunSlots
from opsd.collectors.lib.run_watch import ENTRIES, EVENT_BYTES, MAX_RANKS, RunWatch, lives
from opsd.collectors.lib.shares import Allowance, fill_by_owner
from opsd.settings.sections import AnyPath, CollectorSettings

KEPT_BYTES: Final = 3 << 20
KEPT_RATE: Final = 5 << 10
"""Bytes of events that the users of a node may have the agent remember: at once, and more each second."""
_LEAST_ENTRIES: Final = 256
_LEAST_BYTES: Final = 16 << 10

LEFT_OUT = Metric(
    "opsd_ranks_left_out",
    "What the limits of the collector leave out: runs that live without a place, ranks, events of the last second.",
    labels=("what",),
)


class RanksSettings(CollectorSettings):
    """Training ranks on this node, through their rank pages."""

    root: AnyPath = Field(
        default=Path("/dev/shm/opsd"),  # noqa: S108
        description="Folder in shared memory with one folder per run; OPSD_SHM wins.",
    )


class RanksCollector:
    """The runs under ``root`` and their ranks.

    A rank or run that has ended is reported for ``linger_s`` more, so that how it ended is seen, and then no longer.
    The number of a user's runs is limited and shared evenly with others. ``gpu_owners`` says who works on the node,
    ``host`` which process that is if it is in a container.
    ``slots`` are the run folders that are looked at, ``folders`` the run folders that the runs last seen name.
    """

    name = "ranks"
    metrics = (*series.METRICS, LEFT_OUT)

    def __init__(
        self,
        root: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        linger_s: float = 60.0,
        gpu_owners: GpuOwners | None = None,
        host: HostPids | None = None,
    ) -> None:
        self._root = root
        self._clock = clock
        self._wall = wall
        self._linger_s = linger_s
        self._gpu_owners = gpu_owners or GpuOwners()
        self._host = found = host or HostPids()
        self._allowance = Allowance(KEPT_BYTES, KEPT_RATE)
        self._runs: dict[tuple[Path, int], RunWatch] = {}
        self.slots = RunSlots(
            root,
            lambda folder, owner: lives(folder, owner, wall(), linger_s, found),
            first=self._gpu_owners.users_of_gpus,
            clock=clock,
        )
        self.folders: tuple[str, ...] = ()

    def collect(self) -> Reading:
        """Read all runs. Raises OSError if the root cannot be read.

        Without a root there are no runs, and that is known: a run of before a boot is over.
        """
        try:
            chosen = self.slots.look()
        except FileNotFoundError:
            chosen = ()
        known = self._runs
        self._runs = {one: known.get(one) or self._watch(*one) for one in chosen}
        self._allowance.begin(frozenset(owner for _, owner in chosen))
        return self._read(list(self._runs.values()))

    def _watch(self, folder: Path, owner: int) -> RunWatch:
        return RunWatch(folder, owner, self._linger_s, self._gpu_owners, self._allowance, self._host)

    def _read(self, runs: list[RunWatch]) -> Reading:
        of_owner = Counter(run.owner for run in runs)
        for run in runs:
            run.list_ranks(max(_LEAST_ENTRIES, ENTRIES // of_owner[run.owner]))
        demands = [(run.owner, run.demand) for run in runs]
        shares = fill_by_owner(demands, MAX_RANKS)
        samples: list[Sample] = []
        events: list[Event] = []
        facts: list[Fact] = []
        for run, share in zip(runs, shares, strict=True):
            most = max(_LEAST_BYTES, EVENT_BYTES // of_owner[run.owner])
            reading = run.read(self._clock(), self._wall(), ranks=share, event_bytes=most)
            samples += reading.samples
            events += reading.events
            facts += reading.facts
        self.folders = tuple(fact.folder for fact in facts if isinstance(fact, RunFact))
        ranks = (fact for fact in facts if isinstance(fact, RankFact))
        self._gpu_owners.ranked = frozenset((rank.gpu, rank.job) for rank in ranks if rank.gpu is not None)
        left_out = {
            "runs": self.slots.left_out,
            "ranks": sum(number for _, number in demands) - sum(shares),
            "events": sum(run.events_left_out for run in runs),
        }
        samples += [Sample(LEFT_OUT, number, (what,)) for what, number in left_out.items()]
        return Reading(tuple(samples), tuple(events), tuple(facts), _limited(left_out))


def _limited(left_out: dict[str, int]) -> str:
    said = ", ".join(f"{number} {what}" for what, number in left_out.items() if number)
    return f"more than there is room for: {said} left out" if said else ""


def _make(settings: RanksSettings, context: Context) -> Collector:
    return RanksCollector(settings.root, gpu_owners=context.shared(GpuOwners), host=context.shared(HostPids))


COLLECTOR = Plugin("ranks", RanksSettings, _make, {**series.LABELS, "what": "runs, ranks, events"})
