"""Whatever a user writes into files of runs: no bug, and one sentence."""

from __future__ import annotations

import itertools
import os
import shutil
import struct
import time
import zlib
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import strategies as st

from opsd import client
from opsd.agent.web.ledgers import forecast_of
from opsd.checkpoints import manifest
from opsd.checkpoints.manifest import CheckpointError, FileEntry, Manifest
from opsd.checkpoints.sealed import seal
from opsd.collectors.base import Reading
from opsd.collectors.lib.run_files import EVENTS
from opsd.collectors.ranks import RanksCollector
from opsd.ledger.for_user import records_for_user
from opsd.ledger.ledger import LedgerError
from opsd.plan.forecast import BadPlan, Planned, Progress, brief, forecast, told
from opsd.report.page import report_page
from opsd.report.run import NoReport, Price, read_run
from opsd.report.text import text_report
from tests.fakes.fuzzing import AMOUNTS, NUMBERS, changed, encoded, fuzz, json_lines, json_values, objects
from tests.fakes.pipeline import Pipeline

# Whatever a user writes into rank pages, ``run.json`` and event files: no bug, and no metric that nobody can read.


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


# Whatever is in the files of a run's folder: a ledger, a report and a forecast, or one sentence.


_STARTED = {"t": 1.0, "event": "generation_started", "generation": 1, "nodes": ["n1"], "world_size": 2, "gpus": 2}

_LOST = {"t": 8.0, "event": "node_lost", "generation": 1, "lost": "n1", "silent_s": 1.0}

_RESUMED = {"t": 9.5, "event": "resumed", "generation": 2, "step": 3, "recovered_s": 1.5, "lost_steps": 2}

_ENDED = {"t": 10.0, "event": "finished", "generation": 2, "exit_code": 0, "reason": "r"}

_STEP = {"t": 5.0, "step": 4, "generation": 1, "step_s": 1.0, "data_s": 0.1, "checkpoint_s": 0.1, "evaluation_s": 0.1,
         "loss": 2.0, "tokens_per_s": 9.0, "tokens": 100}  # fmt: skip

_STEPS = {"t": 7.0, "step": 9, "generation": 1, "step_s": 5.0, "steps": 5, "new_tokens": 50}

_PLAN = {
    "made": 0, "gpus": 8, "nodes": 2, "tokens": 1e12, "days": 30, "training_days": 27, "mttf_s": 4e5, "spares": 1,
    "outages": 4e-3, "repair_s": 6e5, "clumps": 3, "overheads": {"failures": 0.04, "evaluation": 0.02},
}  # fmt: skip

_EXPERTS = {"step": 4, "steps": 4, "first_layer": 1, "loads": [[1, 2], [3, 4]]}

Files = tuple[bytes, bytes, bytes, bytes]
"""Events, steps, plan and loads of experts."""

LEDGER_SEEDS: tuple[Files, ...] = (
    (b"", encoded({**_STEPS, "new_tokens": "many"}), b"{}", b""),
    (b"", encoded({**_STEP, "step": float("inf")}), b"{}", b""),
    (encoded({**_LOST, "event": []}), encoded({**_STEP, "t": float("nan")}), b"{}", b""),
    (b"", encoded(_STEP), encoded({**_PLAN, "outages": 1.0, "repair_s": 1e-300, "mttf_s": 1e-300}), b""),
    (b"", encoded(_STEP), encoded(_PLAN), encoded({**_EXPERTS, "loads": [[float("inf")]]})),
)


@AMOUNTS
def test_no_run_folder_is_a_bug(amount: int, memory_folder: Path) -> None:
    """Lines before and after the odd ones count."""

    def look(files: Files) -> None:
        event, step, plan, experts = files
        started, rest = [encoded(_STARTED)], [encoded({**_STARTED, "t": 9.0, "generation": 2}), encoded(_ENDED)]
        (memory_folder / "events.jsonl").write_bytes(b"\n".join([*started, event, *rest, b""]))
        (memory_folder / "metrics.jsonl").write_bytes(b"\n".join([encoded(_STEP), step, encoded(_STEPS), b""]))
        (memory_folder / "plan.json").write_bytes(plan)
        (memory_folder / "experts.jsonl").write_bytes(experts)
        with suppress(LedgerError):
            made = records_for_user(memory_folder, os.getuid())
            assert made["steps"] >= 1 and made["tokens"] is not None
            if found := forecast_of(made):
                assert brief(found) and told(found)
        with suppress(NoReport):
            run = read_run(memory_folder)
            assert text_report(run, Price()) and report_page(run, Price()) and run.as_dict()

    files = st.tuples(
        json_lines(_LOST, _RESUMED, _ENDED),
        json_lines(_STEP, _STEPS),
        objects(_PLAN).map(encoded),
        json_lines(_EXPERTS),
    )
    fuzz(look, files, amount, LEDGER_SEEDS)


@AMOUNTS
def test_no_plan_is_a_bug(amount: int) -> None:
    """At whatever stage its run is."""

    def look(drawn: tuple[bytes, float, float, int]) -> None:
        plan, productive, tokens, lost = drawn
        with suppress(BadPlan):
            progress = Progress({"productive": productive, "restart": 1.0}, tokens, lost)
            if found := forecast(Planned.parse(plan.decode()), progress):
                assert brief(found) and told(found)

    seconds, tokens = st.floats(0, 1e18), st.floats(0, 1e18)
    edges = st.sampled_from([1e-300, 1e-12, 1e-3, 1.0, 59.0, 100.0, 2e4, 3e7, 1e12])
    numbers = st.fixed_dictionaries({name: edges for name, value in _PLAN.items() if not isinstance(value, dict)}).map(
        lambda drawn: encoded(
            {**_PLAN, **drawn, "nodes": max(1, round(min(drawn["nodes"], 2e4))), "spares": 0, "gpus": 8}
        )
    )
    fuzz(look, st.tuples(numbers, seconds, tokens, st.integers(0, 10**6)), amount)


# Whatever stands in the manifest of a checkpoint: a manifest, or one sentence.


FILES = (FileEntry("rank-0000.0a1b.safetensors", 7, "xxh3_128:" + "0" * 32), FileEntry("x", 0, "xxh3_128:" + "f" * 32))

GOOD = Manifest(step=20, sample=640, layout={"dp": 2}, config_digest="d", created=1.8e9, files=FILES, tier="local")

FIELDS = asdict(GOOD)

MANIFEST_SEEDS: tuple[bytes, ...] = (
    b"[" * 100_000,
    encoded(seal({**FIELDS, "step": 10**400})),
    encoded(seal({**FIELDS, "files": [{**asdict(FILES[0]), "name": "../../etc/passwd"}]})),
    encoded({**FIELDS, "run": "\ud800"}),
    b'{"format": 1e999}',
    b'{"format": ' + b"9" * 5000 + b"}",
)


@AMOUNTS
def test_no_manifest_is_a_bug(amount: int) -> None:
    """Its checksum may be right; what is accepted names files inside its folder and can be written again."""

    def decode(content: bytes) -> None:
        try:
            read = manifest.decode(content, "manifest.json")
        except CheckpointError as error:
            assert str(error).isprintable() and len(str(error)) < 500
            return
        assert all("/" not in file.name and file.size >= 0 for file in read.files)
        again = manifest.decode(manifest.encode(read), "manifest.json")
        assert asdict(again) == {**asdict(read), "format": again.format}

    entries = st.lists(objects(asdict(FILES[0])) | json_values, max_size=3)
    sealed = objects(FIELDS) | entries.map(lambda files: {**FIELDS, "files": files})

    def attempt(content: bytes | dict[str, object]) -> None:
        if isinstance(content, dict):
            with suppress(ValueError, TypeError):
                content = seal(content)  # where it cannot be sealed it is tried as it is
            content = encoded(content)
        decode(content)

    fuzz(attempt, sealed | changed(manifest.encode(GOOD)) | json_values.map(encoded), amount, MANIFEST_SEEDS)
