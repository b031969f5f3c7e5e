"""A network port works but has errors: bit errors, retransmissions, messages of the adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from opsd.runbooks import nic_failed
from opsd.runbooks.base import Cost, Culprit, Finding, Incident, Runbook, Series, Severity, View
from opsd.runbooks.lib.ports import Port, dependent, job_text, name, port_of, roles
from opsd.runbooks.lib.remedies import notify_node
from opsd.runbooks.lib.signals import due, each_minute, grouped, growth, hours_until, said, text

ERRORS = "opsd_ib_errors_total"

BIT_ERRORS = ("symbol_error", "port_rcv_errors", "local_link_integrity_errors")
RECOVERIES = ("link_error_recovery",)
REPEATS = ("packet_seq_err", "local_ack_timeout_err", "roce_adp_retrans", "retrans_pkts", "retrans_timeout_events")
"""Bit errors; link retraining; packets that were lost and sent again."""

FAST_S, FAST = 10.0, 100.0
"""Ten bit errors a second are a link that is about to fail (NVSentinel calls that fatal) ..."""

SLOW_S, SLOW, SLOW_MINUTES = 600.0, 20.0, 4
"""... and 120 in an hour one that will, if four minutes have as many as that makes: a burst is in two at most."""

RECOVERIES_LIMIT = 2.0
REPEATS_S, REPEATS_LIMIT, REPEATS_FACTOR = 60.0, 100.0, 10.0
"""Packets sent again matter on a port that has many more of them than its peers: all alike is congestion."""

LOOK_EVERY_S = 10.0
QUIET_S = 300.0
FAST_A_MINUTE = FAST / FAST_S * 60
HORIZON_H = 24.0
ELSEWHERE = nic_failed.CAUSES | {"Cable unplugged"}
"""What the driver says of a failed adapter, and of a lost link, which ``ib_link`` handles."""


@dataclass(frozen=True, slots=True)
class _Fault:
    port: Port
    what: str
    fast: bool = False


def _counters(view: View, errors: Sequence[str]) -> Iterator[tuple[Port, str, Series]]:
    """The counters of these errors that have ever counted anything."""
    for series in view.select(ERRORS):
        labels = series.labels
        if labels["error"] in errors and series.last:
            yield port_of(labels), labels["error"], series


def _fast(view: View) -> Iterator[_Fault]:
    for port, error, series in _counters(view, BIT_ERRORS):
        if growth(series, FAST_S) >= FAST:
            yield _Fault(port, f"more than {FAST / FAST_S:.0f} {error} a second", True)


def _slow(view: View) -> Iterator[_Fault]:
    for port, error, series in _counters(view, BIT_ERRORS):
        grown = growth(series, SLOW_S)
        minutes = each_minute(series, SLOW_S) if grown >= SLOW else []
        if sum(count >= SLOW * 60.0 / SLOW_S for count in minutes) >= SLOW_MINUTES:
            yield _Fault(port, f"{grown:.0f} {error} in ten minutes{_outlook(minutes)}")
    for port, error, series in _counters(view, RECOVERIES):
        if (grown := growth(series, SLOW_S)) >= RECOVERIES_LIMIT:
            yield _Fault(port, f"{grown:.0f} {error} in ten minutes")


def _outlook(minutes: Sequence[float]) -> str:
    """When errors will come ten a second if they go on growing in number, "" if they do not or not within a day."""
    hours = hours_until(FAST_A_MINUTE, minutes)
    return "" if hours is None or hours > HORIZON_H else f", at this growth ten a second in {hours:.1f} hours"


def _lossy(view: View) -> Iterator[_Fault]:
    """Ports that send far more packets again than their peers do."""
    again = dict.fromkeys((port_of(series.labels) for series in view.select(ERRORS)), 0.0)
    for port, _, series in _counters(view, REPEATS):
        again[port] += growth(series, REPEATS_S)
    alike = roles(view)
    for port, count in again.items():
        others = [other for p, other in again.items() if p != port and alike.get(p) == alike.get(port)]
        if count >= REPEATS_LIMIT and others and count >= REPEATS_FACTOR * median(others):
            yield _Fault(port, f"sent {count:.0f} packets again in a minute, its peers {median(others):.0f}")


def _complaints(view: View) -> Iterator[_Fault]:
    """Messages of the adapter's driver in the last minutes, except what it says of one that has failed."""
    ports = {s.labels["pci_bus_id"]: port_of(s.labels) for s in view.select("opsd_ib_port_info")}
    said = [(text(event.data, "pci_bus_id"), text(event.data, "cause")) for event in view.events("nic_error", SLOW_S)]
    failed = {pci for pci, cause in said if cause in nic_failed.CAUSES}
    for pci, cause in said:
        if pci not in failed and cause not in ELSEWHERE:
            yield _Fault(ports.get(pci, (f"the adapter at {pci}", "")), f"its driver says: {cause}")


def _detect(view: View) -> Iterator[Finding]:
    counters = view.select(ERRORS)
    faults = [*_fast(view), *_complaints(view)]
    if counters and due(counters[0], LOOK_EVERY_S):
        faults += [*_slow(view), *_lossy(view)]
    return (_finding(view, port, of_port) for port, of_port in grouped(faults, lambda fault: fault.port).items())


def _finding(view: View, port: Port, faults: Sequence[_Fault]) -> Finding:
    rank = dependent(view)
    what = list(dict.fromkeys(fault.what for fault in faults))
    return Finding(
        key=f"{view.node}/{'/'.join(port)}",
        severity=Severity.WARNING,
        summary=f"{name(port)} on {view.node}: {' and '.join(what)}",
        culprit=Culprit("network", view.node, detail=name(port)),
        confidence=0.9 if any(fault.fast for fault in faults) else 0.8,
        evidence=said(view, "infiniband", *what, job_text(rank)),
        cost=Cost(text="packets that are sent again slow the collectives of every node" if rank else ""),
        job=rank.job if rank else "",
        data={"port": list(port)},
    )


def _healed(incident: Incident, view: View) -> bool | None:
    """True after quiet minutes; None if the port's counters cannot be read."""
    listed = incident.data.get("port")
    port = tuple(map(str, listed)) if isinstance(listed, list | tuple) else ()
    mine = [series for series in view.select(ERRORS) if port_of(series.labels) == port]
    if not any(series.last is not None for series in mine):
        return None
    if any(fault.port == port for find in (_fast, _slow, _lossy, _complaints) for fault in find(view)):
        return False
    allowed = {**dict.fromkeys(BIT_ERRORS, SLOW * QUIET_S / SLOW_S), **dict.fromkeys(RECOVERIES, 1.0)}
    return all(
        growth(series, QUIET_S) < limit
        for series in mine
        if series.last and (limit := allowed.get(series.labels["error"])) is not None
    )


RUNBOOK = Runbook(
    detect=_detect,
    remedy=notify_node(": clean or replace cable and module before the link is lost", swap=True),
    healed=_healed,
    needs=("infiniband",),
    clear_after_s=10.0,
    verify_s=3600.0,
    prediction=True,
)
