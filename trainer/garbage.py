"""Python's garbage collection, which otherwise stops each rank at a moment of its own.

Collective operations wait for the slowest rank, so each of these pauses stops all of them. In the training loop all
ranks collect at the same steps instead.
"""

from __future__ import annotations

import gc
from types import TracebackType
from typing import Final

EVERY: Final = 50
"""Steps between two collections."""


class Collections:
    """While it is entered, garbage is collected by ``after`` alone; what was there before is left out."""

    def __enter__(self) -> Collections:
        gc.collect()
        gc.freeze()
        gc.disable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.enable()
        gc.unfreeze()

    def after(self, step: int) -> None:
        """Collect what has become garbage if it is time after ``step``, an absolute number; all but old objects."""
        if step % EVERY == 0:
            gc.collect(1)
