"""Runs a program as the ranks of one node, each with a rank page, and sums what the pages say."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from opsd.ports import free_port
from opsd.rank_page import read_page

ROOT = Path(__file__).parents[2]


def tokens_of_ranks(
    folder: Path, program: Sequence[str | Path], ranks: int = 2, python: str | Path = sys.executable
) -> list[int]:
    """The tokens on the page of each rank, once all ranks of ``python program...`` have ended with 0."""
    pages = [folder / f"rank-{rank:04d}.page" for rank in range(ranks)]
    common = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "integration"), str(ROOT)]),
        "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    started = [
        subprocess.Popen(
            [python, *program],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OPSD_RANK_PAGE": str(page)},
        )
        for rank, page in enumerate(pages)
    ]
    try:
        assert [process.wait(timeout=150) for process in started] == [0] * ranks
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [read_page(page).tokens for page in pages]
