"""``python -m opsd.launch.hangs.gpu_probe PID…``: what each process and its descendants do on the GPUs, as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence

from opsd.collectors.lib.nvml.driver import DeviceUse, Driver, NvmlError, device_use
from opsd.launch.hangs.activity import process_tree
from opsd.launch.hangs.gpus import GpuState, Sample, state_of

LOOK_S = 2.0
_SAMPLE_S = 0.25
"""NVML's own samples cover 1/6 s to 1 s."""


def samples_of(tree: frozenset[int], looks: Sequence[DeviceUse]) -> list[Sample]:
    """What a tree of processes did on one GPU in several looks at it; empty if that is not known.

    NVML has samples of single processes; without them (MIG, some drivers), the GPU's own speak for its only user.
    """
    holders = frozenset[int]().union(*(look.holders for look in looks))
    if not holders & tree:
        return []
    if holders <= tree:
        return [Sample(look.kernels, look.work) for look in looks]
    if any(look.processes is None for look in looks):
        return []
    # Only processes that did anything are listed.
    return [Sample(*(look.processes or {}).get(pid, (0, 0))) for look in looks for pid in holders & tree]


def report(trees: Mapping[int, frozenset[int]], uses: Mapping[int, Sequence[DeviceUse]]) -> list[dict[str, object]]:
    """An entry for each process of which something is known, by its tree."""
    entries: list[dict[str, object]] = []
    for pid, tree in trees.items():
        found = {gpu: samples for gpu, looks in uses.items() if (samples := samples_of(tree, looks))}
        if found:
            every = [sample for samples in found.values() for sample in samples]
            states = {state_of(samples) for samples in found.values()}
            busiest = max(states, key=list(GpuState).index)
            kernels, work = (max(sample[i] for sample in every) for i in (0, 1))
            entries.append({"pid": pid, "gpus": sorted(found), "state": busiest, "kernels": kernels, "work": work})
    return entries


def main() -> None:
    """Look for ``LOOK_S`` seconds; prints nothing where there is no driver."""
    try:
        driver = Driver()
    except NvmlError:
        return
    uses: dict[int, list[DeviceUse]] = {index: [] for index in range(driver.count)}
    since = time.time()
    while time.time() - since < LOOK_S:
        time.sleep(_SAMPLE_S)
        for index, found in uses.items():
            if (use := device_use(index, since)) is not None:
                found.append(use)
    trees = {pid: frozenset(process_tree(pid)) for pid in map(int, sys.argv[1:])}
    print(json.dumps(report(trees, uses)))


if __name__ == "__main__":
    main()
