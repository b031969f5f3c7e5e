"""What the command line of ``opsd launch`` settles, in one frozen value."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from opsd.launch.io.console import STDERR, STDOUT, Show
from opsd.launch.ranks.environment import launch_environment
from opsd.launch.ranks.program import Program

PREFIX = "[rank${rank}]: "
StreamMap = Mapping[int | None, int]
"""What is to be done with streams: 0 none, 1 stdout, 2 stderr, 3 both, by local rank; None stands for all others."""


@dataclass(frozen=True, slots=True)
class Streams:
    """What torchrun's flags say about the ranks' output. ``chosen``: local ranks that are shown at all, None for all.

    ``redirects`` go to files of their own and not to the console; ``tee`` go to both, each line after ``prefix``.
    """

    redirects: StreamMap = field(default_factory=dict)
    tee: StreamMap = field(default_factory=dict)
    chosen: frozenset[int] | None = None
    prefix: str = PREFIX

    def show(self, stream: int, local_rank: int, names: Mapping[str, object]) -> Show:
        """What is done with a stream of a rank; ``names`` is what the prefix may have in it."""
        redirected, teed = (
            bool(streams.get(local_rank, streams.get(None, 0)) & stream) for streams in (self.redirects, self.tee)
        )
        visible = self.chosen is None or local_rank in self.chosen
        return Show(
            shown=visible and (teed or not redirected),
            prefix=Template(self.prefix).safe_substitute(names) if teed else "",
            own_file=redirected or teed,
        )


@dataclass(frozen=True, slots=True)
class Settings:
    """Seconds throughout.

    ``restarts_asked``: their number was given by the user. ``virtual_local_rank``: each rank sees its own GPU only and
    is the local rank 0, as far as it knows.
    """

    program: Program
    run: str
    job: str
    node: str
    local_size: int
    run_id: str
    role: str = "default"
    max_restarts: int = 8
    restarts_asked: bool = False
    same_failures: int = 3
    refill_steps: int = 100
    standby: bool = True
    standby_imports: tuple[str, ...] = ()
    stop_timeout_s: float = 120.0
    streams: Streams = Streams()
    virtual_local_rank: bool = False

    def shows(self, rank: int, local_rank: int) -> dict[int, Show]:
        """What is done with the streams of a rank."""
        names = {"rank": rank, "local_rank": local_rank, "role_name": self.role}
        return {stream: self.streams.show(stream, local_rank, names) for stream in (STDOUT, STDERR)}

    def environment(self, local_rank: int, run_dir: Path) -> dict[str, str]:
        """What the environment of ``local_rank`` has in every generation: the launcher's own and opsd's."""
        environment = launch_environment(
            os.environ,
            local_rank=local_rank,
            local_size=self.local_size,
            run=self.run,
            run_dir=run_dir,
            job=self.job,
            node=self.node,
        )
        return own_gpu_only(environment, local_rank) if self.virtual_local_rank else environment


def own_gpu_only(environment: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """The environment of a rank that sees its own GPU alone, as device 0; ``OPSD_GPU`` stays the node's number."""
    gpus = [gpu.strip() for gpu in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu.strip()]
    own = gpus[local_rank] if local_rank < len(gpus) else str(local_rank)
    return {**environment, "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": own}
