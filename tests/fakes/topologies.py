"""Topologies of small clusters, for tests of what goes by them."""

from __future__ import annotations

from opsd.slurm.topology import parse

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
