"""Checks that shards that should differ do differ, and that copies that should be equal are equal.

SmolLM3 was trained for a trillion tokens with tensor-parallel shards drawn from the same seed; nothing crashed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from opsd.client import Reporter
from opsd.events import ReplicasDiffer, TpShardsEqual
from opsd.trainer.checksums import checksum
from opsd.trainer.model import Decoder
from opsd.trainer.regions import region_of
from opsd.trainer.world import World


@dataclass(frozen=True, slots=True)
class RegionChecksum:
    """The offset of a rank's region in its tensor, and the checksum of its bits."""

    offset: tuple[int, ...]
    checksum: str


Checksums = Mapping[str, RegionChecksum]

_COMPARED = ("tp", "replicate")
"""Mesh dimensions whose ranks are compared; ranks along dp have different parts of everything."""


class Audit:
    """Compares checksums of the parameters between ranks that share tensors or hold copies; all ranks call it together.

    Differences become the events ``tp_shards_equal`` and ``replicas_differ``, sent by the first rank of each group.
    """

    def __init__(self, model: Decoder, world: World, reporter: Reporter) -> None:
        self._regions = {name: region_of(value) for name, value in model.saved()}
        self._drawn = {name for name, region in self._regions.items() if len(region.shape) > 1}
        self._groups = [world.mesh.get_group(name) for name in world.mesh.mesh_dim_names or () if name in _COMPARED]
        self._groups += [world.ends] if world.ends is not None and model.shared else []
        self._shared = model.shared
        self._ends = world.ends
        self._reporter = reporter
        self._agreed: int | None = None

    def __call__(self, step: int) -> None:
        """Compare the parameters after ``step``."""
        if not self._groups:
            return
        marks = {
            name: RegionChecksum(region.offset, checksum(region.local))
            for name, region in self._regions.items()
            if region.local.numel()
        }
        differed = False
        for group in self._groups:
            mine = {name: marks[name] for name in self._shared & marks.keys()} if group is self._ends else marks
            gathered: list[Checksums] = [{}] * group.size()
            dist.all_gather_object(gathered, mine, group)
            differed |= self._compare(gathered, dist.get_process_group_ranks(group), step, tell=group.rank() == 0)
        self._agreed = self._agreed if differed else step

    def _compare(self, gathered: Sequence[Checksums], ranks: Sequence[int], step: int, *, tell: bool) -> bool:
        differing = list(different_copies(gathered))
        if tell:
            for holders, tensors in equal_shards(gathered, self._drawn).items():
                equal = TpShardsEqual(tensors=tensors, ranks=[ranks[place] for place in holders])
                self._reporter.event("tp_shards_equal", **equal)
            for tensor, places in differing:
                checksums = [gathered[place][tensor].checksum for place in places]
                fields = ReplicasDiffer(
                    step=step, tensor=tensor, ranks=[ranks[place] for place in places],
                    checksums=checksums, agreed=self._agreed,
                )  # fmt: skip
                self._reporter.event("replicas_differ", **fields)
        return bool(differing)


def equal_shards(gathered: Sequence[Checksums], drawn: Collection[str]) -> dict[tuple[int, ...], list[str]]:
    """Tensors with the same bits in different places, by the ranks, as indices of ``gathered``, that hold them.

    Only tensors in ``drawn``, which are initialised at random; tensors of ones are always equal.
    """
    found: dict[tuple[int, ...], list[str]] = {}
    for name in sorted(drawn & gathered[0].keys()):
        by_checksum: dict[str, dict[tuple[int, ...], int]] = {}
        for place, marks in enumerate(gathered):
            if name in marks:
                by_checksum.setdefault(marks[name].checksum, {}).setdefault(marks[name].offset, place)
        for places in by_checksum.values():
            if len(places) > 1:
                found.setdefault(tuple(places.values()), []).append(name)
    return found


def different_copies(gathered: Sequence[Checksums]) -> Iterator[tuple[str, list[int]]]:
    """Tensors whose copies of the same region differ, with the holders, as indices of ``gathered``."""
    for name in sorted(set[str]().union(*gathered)):
        by_offset: dict[tuple[int, ...], list[int]] = {}
        for place, marks in enumerate(gathered):
            if name in marks:
                by_offset.setdefault(marks[name].offset, []).append(place)
        for places in by_offset.values():
            if len({gathered[place][name].checksum for place in places}) > 1:
                yield name, places
