"""Runs of the real trainer for tests: small, on gloo, forked from a process that has done its imports."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opsd.client import events_path
from opsd.ports import free_port
from opsd.rank_page import PageError, RankPage, read_page
from opsd.trainer.data.tokenize import make_corpus, train_tokenizer
from tests.fakes.clock import until
from tests.fakes.schemas import unknown_fields

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["opsd.trainer.__main__"])

STEPS = 40

CONFIG = f"""
[run]
steps = {STEPS}
seed = 1
device = "cpu"
threads = 1
deterministic = true
[model]
layers = 2
width = 36
heads = 2
kv_heads = 1
ffn = 50
vocab = 401
nope_every = 2
[data]
sequence = 32
batch = 4
micro_batch = 1
[optimizer]
lr = 3e-3
[schedule]
warmup = 5
decay_start = 35
decay_end = 45
[checkpoint]
every = 5
"""
"""No dimension is a multiple of 2 x 2 and of 3, so shards are uneven; two micro-batches a step on two ranks."""


def make_texts(count: int, seed: int = 1) -> list[str]:
    """Texts of words drawn at random, of one language, the same ones always.

    With real texts, which change, a batch turns up now and then whose gradient magnifies rounding ten thousand times.
    """
    drawn = random.Random(1)
    words = ["".join(drawn.choices("abcdefghijklmnopqrstuvwxyz", k=drawn.randint(1, 8))) for _ in range(500)]
    frequencies = [1 / (place + 1) for place in range(len(words))]
    drawn.seed(seed)
    return [" ".join(drawn.choices(words, frequencies, k=drawn.randint(2, 900))) for _ in range(count)]


def make_small_corpus(folder: Path) -> Path:
    """Shards of such texts, tokenised with 400 ids."""
    texts = make_texts(80)
    make_corpus(texts, train_tokenizer(texts, 400), folder, shard_tokens=8000)
    return folder


def flip(path: Path) -> None:
    """Change a bit in the middle of a file, in place."""
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 8]))


def rank_main(arguments: list[str], environment: Mapping[str, str], log: str) -> None:
    """What a forked process does: become a rank and run the trainer's command line."""
    from opsd.trainer.__main__ import main

    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    sys.argv = ["trainer", *arguments]
    main()


@dataclass
class World:
    """The ranks of one start of a run."""

    ranks: list[multiprocessing.process.BaseProcess]
    pages: list[Path]

    def page(self, rank: int) -> RankPage | None:
        """The page of this start's rank, None while there is none."""
        try:
            page = read_page(self.pages[rank])
        except PageError:
            return None
        return page if page.pid == self.ranks[rank].pid else None

    def step(self, rank: int = 0) -> int:
        """The last completed step, 0 before the first."""
        page = self.page(rank)
        return page.last_step.step if page and page.last_step else 0

    def wait_for_step(self, step: int) -> None:
        """Wait until ``step`` is completed."""
        until(lambda: self.step() >= step)

    def worker(self, rank: int, role: str) -> int:
        """The pid of a helper process of a rank; waits until there is one."""

        def find() -> int | None:
            page = self.page(rank)
            return next((pid for pid, name in page.workers if name == role), None) if page else None

        return int(until(find))

    def wait(self) -> list[int | None]:
        """Exit codes of all ranks."""
        for rank in self.ranks:
            rank.join(timeout=150)
        return [rank.exitcode for rank in self.ranks]

    def kill(self) -> None:
        """SIGKILL to all ranks, as a launcher does after a failure; helper processes are left to themselves."""
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.join()


@dataclass
class Run:
    """A run folder with its settings; every ``start`` is a generation."""

    folder: Path
    shards: Path
    settings: dict[str, object] = field(default_factory=dict)
    generation: int = 0

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / "checkpoints"

    def start(self, *arguments: str, world: int = 2, nodes: int = 1, apart: bool = False, **settings: object) -> World:
        """Start ``world`` ranks on ``nodes``; ``settings`` are overrides with ``__`` for the dot.

        With ``apart`` each node has a run folder of its own, which is a mistake.
        """
        self.generation += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "config.toml"
        config.write_text(CONFIG)
        values = {"data.shards": self.shards} | self.settings
        values |= {name.replace("__", "."): value for name, value in settings.items()}
        overrides = [f"--set={name}={value}" for name, value in values.items()]
        port = free_port()
        here = world // nodes
        pages = [self.memory(rank // here, nodes) / f"rank-{rank:04d}.page" for rank in range(world)]
        ranks = []
        for rank in range(world):
            environment = {
                "RANK": str(rank), "LOCAL_RANK": str(rank % here), "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(here), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "OPSD_RANK_PAGE": str(pages[rank]), "OPSD_GENERATION": str(self.generation), "OPSD_RUN": "test",
                "OPSD_RUN_DIR": str(pages[rank].parent if apart else self.folder),
            }  # fmt: skip
            arguments_of_rank = [str(config), *overrides, *arguments]
            arguments_of_process = (arguments_of_rank, environment, str(self.log(rank)))
            ranks.append(CONTEXT.Process(target=rank_main, args=arguments_of_process, name=f"trainer rank {rank}"))
            ranks[-1].start()
        return World(ranks, pages)

    def finish(self, *arguments: str, world: int = 2, **settings: object) -> None:
        """Start ``world`` ranks and wait until all have ended well."""
        assert self.start(*arguments, world=world, **settings).wait() == [0] * world, self.log().read_text()

    def memory(self, node: int, nodes: int = 2) -> Path:
        """Where the rank pages and the memory of a node are."""
        folder = self.folder / f"node-{node}" if nodes > 1 else self.folder
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def log(self, rank: int = 0) -> Path:
        """Where a rank's output goes."""
        return self.folder / f"rank-{rank:04d}.log"

    def printed(self) -> str:
        """What the ranks that came to print anything have printed."""
        return "".join(log.read_text() for log in sorted(self.folder.glob("rank-*.log")))

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def curve(self) -> dict[int, tuple[float, float]]:
        """Loss and gradient norm by step. A step that was computed again must have come out the same."""
        curve: dict[int, tuple[float, float]] = {}
        for line in self.metrics():
            point = (line["loss"], line["grad_norm"])
            assert curve.setdefault(line["step"], point) == point, f"step {line['step']} came out differently"
        return curve

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The events of that kind, of all ranks."""
        events = [*self._events()]
        assert [(event["event"], odd) for event in events if (odd := unknown_fields(event))] == []
        return [event for event in events if event["event"] == kind]

    def _events(self) -> Iterator[dict[str, Any]]:
        for page in sorted(self.folder.rglob("rank-*.page")):
            if events_path(page).exists():
                for line in events_path(page).read_text().splitlines():
                    yield json.loads(line)
