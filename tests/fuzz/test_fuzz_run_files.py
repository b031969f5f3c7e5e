"""Whatever a user writes into rank pages, ``run.json`` and event files: no bug, and no metric that nobody can read."""

from __future__ import annotations

import itertools
import os
import shutil
import struct
import time
import zlib
from pathlib import Path

import pytest
from hypothesis import strategies as st

from opsd import client
from opsd.collectors.base import Reading
from opsd.collectors.lib.run_files import EVENTS
from opsd.collectors.ranks import RanksCollector
from tests.fakes.fuzzing import AMOUNTS, NUMBERS, changed, encoded, fuzz, json_lines, objects
from tests.fakes.pipeline import Pipeline

RUN_JSON = {
    "run": "smol", "job": "42", "node": "n7", "state": "running", "generation": 2, "launcher_pid": os.getpid(),
    "launcher_start": client.process_start(os.getpid()), "world_size": 2, "folder": "/runs/smol",
    "control": "/dev/shm/opsd/smol/control.sock", "logs": "/runs/smol/logs",
}  # fmt: skip
_EVENT = {
    "t": 1.0, "event": "", "rank": 0, "step": 7, "node": "n7", "generation": 1, "phase": "data", "ranks": [{"rank": 0}],
    "culprit": True, "exit": "signal SIGKILL", "why": "w", "results": {"loss": 1.0}, "tokens": {"web": 5},
    "epochs": {"web": 0.5}, "tensor": "w", "tensors": ["w"], "checksums": ["a", "b"], "agreed": 3, "lost": "n8",
    "reason": "r", "evidence": ["e"], "limit_s": 5.0, "stuck_s": 9.0, "stacks": "f", "error": {"type": "E"},
    "recovered_s": 1.0, "lost_steps": 2, "previous_step": 9, "world_size": 2, "exit_code": 1, "silent_s": 1.0,
    "file": "f", "load_s": 1.0, "tier": "disk", "pid": 5, "signal": "SIGTERM", "reference": {"loss": 2.0},
}  # fmt: skip
EVENT_LINES = json_lines(*({**_EVENT, "event": name} for name in sorted(EVENTS)))

SEEDS: tuple[bytes, ...] = (
    encoded({"event": "checkpoint_loaded", "t": 10**400, "step": 10**400}),
    encoded({"event": "hang_detected", "rank": "\ud800", "ranks": None}),
    b'{"event": "rank_exited", "rank": 0, "generation": 2, "step": 1e999, "culprit": true}',
    b'{"event": "evaluation", "results": {"loss": NaN, "x": 1e999}}',
    b'{"event": "rank_exited", "rank": ' + b"[" * 5000,
    encoded({"event": "replicas_differ", "ranks": [[]], "checksums": {}}),
    encoded({"event": "replay_differs", "ranks": [[]], "checksums": [1, {}], "neighbour": [], "agreed": {}}),
)
RUN_SEEDS: tuple[bytes, ...] = (
    encoded({**RUN_JSON, "generation": True, "world_size": 10**30}),
    encoded({**RUN_JSON, "folder": "/a\0b", "job": ["\ud800"]}),
)


class Node:
    """A node with one run in shared memory, which the agent has never seen before."""

    def __init__(self, folder: Path) -> None:
        self._root = folder
        self._names = itertools.count()

    def look(self, files: dict[str, bytes], ticks: int = 2) -> None:
        """Let an agent read a run folder with these files, ``ticks`` times."""
        folder = self._root / str(next(self._names)) / "smol"
        folder.mkdir(parents=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        agent, pipeline = RanksCollector(folder.parent), Pipeline()
        for _ in range(ticks):
            reading = agent.collect()
            assert isinstance(reading, Reading)
            pipeline.tick(time.monotonic(), time.time(), {"ranks": reading})
        shutil.rmtree(folder.parent)


@pytest.fixture
def node(memory_folder: Path) -> Node:
    return Node(memory_folder)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A page with a dozen steps and two helper processes."""
    path = tmp_path_factory.mktemp("page") / "rank-0000.page"
    reporter = client.Reporter(path, world_size=2, gpu=0, node="n7", job="42", run="smol")
    reporter.model(flops_per_token=6e9, peak_flops=9e14)
    for step in range(12):
        with reporter.phase("data"):
            pass
        reporter.step(tokens=512, loss=2.0 / (step + 1), grad_norm=1.0, learning_rate=1e-3)
    return path.read_bytes()


def test_the_untouched_page_is_read(node: Node, page: bytes) -> None:
    """Or nothing below would be tried."""
    agent = RanksCollector(node._root)
    (node._root / "smol").mkdir()
    (node._root / "smol" / "rank-0000.page").write_bytes(page)
    (node._root / "smol" / "run.json").write_bytes(encoded(RUN_JSON))
    reading = agent.collect()
    assert isinstance(reading, Reading) and len(reading.facts) == 2


_EDGES = [n for n in NUMBERS if isinstance(n, int) and 0 <= n < 2**64]
_WORDS = (st.sampled_from(_EDGES) | st.integers(0, 2**64 - 1)).map(lambda word: struct.pack("<Q", word))
_FLOATS = st.floats().map(lambda number: struct.pack("<d", number))
_FIELDS = st.lists(st.tuples(st.integers(0, client.PAGE_BYTES // 8 - 1), _WORDS | _FLOATS), max_size=6)
"""Words and numbers put into the page at multiples of eight bytes."""
_HEAD_FIELDS = st.lists(st.tuples(st.integers(0, client.HEADER.size // 8 - 1), _WORDS), max_size=2)


def written(page: bytes, fields: list[tuple[int, bytes]], head: list[tuple[int, bytes]]) -> bytes:
    """``page`` with other words in it; the checksum of its header and the copies of the slots' numbers are right."""
    content = bytearray(page)
    for place, word in (*fields, *head):
        content[8 * place : 8 * place + 8] = word
    content[: len(client.MAGIC)] = client.MAGIC
    content[8:10] = struct.pack("<H", client.MAJOR)
    content[client.HEADER.size : client.HEADER.size + 4] = struct.pack("<I", zlib.crc32(content[: client.HEADER.size]))
    for at in (client.SLOTS_AT, client.SLOTS_AT + client.SLOT_STRIDE):
        last = at + client.SLOT.size - 8
        content[last : last + 8] = content[at : at + 8]
    for at in range(client.RING_AT, client.PAGE_BYTES, client.STEP_STRIDE):
        last = at + client.STEP.size - 24
        content[last : last + 8] = content[at : at + 8]
    return bytes(content)


@AMOUNTS
def test_no_rank_page_is_a_bug(amount: int, node: Node, page: bytes) -> None:
    """With any numbers in valid places, and as any bytes."""
    filled = st.builds(written, st.just(page), _FIELDS, _HEAD_FIELDS)
    fuzz(lambda content: node.look({"rank-0000.page": content}), filled | changed(page), amount)


@AMOUNTS
def test_no_run_json_is_a_bug(amount: int, node: Node) -> None:
    """Its launcher lives: this process."""
    lines = objects(RUN_JSON).map(encoded) | json_lines(RUN_JSON)
    fuzz(lambda content: node.look({"run.json": content}), lines, amount, RUN_SEEDS)


@AMOUNTS
def test_no_event_is_a_bug(amount: int, node: Node, page: bytes) -> None:
    """Of the launcher or of a rank; every kind that the agent knows."""

    def look(lines: list[bytes]) -> None:
        content = b"".join(line + b"\n" for line in lines)
        files = {"events.jsonl": content, "rank-0000.page.events.jsonl": content}
        node.look({**files, "run.json": encoded(RUN_JSON), "rank-0000.page": page})

    fuzz(look, st.lists(EVENT_LINES, min_size=1, max_size=4), amount, [[seed] for seed in SEEDS])
