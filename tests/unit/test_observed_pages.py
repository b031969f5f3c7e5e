"""What others make of the page of a program that reports nothing itself."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from opsd.client import Reporter
from opsd.collectors.ranks import RanksCollector
from opsd.launch.ranks.ranks import usable_pages
from opsd.rank_page import RankPage, read_page
from tests.fakes.run_folder import ranks, read, values, write_run


@dataclass
class FakeRank:
    """A rank of a generation with its page."""

    rank: int
    path: Path

    def page(self) -> RankPage | None:
        return read_page(self.path) if self.path.exists() else None


def rank_with_page(folder: Path, rank: int, source: str | None) -> FakeRank:
    path = folder / f"rank-{rank:04d}.page"
    if source is not None:
        Reporter(path, rank=rank, source=source).step()
    return FakeRank(rank, path)


def test_ranks_that_report_themselves_keep_the_word(tmp_path: Path) -> None:
    """A program whose first rank reports may count its steps from another number than the hooks do in the others."""
    sources = ["client", "observed", "adapter", None]
    pages = usable_pages([rank_with_page(tmp_path, rank, source) for rank, source in enumerate(sources)])
    assert sorted(pages) == [0, 2]


def test_observed_pages_are_used_where_nobody_reports(tmp_path: Path) -> None:
    """As in most programs."""
    sources = ["observed", "observed", None]
    pages = usable_pages([rank_with_page(tmp_path, rank, source) for rank, source in enumerate(sources)])
    assert sorted(pages) == [0, 1]


def test_tokens_that_are_not_known_are_no_throughput_of_0(tmp_path: Path) -> None:
    """An observed rank has steps and phases, and no series of tokens."""
    folder = tmp_path / "r1"
    folder.mkdir()
    page = Reporter(folder / "rank-0000.page", run="r1", source="observed")
    page.step(step=7, learning_rate=0.5)
    write_run(folder, os.getpid())
    reading = read(RanksCollector(tmp_path))
    assert [rank.source for rank in ranks(reading)] == ["observed"]
    names = {name for name, *_ in values(reading)}
    assert {"opsd_rank_step", "opsd_rank_step_seconds", "opsd_rank_phase", "opsd_rank_learning_rate"} <= names
    assert not {"opsd_rank_tokens_total", "opsd_rank_tokens_per_second", "opsd_rank_loss"} & names
