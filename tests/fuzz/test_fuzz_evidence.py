"""Whatever the kernel log, RAS and other evidence say."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from hypothesis import strategies as st

from opsd.agent.web import api
from opsd.collectors.base import Event, Fact, GpuFact, Metric, RankFact, Reading, RunFact, Sample, StepFact
from opsd.collectors.lib.nccl.ras import MAX_RANKS, RasError, parse_status
from opsd.collectors.lib.run_files import EVENTS
from opsd.scenarios.node import COLLECTORS
from tests.fakes.facts import rank
from tests.fakes.fuzzing import AMOUNTS, changed, encoded, fuzz, json_values, objects
from tests.fakes.kmsg import FALLEN, XID_31, XID_79, read
from tests.fakes.kmsg import Node as KernelLogNode
from tests.fakes.pipeline import Pipeline
from tests.fakes.ras import GREETING, missing_rank, ras_json, ras_rank, ras_text

# Whatever evidence meets whatever other: series that come and go, clocks that jump, ranks and processes that ended.


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


# Whatever stands in the kernel log: drivers log what hardware and processes say, and processes may write into it.


MESSAGES = (
    XID_31, XID_79, FALLEN,
    "NVRM: Xid (PCI:0000:3b:00): 63, pid=1, name=x, Row Remapper: New row (0x0000000012345678) marked for remapping",
    "NVRM: Xid (PCI:0000:3b:00): 94, pid=7, name=python, Contained: SM (0x1). RST: No, D-RST: No",
    "NVRM: Xid (PCI:0000:3b:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 03 (0x004505c6 0x00000000 0x00000000 0x0 0x0)",
    "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
    "mlx5_core 0000:17:00.0: temperature_warning_event:718:(pid 0): High temperature on sensors with bit set 0 1",
    "Out of memory: Killed process 4242 (python) total-vm:1kB, anon-rss:2kB, file-rss:0kB, shmem-rss:0kB, UID:1000",
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,task=python,pid=4242,uid=1000",
    "nvme nvme0: I/O 5 QID 3 timeout, aborting", "EXT4-fs error (device sda1): ext4_find_entry:1455: inode #2",
    "mce: [Hardware Error]: Machine check events logged", "INFO: task python:4242 blocked for more than 120 seconds.",
    "nfs: server files not responding, still trying", "CPU3: Core temperature above threshold, cpu clock throttled",
)  # fmt: skip

RECORDS = tuple(f"6,{n},{n}000000,-;{text}\n SUBSYSTEM=pci\n".encode() for n, text in enumerate(MESSAGES, start=1))

KERNEL_SEEDS: tuple[bytes, ...] = (
    b"6," + b"9" * 5000 + b",1,-;x\n",
    b"6,1," + b"9" * 100 + b",-;" + XID_31.encode() + b"\n",
    b"6,1,1,+;\\x0a\\x0a\n",
    b"-1,-1,-1,c;NVRM: Xid (PCI:0000:3b:00): 99999999999999999999, \xff\n",
    "6,1,1,-;NVRM: Xid (PCI:0000:3b:00): ²31\n".encode(),
    b"6,1,1000000,-;nfs: server files not responding, still tryi" + b"[" * 400 + b"\n",
    b"6,1,1000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=x, " + b"[" * 400 + b"\n",
)


@AMOUNTS
def test_no_record_is_a_bug(amount: int, memory_folder: Path) -> None:
    """Damaged, continued, from any facility: events, counts and incidents can be passed on."""
    numbers = itertools.count()

    def look(records: list[bytes]) -> None:
        node = KernelLogNode(memory_folder / str(next(numbers) % 8))
        agent, pipeline = node.agent(injected=True), Pipeline()
        read(agent)
        for record in records:
            node.log.write_raw(record)
            node.clock.advance(1.0)
            pipeline.tick(node.clock.now, node.clock.wall(), {"kmsg": read(agent)})

    fuzz(look, st.lists(changed(*RECORDS), min_size=1, max_size=4), amount, [[seed] for seed in KERNEL_SEEDS])


@AMOUNTS
def test_no_position_is_a_bug(amount: int, memory_folder: Path) -> None:
    """The file with the last record read, damaged or of another program."""

    def look(content: bytes) -> None:
        node = KernelLogNode(memory_folder)
        node.state.write_bytes(content)
        node.say(XID_31)
        read(node.agent())

    usual = b'{"boot_id": "boot-1", "sequence": 7}'
    fuzz(look, changed(usual), amount, [b'{"boot_id": "boot-1", "sequence": 1e999}', b"[" * 5000])


# Whatever listens on the port of NCCL's RAS: any user of the node can.


JSON = ras_json([ras_rank(0, {"AllReduce": 5}), ras_rank(1, {"AllReduce": 6}, async_error=6)], [missing_rank(2)])

TEXT = ras_text(
    "#0-0 (1c0f) INCOMPLETE\n  Missing 1 rank\n  Rank 3 -- GPU 3 managed by process 77 on node n7\n",
    "#0-0 (1c0f) MISMATCH\n  Communicator ranks have different collective operation counts\n"
    "  29 ranks have launched up to operation 6\n"
    "  Rank 3 -- GPU 3 managed by process 77 on node n7 has launched up to operation 5\n",
)

RAS_SEEDS: tuple[bytes, ...] = (
    (GREETING + "[" * 100_000).encode(),
    (GREETING + '{"nccl_version": "x", "communicators": [{"hash": 1, "ranks": [], "missing_ranks": {}}]}').encode(),
    JSON.replace('"pid": 1000', '"pid": 1e999').encode(),
    JSON.replace("10.0.0.1", "\\ud800").encode(),
    TEXT.replace("77", "²7").encode(),
    TEXT.encode() + b"#" * 200_000,
)

COMMUNICATOR = {
    "hash": "0x8a1b", "size": 2, "ranks": [ras_rank(0, {}), ras_rank(1, {"AllReduce": 1})], "missing_ranks": [],
}  # fmt: skip


def status(communicator: object) -> bytes:
    return GREETING.encode() + encoded({"nccl_version": "2.28.9", "communicators": [communicator]})


@AMOUNTS
def test_no_answer_is_a_bug(amount: int) -> None:
    """It is a status whose parts are bounded and can be sent, or a sentence; and it takes no long."""

    def parse(answer: bytes) -> None:
        began = time.process_time()
        with suppress(RasError):
            for problem in parse_status(answer).problems:
                api.encode(problem.text).decode()
                assert len(problem.ranks) <= MAX_RANKS and all(len(rank.host) <= 64 for rank in problem.ranks)
                (problem.communicator + problem.text + "".join(rank.host for rank in problem.ranks)).encode()
        assert time.process_time() - began < 2.0

    answers = changed(JSON.encode(), TEXT.encode()) | objects(COMMUNICATOR).map(status) | json_values.map(status)
    fuzz(parse, answers, amount, RAS_SEEDS)
