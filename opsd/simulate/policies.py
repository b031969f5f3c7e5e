"""What can be done about faults: the policies that are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

WAIT_S: Final = 300.0
"""``WAIT`` of train-pool.sbatch."""
GROW_S: Final = 60.0
"""Default of ``opsd launch --grow-after``."""
NAMES: Final = ("torchrun", "requeue", "hot", "pool", "shrink")


@dataclass(frozen=True, slots=True)
class Policy:
    """``inside`` spares are in the job; ``least`` nodes are enough to go on.

    With ``fetch`` a node is fetched for a lost one, for which a run that has too few waits ``wait_s`` seconds. After
    ``grow_s`` seconds of missed work a run takes in more nodes. Without ``opsd`` it is torchrun and sbatch --requeue.
    """

    name: str
    told: str
    least: int
    inside: int = 0
    wait_s: float = 0.0
    grow_s: float = 0.0
    fetch: bool = False
    opsd: bool = True


def policy(name: str, nodes: int, *, inside: int, least: int) -> Policy:
    """The policy ``name`` for a run of ``nodes`` nodes; ``inside`` is for hot, ``least`` for shrink."""
    match name:
        case "torchrun":
            return Policy(name, "torchrun and sbatch --requeue, no opsd", nodes, opsd=False)
        case "requeue":
            return Policy(name, "back into the queue (train-requeue.sbatch)", nodes)
        case "hot":
            return Policy(name, f"{inside} of the spares inside the job (train-spares.sbatch)", nodes, inside=inside)
        case "pool":
            return Policy(name, "spares fetched from a pool (train-pool.sbatch)", nodes, wait_s=WAIT_S, fetch=True)
        case "shrink":
            told = f"the same, going on with {least} nodes or more"
            return Policy(name, told, least, wait_s=WAIT_S, grow_s=GROW_S, fetch=True)
    raise ValueError(f"there is no policy {name!r}; there are {', '.join(NAMES)}")
