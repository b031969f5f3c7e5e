"""Shared by the adapters: consecutive phases, and a stop on which all ranks agree."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from opsd.client import Reporter


class Phases:
    """Phases of a trainer that reports the beginning of each, and not the end."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._phase: AbstractContextManager[None] | None = None

    def enter(self, name: str) -> None:
        """The phase ``name`` of ``opsd.client.PHASES`` begins."""
        self.leave()
        self._phase = self._reporter.phase(name)
        self._phase.__enter__()

    def leave(self) -> None:
        """End the current phase."""
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
            self._phase = None


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether ``flag`` is set on any rank; a collective call.

    Ranks that stopped when they saw the request themselves would stop at different steps.
    """
    if not dist.is_initialized():
        return flag
    flags = torch.tensor(int(flag), device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags.item())
