"""What adapters share: phases, a stop on which all ranks agree, tokens, and the check before each checkpoint."""

from __future__ import annotations

import os
import sys
import time
from contextlib import AbstractContextManager
from fractions import Fraction

import torch
import torch.distributed as dist

from opsd.checkpoints.claims import EXIT_FENCED, ClaimError, Fence, Fenced
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


class Share:
    """This rank's part of the tokens of its batches, so that the sum over all ranks is what was trained on."""

    def __init__(self) -> None:
        self._waiting = Fraction()

    def add(self, tokens: int, sharing: int = 1) -> None:
        """Add a batch that ``sharing`` ranks (tensor, context or pipeline parallel) compute together."""
        self._waiting += Fraction(tokens, sharing)

    def take(self) -> int:
        """The whole tokens added since the last call; fractions are kept for the next."""
        tokens = int(self._waiting)
        self._waiting -= tokens
        return tokens


LIMIT_S = 600.0
"""How long to wait for a shared folder that cannot be read."""
POLL_S = 1.0


class Gate:
    """Guards the checkpoints of this rank; without effect if ``opsd launch`` did not start it.

    Ranks of a node that was cut off or frozen may go on after a later generation has begun without them. What they
    write would interfere with it, so they exit instead, with a sentence and exit code 76.
    """

    def __init__(self, reporter: Reporter, fence: Fence | None = None, limit_s: float = LIMIT_S) -> None:
        self._reporter, self._limit_s = reporter, limit_s
        self._fence = fence or Fence.of(os.environ)

    def pass_through(self) -> None:
        """Return if a checkpoint may be written.

        Raises SystemExit if a later generation was claimed, and ClaimError if that was unknown for ``limit_s`` seconds,
        after which the run should be restarted.
        """
        deadline = time.monotonic() + self._limit_s
        while self._fence is not None:
            try:
                self._fence.check()
                break
            except Fenced as error:
                print(f"opsd: {error.strerror}", file=sys.stderr, flush=True)
                sys.exit(EXIT_FENCED)
            except ClaimError:
                if time.monotonic() >= deadline:
                    raise
            with self._reporter.phase("checkpoint"):  # the wait is bounded here; the launcher need take it for no hang
                time.sleep(POLL_S)
