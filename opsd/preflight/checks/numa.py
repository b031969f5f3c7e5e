"""NUMA: every node has cores and memory, the location of GPUs and network cards is known, and page migration is off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Final

from opsd.preflight.base import Check, Context, Finding, Measure, Measurement, Outcome, Progress, Verdict


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


_CLASSES: Final = {"0x0302": "GPU", "0x0300": "GPU", "0x0207": "InfiniBand card", "0x0200": "network card"}
_UNEVEN: Final = 0.10


def run(context: Context, progress: Progress) -> Outcome:
    """Compare memory between nodes and look up the node of every GPU and network card."""
    nodes = numa_nodes(context.sys)
    memory = {node: node_memory(context.sys, node) for node in nodes}
    findings = [*_uneven(memory), *_homeless(context.sys, len(nodes)), *_balancing(context.proc, len(nodes))]
    findings += [
        Finding(Verdict.WARN, f"NUMA node {node} has no cores", "check the BIOS setting of nodes per socket")
        for node, cores in nodes.items()
        if not cores
    ]
    return Outcome(
        (Measurement("nodes", len(nodes)), *(Measurement("memory", m, f"node {n}") for n, m in memory.items())),
        tuple(findings),
        {"NUMA nodes": str(len(nodes))},
    )


def _uneven(memory: dict[int, int]) -> Iterator[Finding]:
    normal = median(memory.values())
    for node, size in memory.items():
        if size < normal * (1 - _UNEVEN):
            summary = f"NUMA node {node} has {size / 2**30:.0f} GiB, the median node {normal / 2**30:.0f} GiB"
            yield Finding(
                Verdict.FAIL, summary, "a DIMM is missing or disabled; read the BMC's event log", f"node {node}"
            )


def _homeless(sys: str, nodes: int) -> Iterator[Finding]:
    """Devices whose NUMA node the firmware does not report, on a machine that has several."""
    devices = Path(sys, "bus/pci/devices")
    if nodes < 2 or not devices.is_dir():
        return
    for device in sorted(devices.iterdir()):
        kind = _CLASSES.get(_read(device / "class")[:6])
        if kind and _read(device / "numa_node") == "-1":
            advice = "pinning ranks to the right cores is guesswork; update the BIOS or set the affinity by hand"
            yield Finding(Verdict.WARN, f"the {kind} at {device.name} has no NUMA node", advice, device.name)


def _balancing(proc: str, nodes: int) -> Iterator[Finding]:
    if nodes > 1 and _read(Path(proc, "sys/kernel/numa_balancing")) == "1":
        summary = "automatic NUMA balancing is on and unmaps pages under the ranks"
        yield Finding(Verdict.WARN, summary, "sysctl -w kernel.numa_balancing=0")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


CHECK = Check(
    name="numa",
    title="NUMA layout and affinity",
    run=run,
    seconds=dict.fromkeys(("quick", "standard", "burn-in", "spare"), 1),
    measures=(Measure("nodes", "", "number of NUMA nodes"), Measure("memory", "bytes", "memory")),
    stable=True,
)
