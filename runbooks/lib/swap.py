"""The planned swap, the remedy of runbooks that need another node."""

from __future__ import annotations

from collections.abc import Iterator

from opsd.runbooks.base import Action, Incident, View
from opsd.runbooks.lib.runs import ranks_of, supervised


def swap_out(incident: Incident, view: View) -> Iterator[Action]:
    """A planned swap of this node for every run that has ranks here and on other nodes and a live launcher.

    The agent asks the launcher for a swap if there is a spare, and drains the node if permitted.
    """
    for run in view.runs:
        here = [rank for rank in ranks_of(view, run.run) if rank.live]
        if here and run.world_size > len(here) and supervised(view, run.run):
            args = {"node": view.node, "control": run.control, "incident": incident.id, "kind": incident.kind}
            yield Action("swap_node", view.node, args, incident.summary)
