"""The leader of the search trials: ``python -m opsd.bench.search_leader ADDRESS NODES``, inside a namespace.

Searches once for every line on stdin and prints the culprits as a JSON list of strings.
"""

from __future__ import annotations

import json
import os
import sys

from opsd.preflight.network import plan
from opsd.preflight.network.participant import Participant, leading
from opsd.preflight.network.rendezvous import place, use_interface


def main(address: str, nodes: int) -> None:
    """Gather the nodes, then search on demand."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    use_interface(address)
    how = plan.effort("quick", gpus=False)
    participant = Participant(place(f"n[0-{nodes - 1}]", 0, address, {}))
    with leading(participant, how.deadline_s) as coordinator:
        names = {node: member.name for node, member in coordinator.gather(participant.join_s).items()}
        for _ in sys.stdin:
            diagnosis = plan.search(coordinator, names, {}, how, lambda _what: None)
            print(json.dumps([str(culprit) for culprit in diagnosis.culprits]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
