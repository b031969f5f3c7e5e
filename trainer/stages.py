"""How the layers of a model are divided among the stages of a pipeline. Torch-free and pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from opsd.trainer.counts import layer_flops
from opsd.trainer.model_settings import ModelSettings
from opsd.trainer.settings import ParallelSettings


def stage_ranges(model: ModelSettings, parallel: ParallelSettings, sequence: int) -> list[range]:
    """The layers of each stage: as ``parallel.stage_layers`` says, or so that the slowest has least to compute.

    The work of a layer is estimated from its shape, for sequences of ``sequence`` tokens. The last stage has the
    output projection as well.
    """
    costs = [layer_flops(model, layer, sequence) for layer in range(model.layers)]
    costs[-1] += 6.0 * model.vocab * model.width
    counts = parallel.stage_layers or divide(costs, parallel.stages)
    return [range(begin, end) for begin, end in pairwise([0, *accumulate(counts)])]


def divide(costs: Sequence[float], parts: int) -> list[int]:
    """How many of the ``costs`` each of ``parts`` gets, in order and at least one.

    The largest sum is as small as possible, and of such divisions the sums are as equal as possible.
    """
    sums = [0.0, *accumulate(costs)]
    enough = (sums[-1] / parts + max(costs)) * (1 + 1e-9)  # no part of the best division is larger
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for part in range(parts):
        left = parts - part - 1
        longer = {}
        for end in range(part + 1, len(costs) - left + 1):
            divisions = []
            for begin in reversed(range(part, end)):
                if (cost := sums[end] - sums[begin]) > enough:
                    break
                if begin in best:
                    largest, squares, counts = best[begin]
                    divisions.append((max(largest, cost), squares + cost * cost, [*counts, end - begin]))
            if divisions:
                longer[end] = min(divisions)
        best = longer
    return best[len(costs)][2]
