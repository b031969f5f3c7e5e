"""The ranks of this node: one generation of them at a time, started together."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from opsd.client import PERSIST, PageError, RankPage, read_page
from opsd.launch.io.console import Console, RankOutput
from opsd.launch.io.messages import say
from opsd.launch.ranks.environment import generation_environment
from opsd.launch.ranks.error_file import read_error
from opsd.launch.ranks.failure import RankError
from opsd.launch.ranks.membership import Assignment
from opsd.launch.ranks.process import Child, Exit
from opsd.launch.ranks.rundir import RunFolders
from opsd.launch.ranks.settings import Settings
from opsd.launch.ranks.standby import StandbyPool
from opsd.launch.ranks.worker_channel import Worker, order_run, start_worker


@dataclass(slots=True)
class Rank:
    """A rank of the running generation. ``ended`` is the monotonic second at which its failure or end was noticed."""

    rank: int
    local_rank: int
    child: Child
    channel: socket.socket
    output: RankOutput
    log: Path
    error_file: Path
    page_path: Path
    warm: bool
    exit: Exit | None = None
    ended: float | None = None
    noticed_s: float = 0.0

    def page(self) -> RankPage | None:
        """The rank's page, None if it has none (yet). A page of another process, left or forged, does not count."""
        try:
            page = read_page(self.page_path)
        except PageError:
            return None
        return page if page.pid == self.child.pid else None

    def failing(self) -> bool:
        """Whether what there is to read on its channel says that the program has failed, or that it is gone.

        A standby worker that was taken while it still imported first says that it has done that.
        """
        try:
            said = self.channel.recv(4096)
        except OSError:
            return True
        return not said or b'"failed"' in said

    def error(self) -> tuple[RankError, float] | None:
        """The exception that the rank has left and its wall second; None without one."""
        return read_error(self.error_file)

    def log_tail(self, lines: int = 20) -> str:
        """The last ``lines`` lines that the rank has printed."""
        return self.output.tail(lines)


@dataclass(slots=True)
class Generation:
    """The ranks that were started together; ``number`` counts from 1 over the whole life of the run."""

    number: int
    ranks: list[Rank] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @property
    def running(self) -> list[Rank]:
        """The ranks that have not ended yet."""
        return [rank for rank in self.ranks if rank.exit is None]

    @property
    def saving(self) -> frozenset[int]:
        """The processes that write staged checkpoints to disk, which may outlive their rank for that."""
        pages = filter(None, (rank.page() for rank in self.ranks))
        return frozenset(pid for page in pages for pid, role in page.workers if role == PERSIST)


class RankStarter:
    """Starts the ranks of a generation, from warm standby workers where there are any."""

    def __init__(self, settings: Settings, folders: RunFolders, standby: StandbyPool, console: Console) -> None:
        self._settings = settings
        self._console = console
        self._folders = folders
        self._standby = standby

    def start(self, generation: Generation, place: Assignment, restarts: int) -> None:
        """Add this node's ranks to ``generation``. Raises OSError, with those that were started in place."""
        self._folders.forget_pages()
        for local_rank in range(place.local_size):
            generation.ranks.append(self._start_rank(generation.number, place, local_rank, restarts))

    def _start_rank(self, generation: int, place: Assignment, local_rank: int, restarts: int) -> Rank:
        rank = place.rank_offset + local_rank
        log = self._folders.generation_logs(generation) / f"rank-{rank:04d}.log"
        env = self._environment(generation, place, local_rank, restarts)
        expected = self._environment(generation + 1, place, local_rank, restarts + 1)
        not_the_living = {"OPSD_RANK_PAGE": f"{expected['OPSD_RANK_PAGE']}.standby"}
        self._standby.stand_for(local_rank, expected | not_the_living)
        output = RankOutput(rank)
        self._console.follow(output, log, self._settings.shows(rank, local_rank))
        worker, warm = self._worker(local_rank, env, output.descriptors)
        error_file, page = Path(env["TORCHELASTIC_ERROR_FILE"]), Path(env["OPSD_RANK_PAGE"])
        return Rank(rank, local_rank, worker.child, worker.channel, output, log, error_file, page, warm)

    def _environment(self, generation: int, place: Assignment, local_rank: int, restarts: int) -> dict[str, str]:
        rank = place.rank_offset + local_rank
        return self._settings.environment(local_rank, self._folders.folder) | generation_environment(
            place,
            local_rank=local_rank,
            generation=generation,
            restarts=restarts,
            max_restarts=self._settings.max_restarts,
            run_id=self._settings.run_id,
            role=self._settings.role,
            error_file=self._folders.error_file(rank),
            page=self._folders.page(rank),
        )

    def _worker(self, local_rank: int, env: dict[str, str], outputs: tuple[int, int]) -> tuple[Worker, bool]:
        program = self._settings.program
        standby = self._standby.take(local_rank, env)
        if standby is not None:
            try:
                order_run(standby.worker, program, env, outputs)
                return standby.worker, standby.warm
            except OSError as error:
                say(f"a standby worker died when needed ({error}); starting cold")
                standby.worker.discard()
        cold = start_worker(program, env, *outputs)
        order_run(cold, program, env, outputs)
        return cold, False
