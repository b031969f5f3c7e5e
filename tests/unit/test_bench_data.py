"""The benchmark of the order of the samples."""

from __future__ import annotations

from opsd.bench.data import _alone, _growing, _ours


def test_memory_does_not_grow_with_the_samples() -> None:
    """From 1e3 to 1e13 samples the mixture takes no memory, and at both ends a sample costs about the same."""
    ours = _alone(_ours)
    assert ours["ours_memory_mib_1e3_to_1e13"] < 2
    assert ours["ours_flat_ratio"] < 3
    assert ours["ours_sample_us"] < 50


def test_the_growing_index_grows() -> None:
    """What the mixture is compared with keeps 16 bytes a sample."""
    small, large = (_alone(lambda size=size: _growing(size)) for size in (10**5, 10**6))
    assert large["growing_memory_mib_1e6"] > 15
    assert small["growing_memory_mib_1e5"] < large["growing_memory_mib_1e6"]
