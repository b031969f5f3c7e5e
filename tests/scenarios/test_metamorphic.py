"""Timelines that are changed in what must not matter: see ``tests.fakes.metamorphic``."""

import random
from pathlib import Path

import pytest

from opsd.scenarios.model import files, load
from tests.fakes.metamorphic import TRANSFORMATIONS, differences

FOLDER = Path(__file__).parent


def missing(*about: object) -> str:
    """What ``differences`` says of an incident of the job that does not open."""
    return f"missing: {(*about, '4242')}"


BY_KIND = {path.parent.name: path for path in reversed([*files(FOLDER)]) if load(path).expect}
"""One timeline with a fault of each kind: the first by its name."""
CASES = [(path, name) for path in BY_KIND.values() for name in TRANSFORMATIONS]
FOUND = [
    (FOLDER / file, name)
    for file, name in (
        ("oom_kill/a_rank.toml", "ranks blind"),
        ("gradient_explosion/growing.toml", "agent restarts early"),
        ("storage_slow/evicted_shards.toml", "agent restarts"),
        ("straggler/announced_clocks.toml", "nvml blind"),
        ("checkpoint_slow/falls_behind.toml", "events twice"),
        ("checkpoint_corrupt/healed_by_the_next_save.toml", "run ends while open"),
        ("loss_rising/falls_again.toml", "agent restarts early"),
        ("clock_skew/back.toml", "events twice"),
        ("gpu_xid/asked_without_xid.toml", "ranks blind early"),
        ("oom_kill/a_rank.toml", "ends, node boots"),
        ("rank_crash/ambiguous_cuda_error.toml", "ends, node boots"),
        ("gpu_driver_failed/library_replaced.toml", "ends, node boots"),
        ("disk_errors/array_degraded_before.toml", "agent restarts early"),
    )
]
"""Differences that there have been."""
RIGHT = {
    # No launcher is left that would restart the rank that hangs: a person is told.
    ("dataloader_stall/healthy_stopped_rank", "run ends while open"): ["told 1 more times: rank_hang"],
    ("dataloader_stall/healthy_stopped_rank", "ends, GPUs idle"): ["told 1 more times: rank_hang"],
    # Without its run a throttle is less grave. It is critical once the run is seen again, which is told.
    ("node_throttle/all_by_heat", "ranks blind early"): ["told 1 more times: node_throttle"],
    # A reset heals corrected errors. A burst that comes back after one is a reason to replace the GPU.
    ("gpu_ecc/corrected_burst", "ends, node boots"): ["told 1 more times: gpu_ecc"],
    # The run trained again before anybody could read of the crash. Its cause is told.
    ("host_memory/a_rank_is_killed", "events late"): [missing("rank_crash", "smol/generation 1/rank 2", "rank", 2, 2)],
    ("oom_kill/a_rank", "events late"): [missing("rank_crash", "smol/generation 1/rank 2", "rank", 2, 2)],
    ("oom_kill/a_rank", "ranks blind early"): [missing("rank_crash", "smol/generation 1/rank 2", "rank", 2, 2)],
    # A rank page has no step that was done a minute ago, at eight steps a second.
    ("checkpoint_slow/falls_behind", "events late"): [missing("checkpoint_slow", "smol", "storage", None, None)],
    # It lasted for ten seconds that nobody saw.
    ("gradient_explosion/calms_down", "ranks blind early"): [
        missing("gradient_explosion", "smol", "unknown", None, None)
    ],
    # The rank was slow for 55 s, of which 20 were not seen: too few are left to be sure of it.
    ("gpu_throttle/adopts_its_straggler", "ranks blind early"): [missing("straggler", "smol/rank 2", "gpu", 2, 2)],
    # What slows the rank could not be seen when the launcher told of it: it is told by itself, and its cause later.
    ("straggler/announced_clocks", "nvml blind early"): ["told 1 more times: straggler"],
    # The clock was low for 15 s, and not read for 9 s of them. The throttle is named as the cause all the same.
    ("gpu_throttle/adopts_its_straggler", "nvml blind early"): [
        missing("straggler", "smol/rank 2", "gpu", 2, 2),
        f"extra: {('straggler', 'smol/rank 2', 'rank', 2, 2, '4242')}",
    ],
}
"""Differences that matter."""
SAMPLED = [
    *FOUND,
    *random.Random(32).sample([case for case in CASES if case not in FOUND], 6),
]


def _named(value):
    return value if isinstance(value, str) else f"{value.parent.name}/{value.stem}"


@pytest.mark.parametrize(("path", "name"), SAMPLED, ids=_named)
def test_what_must_not_matter_changes_nothing(path, name):
    """The same incidents, culprits and jobs, each once, and nothing stays open whose condition is over."""
    assert differences(load(path), name) == RIGHT.get((_named(path), name), [])


@pytest.mark.long
@pytest.mark.parametrize(("path", "name"), CASES, ids=_named)
def test_nothing_that_must_not_matter_changes_anything(path, name):
    """The same for a fault of every kind and every transformation."""
    assert differences(load(path), name) == RIGHT.get((_named(path), name), [])
