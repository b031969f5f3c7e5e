"""An InfiniBand or RoCE port has lost its link, runs below its rate, or flaps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from opsd.runbooks.base import Cost, Culprit, Finding, Incident, Runbook, Severity, View
from opsd.runbooks.lib.ports import EXPECTED, Port, by_port, dependent, job_text, name, port_of, roles
from opsd.runbooks.lib.remedies import notify_node
from opsd.runbooks.lib.signals import grouped, growth, number, said, text

STATE, PHYSICAL = "opsd_ib_port_state", "opsd_ib_port_physical_state"
RATE, FLAPS = "opsd_ib_port_rate_bytes_per_second", "opsd_ib_link_flaps_total"

ACTIVE = 4.0
PHASES: Mapping[float, str] = {
    2.0: "it looks for a signal: cable, transceiver or the switch's port",
    3.0: "it was disabled, here or at the switch",
    4.0: "it trains and does not get further",
    5.0: "its link is up and waits for the subnet manager",
    6.0: "it recovers from errors",
}
"""Physical state of a port that is not active, and what it says about the cause."""

PAST_S = 600.0
DOWN_S, UNUSED_S, NEVER_UP_S = 3.0, 30.0, 60.0
"""Seconds without a link: under a job, on a node without one, and for a port that has never been up while its peers
are. The last is what a boot takes."""

FLAPS_LIMIT = 2.0
LONG_S, LONG_DOWN_S, LONG_LIMIT = 12 * 3600.0, 25.0, 3
"""Links lost in ten minutes, or for at least 25 s each in twelve hours (gpud's rule): a link that flaps."""

QUIET_S = 300.0


@dataclass(frozen=True, slots=True)
class _Fault:
    port: Port
    what: str
    down: bool


def _down(view: View) -> Iterator[_Fault]:
    """Ports without a link that have had one, or whose peers have."""
    states, alike, expected = by_port(view, STATE), roles(view), by_port(view, EXPECTED)
    hold = DOWN_S if dependent(view) else UNUSED_S
    for port, series in states.items():
        if series.last is None or series.last == ACTIVE:
            continue
        points = series.values(PAST_S)
        lost = max((at for at, state in points if state == ACTIVE), default=None)
        up = [s.last == ACTIVE for p, s in states.items() if alike.get(p) == alike.get(port)]
        wanted = port in expected if expected else sum(up) > len(up) / 2
        if lost is None and wanted and view.now - points[0][0] >= NEVER_UP_S:
            why = "the configuration expects one" if expected else "its peers have one"
            yield _Fault(port, f"has no link, {why}", True)
        elif lost is not None and view.now - lost > hold:
            yield _Fault(port, "is gone" if series.last == 0 else "has lost its link", True)


def _slow(view: View) -> Iterator[_Fault]:
    """Ports below the rate that is expected, that their peers have, or that they had some minutes ago."""
    alike, expected, rates = roles(view), by_port(view, EXPECTED), by_port(view, RATE)
    for port, rate in ((port, series.last) for port, series in rates.items()):
        if rate is None:
            continue
        peers = [other.last for p, other in rates.items() if alike.get(p) == alike.get(port) and other.last is not None]
        best = (expected[port].last if port in expected else None) or median(peers)
        if not rates[port].unchanged(PAST_S):
            best = max(best, *(before for _, before in rates[port].values(PAST_S)))
        if rate < best:
            yield _Fault(port, f"runs at {rate * 8 / 1e9:g} instead of {best * 8 / 1e9:g} Gbit/s", False)


def _flapping(view: View) -> Iterator[_Fault]:
    """Ports that have lost their link again and again."""
    back = [event.data for event in view.events("ib_link_up", LONG_S)]
    slow = (of for of in back if (number(of, "down_s") or 0.0) >= LONG_DOWN_S)
    long = Counter((text(of, "device"), text(of, "port")) for of in slow)
    for port, series in by_port(view, FLAPS).items():
        lost = growth(series, PAST_S) if series.last else 0.0
        if lost >= FLAPS_LIMIT:
            yield _Fault(port, f"lost its link {lost:.0f} times in ten minutes", False)
        elif long[port] >= LONG_LIMIT:
            yield _Fault(port, f"lost its link for a while {long[port]} times in twelve hours", False)


def _detect(view: View) -> Iterator[Finding]:
    down = list(_down(view))
    if len(down) > 1 and len(down) == len(view.select(STATE)):
        every = [_Fault(fault.port, "lost their link", True) for fault in down]
        yield _finding(view, f"{view.node}/every port", f"all {len(down)} ports", every)
        return
    for port, found in grouped((*down, *_slow(view), *_flapping(view)), lambda fault: fault.port).items():
        yield _finding(view, f"{view.node}/{'/'.join(port)}", name(port), found)


def _finding(view: View, key: str, who: str, faults: Sequence[_Fault]) -> Finding:
    rank = dependent(view)
    what = " and ".join(dict.fromkeys(fault.what for fault in faults))
    ports = list(dict.fromkeys(fault.port for fault in faults))
    physical = by_port(view, PHYSICAL)
    why = {PHASES.get(s.last or 0.0, "") for f in faults if f.down and (s := physical.get(f.port)) is not None}
    facts = [*(f"{name(fault.port)} {fault.what}" for fault in faults), *sorted(why), job_text(rank)]
    return Finding(
        key=key,
        severity=Severity.CRITICAL if rank and any(fault.down for fault in faults) else Severity.WARNING,
        summary=f"{who} on {view.node} {what}",
        culprit=Culprit("network", view.node, detail=f"{who} {what}"),
        confidence=0.9,
        evidence=said(view, "infiniband", *facts),
        cost=Cost(text="collectives with other nodes wait for this port, until NCCL gives up" if rank else ""),
        job=rank.job if rank else "",
        data={"ports": [list(port) for port in ports]},
    )


def _healed(incident: Incident, view: View) -> bool | None:
    """True after quiet minutes with the link up at its rate; None if a port cannot be read."""
    listed = incident.data.get("ports")
    wanted = {(str(device), str(port)) for device, port in listed} if isinstance(listed, list | tuple) else set()
    states = {port: series.last for port, series in by_port(view, STATE).items()}
    if any(states.get(port) is None for port in wanted):
        return None
    slow = {fault.port for fault in _slow(view)}
    restless = {port_of(s.labels) for s in view.select(FLAPS) if growth(s, QUIET_S)}
    return all(states[port] == ACTIVE for port in wanted) and not wanted & (slow | restless)


RUNBOOK = Runbook(
    detect=_detect,
    remedy=notify_node(": look at cable, transceiver and switch"),
    healed=_healed,
    needs=("infiniband",),
    clear_after_s=10.0,
    verify_s=1800.0,
)
