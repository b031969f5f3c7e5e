"""``steps.jsonl`` of the run folder: the steps that rank pages show, for the ledger of any trainer.

One line for the steps of ten seconds, of the first rank that steps, by the launcher on whose node rank 0 is. ``t`` is
the wall second at which ``step``, the last of ``steps``, ended; ``step_s`` are their seconds without the program's
setup, ``data_s``, ``checkpoint_s`` and ``evaluation_s`` those of them in these phases. What the program reports is
there as well: the ``loss`` of the last of these steps that had one, ``new_tokens`` of all ranks, and ``tokens_per_s``.
``relative`` says that ``step`` is counted from the start of the process: the program reports no numbers.
Ranks of other nodes count like those of this one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from opsd.launch.io.reporting import EventFile, WorkQueue, encoded
from opsd.rank_page import RankPage
from opsd.rundir import STEPS

LINE_S = 10.0
_PHASES = ("data", "checkpoint", "evaluation")


@dataclass(slots=True)
class _Line:
    """Steps that are not written yet; times in monotonic seconds."""

    began: float
    t: float = 0.0
    step: int = 0
    steps: int = 0
    step_s: float = 0.0
    phase_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_PHASES, 0.0))
    loss: float | None = None
    relative: bool = False


class StepLog:
    """Written in a thread, as the folder may be on a file server."""

    def __init__(self, folder: Path) -> None:
        self._file = EventFile(folder / STEPS)
        self._work = WorkQueue(f"steps for {self._file.path}", missed=self._file.missed)
        self._rank: int | None = None
        self._process: tuple[int, float] | None = None
        self._counted: dict[int, tuple[tuple[int, float], int]] = {}
        self._tokens = 0.0
        self._generation = self._seen = 0
        self._line: _Line | None = None

    def note(self, generation: int, pages: Mapping[int, RankPage]) -> None:
        """Take in the steps on the pages of this node's ranks, if rank 0 is one of them."""
        if generation != self._generation:
            self.flush()
            self._generation, self._rank = generation, None
        if self._rank is None and 0 in pages:
            self._rank = next((rank for rank in sorted(pages) if pages[rank].steps_reported), None)
        if self._rank is not None and self._rank in pages:
            self._count_tokens(pages)
            self._read(pages[self._rank])

    def _count_tokens(self, pages: Mapping[int, RankPage]) -> None:
        """The counter of a page begins at 0 with each process."""
        for rank, page in pages.items():
            process = page.pid, page.created
            before, known = self._counted.get(rank, (process, 0))
            self._tokens += (page.tokens - (known if before == process else 0)) * page.world_size / len(pages)
            self._counted[rank] = process, page.tokens

    def flush(self) -> None:
        """Write what has been seen."""
        line, self._line = self._line, None
        if line is None:
            return
        wall = time.time() - time.monotonic()
        record = {"t": round(wall + line.t, 4), "generation": self._generation, "step": line.step, "steps": line.steps}
        seconds = {"step_s": line.step_s, **{f"{name}_s": spent for name, spent in line.phase_s.items()}}
        reported: dict[str, float | bool] = {} if line.loss is None else {"loss": line.loss}
        if line.relative:
            reported["relative"] = True
        if self._tokens:
            reported["new_tokens"] = round(self._tokens)
            reported["tokens_per_s"] = round(self._tokens / line.step_s, 1) if line.step_s else 0.0
            self._tokens = 0.0
        data = encoded({**record, **{name: round(value, 4) for name, value in seconds.items()}, **reported})
        self._work.put(lambda: self._file.append(data))

    def _read(self, page: RankPage) -> None:
        """Steps that came and went between two looks took as long as those that are still seen."""
        if self._process != (page.pid, page.created):
            self.flush()
            self._process, self._seen = (page.pid, page.created), 0
        new = page.steps_reported - self._seen
        seen = page.steps[-new:] if new > 0 else ()
        if not seen:
            return
        self._seen = page.steps_reported
        share = new / len(seen)
        line = self._line = self._line or _Line(seen[0].end - seen[0].duration_s)
        line.relative = page.relative
        line.t, line.step, line.steps = seen[-1].end, seen[-1].step, line.steps + new
        for record in seen:
            line.loss = record.loss if math.isfinite(record.loss) else line.loss
            line.step_s += share * (record.duration_s - record.phase("setup"))
            for name in _PHASES:
                line.phase_s[name] += share * record.phase(name)
        if line.t - line.began >= LINE_S:
            self.flush()
