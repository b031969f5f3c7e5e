"""Two sources about the same GPUs: which value counts, under which labels, and where they disagree. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Final

from opsd.collectors.base import GpuFact, Reading, Sample

DIFFER_S: Final = 120.0
"""Seconds after which a difference of values counts: DCGM refreshes its values every 30 s by default."""
_IDENTITY: Final = ("gpu", "UUID", "pci_bus_id", "device", "modelName", "Hostname", "hostname")

_Key = tuple[str, str, tuple[str, ...]]


class Comparison:
    """Merges the samples of a second source with the driver's on ``node``; in ``steady`` metrics the two must agree."""

    def __init__(self, steady: Collection[str], node: str) -> None:
        self._steady = steady
        self._node = node
        self._since: dict[_Key, float] = {}

    def merge(self, samples: Sequence[Sample], driver: Reading, now: float) -> tuple[list[Sample], tuple[str, ...]]:
        """The ``samples`` that the driver has no value of, under its labels; and on what the two disagree.

        All samples are kept where the driver tells nothing. Those of a GPU that it does not know are left out. Values
        must differ for ``DIFFER_S``; ``now`` is in monotonic seconds.
        """
        gpus = {fact.uuid: fact for fact in driver.facts if isinstance(fact, GpuFact) and fact.uuid}
        if not gpus:
            self._since.clear()
            return list(samples), ()
        names = {sample.metric.name for sample in samples}
        values = {key: one.value for one in driver.samples if one.metric.name in names and (key := _key(one))}
        kept, strange, differing = [], set(), set()
        for sample in samples:
            key = _key(sample)
            gpu = gpus.get(key[1]) if key else None
            if key and (what := _strange(sample, key[1], gpu)):
                strange.add(what)
            if key is None:
                kept.append(sample)
            elif key not in values:
                kept += [_renamed(sample, gpu, self._node)] if gpu else []
            elif values[key] != sample.value and key[0] in self._steady:
                differing.add(key)
        self._since = {key: self._since.get(key, now) for key in differing}
        lasting = {f"{name} of {uuid}" for (name, uuid, _), at in self._since.items() if now - at >= DIFFER_S}
        return kept, tuple(sorted(strange | lasting))


def _strange(sample: Sample, uuid: str, gpu: GpuFact | None) -> str:
    """What the driver knows otherwise about the GPU of a sample, "" if nothing."""
    if gpu is None:
        return f"{uuid or 'a GPU without UUID'}, which the driver does not know"
    return f"the index of {uuid}" if _label(sample, "gpu") != str(gpu.index) else ""


def _key(sample: Sample) -> _Key | None:
    """The identity of the sample: metric, UUID and the labels beyond the GPU's identity; None without a GPU."""
    uuid, rest = _places(sample.metric.labels)
    if uuid is None:
        return None
    labels = sample.labels
    return sample.metric.name, labels[uuid], tuple(labels[place] for place in rest) if rest else ()


@lru_cache(maxsize=256)
def _places(names: tuple[str, ...]) -> tuple[int | None, tuple[int, ...]]:
    """Where among the labels the UUID stands, and those beyond the GPU's identity."""
    rest = tuple(place for place, name in enumerate(names) if name not in _IDENTITY)
    return names.index("UUID") if "UUID" in names else None, rest


def _label(sample: Sample, name: str) -> str:
    return sample.labels[sample.metric.labels.index(name)]


def _renamed(sample: Sample, gpu: GpuFact, node: str) -> Sample:
    """The sample under the labels that the driver's series of this GPU have."""
    identity = (str(gpu.index), gpu.uuid, gpu.pci_bus_id, f"nvidia{gpu.index}", gpu.model, node, node)
    known = dict(zip(_IDENTITY, identity, strict=True))
    named = zip(sample.metric.labels, sample.labels, strict=True)
    return sample._replace(labels=tuple(known.get(name, value) for name, value in named))
