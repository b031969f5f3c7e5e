"""How often to save. Pure."""

from __future__ import annotations

import math


def daly(stall_s: float, mttf_s: float) -> float:
    """The checkpoint interval in seconds with the least total loss to saving and failures: sqrt(2 w M) - w.

    ``stall_s`` w is how long a save stops the training, ``mttf_s`` M the job's mean time to failure (Daly 2006, eq. 20,
    to first order). For a save longer than half of M the result is M.
    """
    return math.sqrt(2 * stall_s * mttf_s) - stall_s if stall_s < mttf_s / 2 else mttf_s
