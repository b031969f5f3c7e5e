"""The InfiniBand ports of a simulated node: their series, and what the agent's own link history makes of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from opsd.collectors.base import Event, Reading, Sample
from opsd.collectors.infiniband import ERRORS, FLAPS, RATE, STATE
from opsd.collectors.lib.ib_link import LinkHistory, PortReading


class SimulatedPorts:
    """Turns the values of port series into the events and flap counts that the collector would deliver with them."""

    def __init__(self) -> None:
        self._links: defaultdict[tuple[str, ...], LinkHistory] = defaultdict(LinkHistory)

    def read(self, samples: Sequence[Sample], now: float, wall: float) -> Reading:
        """The reading of ``samples`` at monotonic second ``now`` and epoch second ``wall``."""
        rates = {sample.labels: sample.value for sample in samples if sample.metric is RATE}
        downed = {s.labels[:2]: int(s.value) for s in samples if s.metric is ERRORS and s.labels[2] == "link_downed"}
        flaps, events = list[Sample](), list[Event]()
        for port, state in ((sample.labels, int(sample.value)) for sample in samples if sample.metric is STATE):
            link = self._links[port]
            looked = PortReading(state, None, rates.get(port), {})
            happened = link.update(looked, downed.get(port), now) if state else link.gone(now)
            flaps.append(Sample(FLAPS, link.flaps, port))
            about = {"device": port[0], "port": port[1], "link_layer": "InfiniBand"}
            events += [Event(kind, wall, f"port {port[1]} of {port[0]} {what}", {**about, **data})
                       for kind, what, data in happened]  # fmt: skip
        return Reading((*samples, *flaps), tuple(events))
