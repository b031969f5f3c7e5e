"""Every collector of the agent, made from the settings. A new one is a line here and a section in ``opsd.config``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from opsd import client
from opsd.collectors.base import Collector
from opsd.collectors.dcgm import DcgmCollector, Yielding
from opsd.collectors.host import HostCollector
from opsd.collectors.infiniband import InfinibandCollector
from opsd.collectors.kmsg import KmsgCollector
from opsd.collectors.lib.kernel.xid import XidLedger
from opsd.collectors.lib.nvml import gpm
from opsd.collectors.lib.processes import process_letter, sees_all_processes
from opsd.collectors.nccl import NcclCollector
from opsd.collectors.nvme import NvmeCollector
from opsd.collectors.nvml import NvmlCollector
from opsd.collectors.ranks import RanksCollector
from opsd.collectors.slurm import SlurmCollector
from opsd.collectors.spare import SpareCollector
from opsd.collectors.storage import StorageCollector, StorageNetCollector
from opsd.config import Settings
from opsd.slurm.commands import CommandSlurm
from opsd.slurm.watch import NodeWatch
from opsd.spares.state import FILE as SPARE

PROFILING = frozenset(metric.name for metric in gpm.METRICS)


@dataclass(frozen=True, slots=True)
class Parts:
    """What collectors are made from. ``state`` is where they may keep what outlives the agent, None for nowhere.

    Sources of Xids share the ledger, which tells each Xid once. The collector of ranks knows where runs write, the one
    of dcgm-exporter what the driver need not be asked as well.
    """

    settings: Settings
    state: Path | None
    ranks: RanksCollector[client.RankPage]
    dcgm: DcgmCollector
    xids: XidLedger = field(default_factory=XidLedger)

    def paths(self) -> Iterable[str]:
        """Where space matters: the mounts of the settings and the folders of the runs on this node."""
        return (*map(str, self.settings.host.mounts), *self.ranks.folders)


Factory = Callable[[Parts], Collector]


def _nvml(parts: Parts) -> Collector:
    settings, dcgm = parts.settings, parts.dcgm
    collector = NvmlCollector(
        settings.nvml.library,
        hostname=settings.agent.node,
        xids=parts.xids,
        process_letter=process_letter if sees_all_processes() else None,
        profiling=settings.nvml.profiling,
        profiled_elsewhere=lambda: not PROFILING.isdisjoint(dcgm.covered),
    )
    return Yielding(collector, lambda: dcgm.covered) if settings.dcgm.enabled else collector


def _slurm(parts: Parts) -> Collector:
    node = parts.settings.agent.node
    return SlurmCollector(NodeWatch(CommandSlurm(), node, period_s=parts.settings.slurm.interval_s), node)


def _infiniband(parts: Parts) -> Collector:
    settings = parts.settings.infiniband
    return InfinibandCollector(settings.root, interval_s=settings.interval_s)


def _nccl(parts: Parts) -> Collector:
    settings = parts.settings.nccl
    hosts = [(host.strip("[]"), int(port)) for host, _, port in (ras.rpartition(":") for ras in settings.ras)]
    return NcclCollector(parts.settings.ranks.root, addresses=hosts, ras_period_s=settings.interval_s)


COLLECTORS: tuple[tuple[str, Factory], ...] = (
    ("dcgm", lambda p: p.dcgm),
    ("nvml", _nvml),
    ("kmsg", lambda p: KmsgCollector(p.state and p.state / "kmsg.json", ledger=p.xids)),
    ("host", lambda p: HostCollector(mounts=p.settings.host.mounts)),
    ("infiniband", _infiniband),
    ("storage", lambda p: StorageCollector(paths=p.paths)),
    ("storage_net", lambda p: StorageNetCollector(interval_s=p.settings.storage_net.interval_s)),
    ("nvme", lambda p: NvmeCollector(interval_s=p.settings.nvme.interval_s)),
    ("slurm", _slurm),
    ("ranks", lambda p: p.ranks),
    ("nccl", _nccl),
    ("spare", lambda p: SpareCollector(p.state and p.state / SPARE)),
)
"""Section of the settings whose ``enabled`` decides, and how the collector is made."""


def build(settings: Settings, state: Path | None = None) -> list[Collector]:
    """The collectors that are enabled; ``state`` as in ``Parts``."""
    dcgm = DcgmCollector(settings.dcgm.url, period_s=settings.dcgm.interval_s)
    parts = Parts(settings, state, RanksCollector(settings.ranks.root, client), dcgm)
    return [make(parts) for section, make in COLLECTORS if getattr(settings, section).enabled]
