"""A rank's place in the parallel layout, from the process groups that the program makes and names.

Two sources: the dimensions of a device mesh over all ranks, and the groups of Megatron-LM, whose descriptions say what
they are for. Groups without a name, or of a kind that is not known here, tell nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

KINDS = ("dp", "pp", "tp", "cp")

_DIMENSIONS = {
    "dp": ("dp", "data", "data_parallel", "ddp", "dp_replicate", "dp_shard", "replicate", "shard", "fsdp", "batch"),
    "pp": ("pp", "pipe", "pipeline", "pipeline_parallel", "stage"),
    "tp": ("tp", "tensor", "tensor_parallel", "model", "model_parallel", "mp"),
    "cp": ("cp", "context", "context_parallel", "sp", "sequence", "sequence_parallel"),
}
_KIND_OF = {name: kind for kind, names in _DIMENSIONS.items() for name in names}
_GROUPS = {
    "data_parallel_group": "dp",
    "pipeline_model_parallel_group": "pp",
    "tensor_model_parallel_group": "tp",
    "context_parallel_group": "cp",
}


class Layout:
    """The place of ``rank`` among ``world`` ranks: ``place`` has a coordinate for each of ``KINDS``, or is None."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._groups: dict[str, tuple[int, int]] = {}
        self._dimensions = 0
        self.place: dict[str, int] | None = None

    def mesh(self, names: Sequence[str], shape: Sequence[int], at: Sequence[int]) -> None:
        """A mesh with these dimensions, in which this rank is ``at``. One with fewer dimensions replaces none."""
        kinds = [_KIND_OF.get(name.lower(), "") for name in names]
        if not all(kinds) or not len(kinds) == len(shape) == len(at) or prod(shape) != self._world:
            return
        if len(kinds) < self._dimensions:
            return
        place = dict.fromkeys(KINDS, 0)
        for kind, length, index in zip(kinds, shape, at, strict=True):
            place[kind] = place[kind] * length + index
        self.place, self._dimensions = place, len(kinds)

    def group(self, description: str, ranks: Sequence[int]) -> None:
        """A group with this description; those of the four kinds together must make up all ranks."""
        kind = _GROUPS.get(description.lower())
        if kind is None or self._rank not in ranks:
            return
        self._groups[kind] = ranks.index(self._rank), len(ranks)
        if len(self._groups) >= len(KINDS) - 1 and prod(size for _, size in self._groups.values()) == self._world:
            self.place = dict.fromkeys(KINDS, 0) | {name: index for name, (index, _) in self._groups.items()}
