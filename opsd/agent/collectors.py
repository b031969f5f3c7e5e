"""Every collector of the agent, made from the settings. A new one is a line here and a section in ``opsd.config``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from collectors.base import Collector
from collectors.host import HostCollector
from collectors.infiniband import InfinibandCollector
from collectors.kmsg import KmsgCollector
from collectors.nvme import NvmeCollector
from collectors.nvml import NvmlCollector
from collectors.ranks import RanksCollector
from collectors.storage import StorageCollector, StorageNetCollector
from collectors.xid import XidLedger
from opsd import client
from opsd.config import Settings


@dataclass(frozen=True, slots=True)
class Parts:
    """What collectors are made from. ``state`` is where they may keep what outlives the agent, None for nowhere.

    Sources of Xids share the ledger, which tells each Xid once.
    """

    settings: Settings
    state: Path | None
    xids: XidLedger = field(default_factory=XidLedger)


Factory = Callable[[Parts], Collector]

COLLECTORS: tuple[tuple[str, Factory], ...] = (
    ("nvml", lambda p: NvmlCollector(p.settings.nvml.library, hostname=p.settings.agent.node, xids=p.xids)),
    ("kmsg", lambda p: KmsgCollector(p.state and p.state / "kmsg.json", ledger=p.xids)),
    ("host", lambda p: HostCollector(mounts=p.settings.host.mounts)),
    ("infiniband", lambda _: InfinibandCollector()),
    ("storage", lambda _: StorageCollector()),
    ("storage", lambda _: StorageNetCollector()),
    ("storage", lambda _: NvmeCollector()),
    ("ranks", lambda p: RanksCollector(p.settings.ranks.root, client)),
)
"""Section of the settings whose ``enabled`` decides, and how the collector is made."""


def build(settings: Settings, state: Path | None = None) -> list[Collector]:
    """The collectors that are enabled; ``state`` as in ``Parts``."""
    parts = Parts(settings, state)
    return [make(parts) for section, make in COLLECTORS if getattr(settings, section).enabled]
