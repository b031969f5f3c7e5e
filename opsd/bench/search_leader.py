"""The leader of the search trials: ``python -m opsd.bench.search_leader ADDRESS NODES``, inside a namespace.

Searches once for every line on stdin and prints the culprits as a JSON list of strings.
"""

from __future__ import annotations

import json
import os
import sys

from opsd.preflight.network import plan
from opsd.preflight.network.rendezvous import place, use_interface
from opsd.preflight.network.team import Team, leading


def main(address: str, nodes: int) -> None:
    """Gather the nodes, then search on demand."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    use_interface(address)
    how = plan.effort("quick", gpus=False)
    team = Team(place(f"n[0-{nodes - 1}]", 0, address, {}))
    with leading(team, how.deadline_s) as leader:
        names = {node: member.name for node, member in leader.gather(team.join_s).items()}
        for _ in sys.stdin:
            diagnosis = plan.search(leader, names, {}, how, lambda _what: None)
            print(json.dumps([str(culprit) for culprit in diagnosis.culprits]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
