"""InfiniBand fabrics as ``ibnetdiscover`` prints them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

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
