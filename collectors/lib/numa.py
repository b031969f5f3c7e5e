"""Memory of the NUMA nodes: what is left of each, and how often the kernel had to take another node's. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

NODES: Final = Path("devices/system/node")


class NumaNode(NamedTuple):
    """One node. ``missed`` are allocations that were meant for it and went elsewhere, since the start."""

    name: str
    total_bytes: int
    free_bytes: int
    missed: int


def parse_meminfo(text: str) -> dict[str, int]:
    """Bytes by name from a node's ``meminfo``, whose lines begin with "Node 0 MemTotal:  131 kB"."""
    fields = (line.split() for line in text.splitlines())
    return {field[2].rstrip(":"): int(field[3]) * 1024 for field in fields if len(field) == 5}


def parse_numastat(text: str) -> dict[str, int]:
    """Counts by name from a node's ``numastat``."""
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}


def read_nodes(sys: Path) -> list[NumaNode]:
    """The nodes that have memory, by number; none on a kernel without NUMA."""
    found = []
    for folder in sorted((sys / NODES).glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        try:
            memory = parse_meminfo((folder / "meminfo").read_text(encoding="utf-8"))
            counts = parse_numastat((folder / "numastat").read_text(encoding="utf-8"))
        except FileNotFoundError:  # taken offline between the listing and now
            continue
        if memory.get("MemTotal"):
            missed = counts.get("numa_foreign", 0)
            found.append(NumaNode(folder.name[4:], memory["MemTotal"], memory.get("MemFree", 0), missed))
    return found
