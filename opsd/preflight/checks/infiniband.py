"""InfiniBand and RoCE ports: up, at full rate, and without flaps or symbol errors since the last run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mode
from typing import Final

from opsd.collectors.infiniband import ACTIVE, PortReading, chosen, read_port
from opsd.preflight.base import (
    Bounds,
    Check,
    Context,
    Finding,
    Measure,
    Measurement,
    NotApplicableError,
    Outcome,
    Progress,
    Verdict,
)  # fmt: skip

_STATES: Final = {1: "down", 2: "initialising", 3: "armed"}
_COUNTERS: Final = {
    "flaps": "counters/link_downed",
    "symbol_errors": "counters/symbol_error",
    "recoveries": "counters/link_error_recovery",
}


def run(context: Context, progress: Progress) -> Outcome:
    """Read every port of every adapter."""
    folders = sorted(
        folder for folder in Path(context.sys, "class/infiniband").glob("*/ports/*") if used(folder, context)
    )
    if not folders and not context.ports_expected:
        raise NotApplicableError("no InfiniBand, RoCE or EFA adapter on this node")
    ports = {f"{folder.parent.parent.name} port {folder.name}": read_port(folder) for folder in folders}
    layers = {port: _link_layer(folder) for port, folder in zip(ports, folders, strict=True)}
    measurements: list[Measurement] = [Measurement("active_ports", sum(r.state == ACTIVE for r in ports.values()))]
    findings = [*missing(folders, context.ports_expected)]
    for port, reading in ports.items():
        rates = [other.rate for name, other in ports.items() if other.rate and layers[name] == layers[port]]
        expected = (
            context.settings.infiniband_gbps * 1e9 / 8
            if context.settings.infiniband_gbps
            else mode(rates)
            if rates
            else None
        )
        findings += judge(port, reading, expected)
        measurements += [
            Measurement(measure, reading.counters[file], port)
            for measure, file in _COUNTERS.items()
            if file in reading.counters
        ]
    return Outcome(tuple(measurements), tuple(findings), {"ports": str(len(ports))})


def used(folder: Path, context: Context) -> bool:
    """Whether the port of this folder (.../DEVICE/ports/PORT) is one that the configuration wants to be looked at."""
    port = folder.parent.parent.name, folder.name
    expected = not context.ports_expected or chosen(port, context.ports_expected)
    return expected and not chosen(port, context.ports_left_out)


def missing(folders: Sequence[Path], expected: Sequence[str]) -> Iterator[Finding]:
    """What the configuration expects and no port fits."""
    there = [(folder.parent.parent.name, folder.name) for folder in folders]
    for pattern in expected:
        if not any(chosen(port, (pattern,)) for port in there):
            advice = "check that the adapter is on the bus: `lspci -d 15b3:`"
            yield Finding(Verdict.FAIL, f"{pattern} is expected and not there", advice, pattern)


def _link_layer(folder: Path) -> str:
    try:
        return (folder / "link_layer").read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def judge(port: str, reading: PortReading, expected: float | None) -> Iterator[Finding]:
    """The problems of a port whose rate should be ``expected`` bytes per second."""
    if reading.state is None:
        advice = "check that its driver is loaded: `ibv_devinfo`"
        yield Finding(Verdict.COULD_NOT_RUN, f"{port} does not tell its state", advice, port)
    elif reading.state != ACTIVE:
        state = _STATES.get(reading.state, f"in state {reading.state}")
        yield Finding(Verdict.FAIL, f"{port} is {state}", "check cable, switch port and subnet manager: `ibstat`", port)
    elif expected is not None and (reading.rate or 0.0) < expected:
        rates = f"{(reading.rate or 0.0) * 8e-9:g} of {expected * 8e-9:g} Gbit/s"
        yield Finding(
            Verdict.FAIL, f"{port} runs at {rates}", "reseat or replace the cable, then its transceivers", port
        )


CHECK = Check(
    name="infiniband",
    title="InfiniBand and RoCE ports",
    run=run,
    seconds=dict.fromkeys(("quick", "standard", "burn-in", "spare"), 1),
    measures=(
        Measure("active_ports", "", "number of active ports", "higher", noise=0.001),
        # Five flaps in 24 h fail: azurehpc-health-checks, IB link flapping.
        Measure("flaps", "", "number of lost links", growth=Bounds(warn=1, fail=5), required=False),
        # 120 symbol errors an hour are NVSentinel's bound.
        Measure("symbol_errors", "", "symbol errors", growth=Bounds(warn=120, fail=120 * 24), required=False),
        Measure("recoveries", "", "link error recoveries", growth=Bounds(warn=5), required=False),
    ),
    advice="a port that flaps cuts every collective of the job; replace the cable, then the transceivers",
    stable=True,
)
