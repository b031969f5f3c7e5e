"""Remedies that several runbooks share: a notification, and the planned swap of the node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from opsd.runbooks.base import Action, Incident, Remedy, Runbook, View
from opsd.runbooks.lib.runs import ranks_of, supervised
from opsd.runbooks.lib.signals import text


def notify_run(advice: str = "") -> Remedy:
    """A remedy that only notifies about the incident's run, or about this node if it has none.

    ``advice`` follows the summary.
    """
    return lambda incident, view: (notice(text(incident.data, "run") or view.node, incident, advice),)


def notify_node(advice: str = "", *, swap: bool = False) -> Remedy:
    """The same about this node; with ``swap`` the node is swapped out of its runs as well."""

    def remedy(incident: Incident, view: View) -> Sequence[Action]:
        return (*(swap_out(incident, view) if swap else ()), notice(view.node, incident, advice))

    return remedy


def notice(target: str, incident: Incident, advice: str) -> Action:
    """Tell people of ``incident``, with the ``advice`` that follows its summary, as ": reboot the node"."""
    args = {"advice": advice.lstrip(":; ")} if advice else {}
    return Action("notify", target, args, f"{incident.summary}{advice}")


RunRunbook = partial(Runbook, needs=("ranks",), proved_by="run", remedy=notify_run())
"""A runbook about what only the ranks of a run tell, and only while it trains."""


def notify_unsupervised(incident: Incident, view: View) -> Sequence[Action]:
    """A remedy that notifies if no launcher restarts the run."""
    run = text(incident.data, "run")
    if supervised(view, run):
        return ()
    return (notice(run, incident, "; no opsd launcher is there to restart it"),)


def drain_only(incident: Incident, view: View) -> Action:
    """No new job on this node; what runs there goes on."""
    args = {"node": view.node, "incident": incident.id, "kind": incident.kind}
    return Action("drain_node", view.node, args, incident.summary)


def swap_out(incident: Incident, view: View) -> Iterator[Action]:
    """A planned swap of this node for every run that has ranks here and on other nodes and a live launcher.

    The agent asks the launcher for a swap if there is a spare, and drains the node if permitted. A node without ranks
    on GPUs is drained only: jobs of any kind end there first. Ranks without one are what any user can say; their runs
    come last.
    """
    drain = drain_only(incident, view)
    swapped, on_gpus = False, {rank.run for rank in view.ranks if rank.live and rank.gpu is not None}
    for run in sorted(view.runs, key=lambda run: run.run not in on_gpus):
        here = [rank for rank in ranks_of(view, run.run) if rank.live]
        if here and run.world_size > len(here) and supervised(view, run.run):
            swapped = True
            yield Action("swap_node", view.node, {**drain.args, "control": run.control}, incident.summary)
    if not swapped and not on_gpus:
        yield drain
