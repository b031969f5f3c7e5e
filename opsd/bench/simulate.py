"""``opsd bench simulate``: the same random faults on a real Slurm cluster in namespaces and in ``opsd simulate``.

How long recoveries take is measured first, in other runs. Then both play the same sequences.
"""

from __future__ import annotations

from typing import Any

from opsd.bench.swap import on_the_cluster

TRIALS = 20
SEED = 1


def run(trials: int = TRIALS, seed: int = SEED) -> dict[str, Any]:
    """Seconds of standstill and steps done again, on the cluster and simulated, and how many sequences agree.

    Sequence n has the seed ``seed`` + n. Raises ScenarioError if no cluster can be started.
    """
    found = on_the_cluster("lifelike_times").compare(range(seed, seed + trials), lambda text: print(text, flush=True))
    real = {name: sum(getattr(one.real, name) for one in found) for name in ("standstill_s", "lost_steps")}
    simulated = {name: sum(getattr(one.simulated, name) for one in found) for name in real}
    return {
        "ours_sequences": len(found),
        "ours_faults": sum(len(one.faults) for one in found),
        **{f"ours_cluster_{name}": round(value, 1) for name, value in real.items()},
        **{f"ours_simulated_{name}": round(value, 1) for name, value in simulated.items()},
        **{f"ratio_{name}": round(simulated[name] / value, 3) for name, value in real.items() if value},
        "ours_agreeing_standstill": sum(one.standstill_agrees for one in found),
        "ours_agreeing_lost_steps": sum(one.lost_steps_agree for one in found),
    }
