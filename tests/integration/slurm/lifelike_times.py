"""How long recoveries take on the test cluster, for the simulator: in runs of their own, one fault after the other."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from statistics import fmean

from opsd.launch.run.aggregation import AGGREGATION_S
from opsd.simulate.job import Times
from tests.integration.slurm.cluster import Cluster
from tests.integration.slurm.lifelike import ACTIVE, NODES, STEP_S, Comparison, Strike, Struck, restored, run

SETTLED_S = 4.0
"""Between the first step after a fault and the next fault."""
LIMIT_S = 120.0
Run = tuple[str, int, Sequence[str]]
RUNS: Sequence[Run] = (
    ("hot", 3, ("process", "lost", "lost", "leader")),
    ("hot", 3, ("hardware", "launcher", "leader")),
    *[("requeue", 0, ("lost", "lost"))] * 3,
    ("requeue", 0, ("leader",)),
    ("pool", 0, ("lost", "lost", "lost")),
)
"""Policy, spares inside the job, faults; "leader" is the loss of the leader's node, "lost" that of another."""


def measured(
    cluster: Cluster, note: Callable[[str], None], runs: Sequence[tuple[str, int, Sequence[str]]] = RUNS
) -> Times:
    """The times of ``cluster``: means from a fault to the begin of the first step after it."""
    found: dict[str, list[float]] = defaultdict(list)
    for number, (kind, inside, faults) in enumerate(runs):
        struck = Struck(cluster, f"times-{number}", kind, inside)
        with restored(cluster):
            struck.start()
            for what in faults:
                time.sleep(SETTLED_S)
                taken_s = _recovery_s(struck, what)
                found[f"{kind} {what}"].append(taken_s)
                note(f"{kind}, {what}: {taken_s:.2f} s")
    return fitted({name: fmean(values) for name, values in found.items()})


def compare(seeds: Iterable[int], note: Callable[[str], None]) -> list[Comparison]:
    """The sequences of ``seeds`` on a cluster whose times are measured first."""
    with Cluster(NODES) as cluster:
        times = measured(cluster, note)
        note(str(times))
        return run(times, seeds, note, cluster)


def _recovery_s(run: Struck, what: str) -> float:
    training = run.training
    leader = training.places.index(training.leader)
    others = (place for place in count(ACTIVE - 1, -1) if place != leader)
    place = leader if what == "leader" else next(others)
    before = training.metrics()[-1]["generation"]
    struck = run.strike(Strike(0.0, "lost" if what == "leader" else what, place))  # type: ignore[arg-type]
    training.until(lambda: training.metrics()[-1]["generation"] > before, f"steps after {what}", LIMIT_S)
    *_, (_, first) = run.gaps()
    return float(first["t"] - STEP_S - run.origin - struck.at_s)


def fitted(mean_s: Mapping[str, float]) -> Times:
    """What the simulator needs, of the means by policy and fault. The leader's own wait is its code's. Pure."""
    usual, swap_s = Times(), mean_s["hot lost"]
    change_s = swap_s - usual.silence_s
    requeue_s = mean_s["requeue lost"]
    return Times(
        swap_s=swap_s,
        succession_s=mean_s["hot leader"],
        closed_s=max(0.0, mean_s["hot launcher"] - change_s),
        noticed_s=max(0.0, mean_s["hot hardware"] - change_s - AGGREGATION_S),
        restart_s=mean_s["hot process"] - AGGREGATION_S,
        requeue_s=requeue_s,
        fetch_s=mean_s["pool lost"] - swap_s,
        agent_s=0.0,
        slurm_notices_s=mean_s["requeue leader"] - (requeue_s - usual.silence_s),
    )
