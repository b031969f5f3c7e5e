"""``opsd bench faults``: runs with a sequence of random faults, on a real Slurm cluster in namespaces.

Each is compared with an undisturbed run: the same steps, each loss equal to the last bit, also in repeated steps, and a
ledger that sums to the elapsed time.
"""

from __future__ import annotations

from typing import Any

from opsd.bench.swap import on_the_cluster

TRIALS = 20
SEED = 1


def run(trials: int = TRIALS, seed: int = SEED) -> dict[str, Any]:
    """``ours_ended_well`` of ``ours_sequences``, the seeds of the failed ones, and the largest error of a ledger.

    Sequence n has the seed ``seed`` + n. Raises ScenarioError if no cluster can be started.
    """
    found = on_the_cluster("sequences").run(range(seed, seed + trials), lambda text: print(text, flush=True))
    bad = [number for number, outcome in found.items() if outcome.problems]
    return {
        "ours_sequences": len(found),
        "ours_ended_well": len(found) - len(bad),
        "ours_failed_seeds": " ".join(map(str, bad)),
        "ours_faults": sum(len(outcome.faults) for outcome in found.values()),
        "ours_generations": sum(outcome.generations for outcome in found.values()),
        "ours_ledger_error_max": max((outcome.ledger_error for outcome in found.values()), default=0.0),
        "ours_wall_s": round(sum(outcome.wall_s for outcome in found.values()), 1),
    }
