"""Whatever evidence meets whatever other: series that come and go, clocks that jump, ranks and processes that ended."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping

from hypothesis import strategies as st

from opsd.collectors.base import Event, Fact, GpuFact, Metric, RankFact, Reading, RunFact, Sample, StepFact
from opsd.collectors.lib.run_files import EVENTS
from opsd.scenarios.node import COLLECTORS
from tests.fakes.facts import rank
from tests.fakes.fuzzing import AMOUNTS, fuzz
from tests.fakes.pipeline import Pipeline

KINDS = (
    *sorted(EVENTS), "xid", "xid", "xid", "sxid", "gpu_driver_loaded", "hung_task", "ib_link_up", "ib_rate_changed",
    "nccl_flight_recorder", "nccl_log", "nccl_ras", "network_filesystem_lost", "network_filesystem_restored",
    "nic_error", "oom_kill", "pcie_error", "pcie_unrecoverable",
)  # fmt: skip
FIELDS = (
    "action", "agreed", "before", "before_bytes_per_second", "checksums", "code", "committed", "confidence",
    "count", "culprit", "culprits", "device", "down_s", "error", "evidence", "exit", "flight_recorder", "kind",
    "lost", "message", "neighbour", "node", "phase", "pid", "port", "process", "quiet_s", "ranks", "reason",
    "record", "reference", "results", "scope", "seconds", "server", "silent_s", "source", "stacks", "step",
    "stuck_s", "tensor", "uid", "uuid", "verdict", "where", "why", "world_size",
)  # fmt: skip
LABELS: Mapping[str, tuple[str, str]] = {
    "gpu": ("0", "1"), "UUID": ("GPU-0", "GPU-1"), "pci_bus_id": ("00000000:1A:00.0", "00000000:1B:00.0"),
    "run": ("smol", "other"), "rank": ("0", "1"), "phase": ("data", "collective"),
}  # fmt: skip
AMOUNT = (0.0, 1.0, 2.0, 0.5, 100.0, -1.0, math.nan, math.inf, -math.inf, 1e308, 1e-308, 1e18)
FEW_OF = 5
"""A timeline takes as long as some inputs of the other targets."""


class Node:
    """Two GPUs, two runs of three ranks, every collector; drawn anew in part with each tick."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self._share = self.draw.choice((0.1, 0.5, 0.9))
        self._kinds = self.draw.sample(KINDS, 3)
        self._series = {name: self._samples(metrics) for name, metrics in COLLECTORS.items()}
        self._facts = self._seen(0.0)

    def readings(self, now: float, wall: float) -> dict[str, Reading | None]:
        """What each collector delivers, None if it fails."""
        draw = self.draw
        if draw.random() < 0.3:
            self._facts = self._seen(now)
        for name, metrics in COLLECTORS.items():
            if draw.random() < 0.3:
                self._series[name] = self._samples(metrics)
        return {name: None if draw.random() < 0.1 else self._reading(name, wall) for name in COLLECTORS}

    def _reading(self, name: str, wall: float) -> Reading:
        draw = self.draw
        samples = [
            sample._replace(value=sample.value + draw.choice((0.0, 0.0, draw.random(), 1e6)))
            for sample in self._series[name]
            if draw.random() < 0.9
        ]
        events = [self._event(wall) for _ in range(draw.randrange(4))] if name in ("ranks", "kmsg", "nccl") else []
        return Reading(tuple(samples), tuple(events), self._facts.get(name, ()))

    def _samples(self, metrics: tuple[Metric, ...]) -> list[Sample]:
        """One or two series of some ``metrics``."""
        draw, found = self.draw, []
        for metric in metrics:
            for number in range(draw.randrange(1, 3) if draw.random() < self._share else 0):
                labels = tuple(LABELS.get(label, ("a", "b"))[number] for label in metric.labels)
                found.append(
                    Sample(metric, draw.choice(AMOUNT) if draw.random() < 0.5 else 100 * draw.random(), labels)
                )
        return found

    def _event(self, wall: float) -> Event:
        draw = self.draw
        data = {field: self._value() for field in draw.sample(FIELDS, draw.randrange(len(FIELDS)))}
        about = {"run": "smol", "rank": draw.randrange(3), "generation": draw.randrange(3)}
        at = wall - draw.choice((-5, 0, 1, 10, 100, 4_000, 90_000))
        where = {"pci_bus_id": LABELS["pci_bus_id"][0]} if draw.random() < 0.8 else {}
        return Event(draw.choice(self._kinds), at, "said", {**data, **about, **where}, draw.choice((None, 1000)))

    def _value(self, depth: int = 2) -> object:
        draw, kind = self.draw, self.draw.random()
        if kind < 0.4:
            return draw.choice((0, 1, 2, 3, -1, 13, 31, 43, 48, 63, 79, 94, 154, 10**17, *AMOUNT))
        if kind < 0.8:
            return draw.choice(("", "smol", "0", "gpu0", "GPU-0", "restart_app", "reset_gpu", "none", "data", "a/b"))
        if kind < 0.9 or not depth:
            return draw.choice((None, True, False))
        values = [self._value(depth - 1) for _ in range(draw.randrange(4))]
        return values if draw.random() < 0.5 else dict(zip(draw.sample(FIELDS, len(values)), values, strict=True))

    def _seen(self, now: float) -> dict[str, tuple[Fact, ...]]:
        draw = self.draw
        gpus = [
            GpuFact(number, draw.choice((uuid, uuid, "")), pci, "NVIDIA H100", lost=draw.choice((None, None, "gone")))
            for number, (uuid, pci) in enumerate(zip(LABELS["UUID"], LABELS["pci_bus_id"], strict=True))
            if draw.random() < 0.8
        ]
        ranks = [self._rank(run, number, now) for run in LABELS["run"] for number in range(3) if draw.random() < 0.6]
        runs = [
            RunFact(
                run, "", "node", draw.choice(("running", "spare", "finished")), draw.randrange(2), 5,
                draw.random() < 0.5, draw.choice((0, 1, 16)), f"/shm/{run}/control.sock", "/runs", "/runs/logs", 1000,
            )
            for run in LABELS["run"]
            if draw.random() < 0.6
        ]  # fmt: skip
        return {"nvml": tuple(gpus), "ranks": (*ranks, *runs)}

    def _rank(self, run: str, number: int, now: float) -> RankFact:
        draw = self.draw
        since = now - draw.choice((*AMOUNT, draw.random()))
        return rank(
            number, run=run, world_size=draw.choice((0, 1, 16)), generation=draw.randrange(3), user=1000,
            gpu=draw.choice((None, 0, 1, 9)), state=draw.choice(("running", "finished", "failed")),
            process=draw.choice((None, "S", "R", "D", "Z", "T")), phase=draw.choice(("data", "collective", "setup")),
            phase_since=since, changed=since, committed_step=draw.choice((None, 0, 3, -1)),
            workers=draw.choice(((), ((7, "loader"),))), steps=tuple(self._steps(now)),
        )  # fmt: skip

    def _steps(self, now: float) -> Iterator[StepFact]:
        draw, count = self.draw, self.draw.randrange(20)
        for number in range(count):
            took, loss, norm = draw.choice((1.0, 0.0, 5.0)), draw.choice((2.0, *AMOUNT)), draw.choice((1.0, *AMOUNT))
            yield StepFact(number, now - count + number, took, 512, loss, norm, {"data": draw.random()})


# what made a runbook raise: an endless clock mask, recovery action, wear of a drive, number in an event
SEEDS = (10, 101, 191, 35, 844070)


@AMOUNTS
def test_no_evidence_is_a_bug(amount: int) -> None:
    """All runbooks, also about incidents whose evidence is gone, and by the word of kernel and drivers alone."""

    def look(seed: int) -> None:
        node, pipeline, now, wall = Node(seed), Pipeline(), 1000.0, 1.76e9
        for _ in range(node.draw.choice((2, 4, 8))):
            passed, stepped = node.draw.choice((1, 1, 1, 2, 40)), node.draw.choice((0, 0, 0, 0, -3600, 3600, -1e9))
            now, wall = now + passed, wall + passed + stepped
            pipeline.clock_stepped(stepped)
            pipeline.tick(now, wall, node.readings(now, wall), exported=False)

    fuzz(look, st.integers(0, 2**32), amount // FEW_OF, SEEDS)
