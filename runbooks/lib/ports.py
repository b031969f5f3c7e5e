"""Pure helpers about RDMA ports: their names, their peers, and the ranks that depend on them."""

from __future__ import annotations

from collections.abc import Mapping

from opsd.collectors.base import RankFact
from opsd.runbooks.base import Series, View
from opsd.runbooks.lib.runs import ranks_of

Port = tuple[str, str]
"""Device and number of a port: ("mlx5_0", "1")."""


def by_port(view: View, metric: str, **labels: str) -> dict[Port, Series]:
    """The series of ``metric`` by port; ``labels`` must leave one for each."""
    return {port_of(series.labels): series for series in view.select(metric, **labels)}


def port_of(labels: Mapping[str, str]) -> Port:
    """The port that a series belongs to."""
    return labels["device"], labels["port"]


def name(port: Port) -> str:
    """The port in words; an adapter without a known port as a whole."""
    return f"{port[0]} port {port[1]}" if port[1] else port[0]


EXPECTED = "opsd_ib_port_expected_rate_bytes_per_second"
Role = tuple[str, str, str, bool]
"""Link layer, model of the adapter, its function on the bus, and whether the configuration names the port."""


def roles(view: View) -> dict[Port, Role]:
    """The role of each port; ports of one role are each other's peers.

    The second port of an adapter has a role of its own, as many sites do not connect it.
    """
    expected, about = by_port(view, EXPECTED), [series.labels for series in view.select("opsd_ib_port_info")]
    return {
        port_of(of): (
            of["link_layer"],
            of["board"],
            of["pci_bus_id"].rpartition(".")[2] or of["port"],
            port_of(of) in expected,
        )
        for of in about
    }


def dependent(view: View) -> RankFact | None:
    """A live rank whose run has ranks on other nodes as well, and so needs the network."""
    return next((r for r in view.ranks if r.live and r.world_size > len(ranks_of(view, r.run))), None)


def job_text(rank: RankFact | None) -> str:
    """Whether a job depends on the network, as a sentence."""
    if rank is None:
        return "no job of several nodes runs here"
    return f"{f'job {rank.job}' if rank.job else f'run {rank.run}'} has ranks on other nodes"
