"""Fabrics and topologies of small clusters.

InfiniBand fabrics as ``ibnetdiscover`` prints them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from opsd.slurm.topology import parse

RAILS = Path(__file__).with_name("ibnetdiscover_rails.txt").read_text()
"""Printed by ibnetdiscover 44.0 in a fabric of ibsim 0.10: two units of three nodes, with a leaf for each rail."""


def printed(links: Iterable[tuple[str, str]], described: Mapping[str, str]) -> str:
    """A fabric as ibnetdiscover prints it; ids are S-… for switches and H-… for adapters."""
    pairs = [*links]
    blocks = []
    for one, name in described.items():
        kind, more = ("Switch 41", " enhanced port 0 lid 1 lmc 0") if one[0] == "S" else ("Ca 1", "")
        lines = [f'{kind} "{one}"\t\t# "{name}"{more}']
        for port, peer in enumerate((b if a == one else a for a, b in pairs if one in (a, b)), start=1):
            lines.append(f'[{port}]\t"{peer}"[1](b83fd203) \t\t# "{described[peer]}" lid 22 4xNDR')
        blocks.append("\n".join(["vendid=0x2c9", "devid=0xd2f2", *lines]))
    return "#\n# Topology file: generated on Fri Jul 19 02:49:25 2024\n#\n" + "\n\n".join(blocks) + "\n"


# Topologies of small clusters, for tests of what goes by them.


TREE = parse("""
SwitchName=leaf1 Nodes=n[1-4]
SwitchName=leaf2 Nodes=n[5-8]  # full
SwitchName=leaf3 LinkSpeed=400 Nodes=n[9-12]
SwitchName=leaf4 Nodes=n[13-14]
switchname=spine1 switches=leaf[1-2]
SwitchName=spine2 Switches=leaf[3-4]
SwitchName=core Switches=spine[1-2]
""")


def all_equal(*numbers: int) -> dict[str, float]:
    return {f"n{number}": 0.0 for number in numbers}


BLOCKS = parse(
    "BlockName=rack1 BlockIndex=0 Nodes=c[01-18] BlockSize=18\nBlockName=rack2 Nodes=c[19-36]\nBlockSizes=18,36"
)
