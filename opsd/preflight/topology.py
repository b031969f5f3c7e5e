"""Which cores, memory and PCI devices belong together, from sysfs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def parse_list(text: str) -> frozenset[int]:
    """The numbers of a kernel list such as "0-3,8,10-11". Raises ValueError."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def numa_nodes(sys: str = "/sys") -> Mapping[int, frozenset[int]]:
    """Cores of every NUMA node; a kernel without NUMA has one node with all online cores."""
    folder = Path(sys, "devices/system/node")
    nodes = {
        int(path.name.removeprefix("node")): parse_list((path / "cpulist").read_text(encoding="ascii"))
        for path in sorted(folder.glob("node[0-9]*"))
    }
    return nodes or {0: parse_list(Path(sys, "devices/system/cpu/online").read_text(encoding="ascii"))}


def node_memory(sys: str, node: int) -> int:
    """Bytes of memory of a NUMA node, 0 if it has none."""
    text = Path(sys, f"devices/system/node/node{node}/meminfo").read_text(encoding="ascii")
    return next((int(line.split()[3]) << 10 for line in text.splitlines() if "MemTotal:" in line), 0)
