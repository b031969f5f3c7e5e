"""What opsd writes into a job's comment: the nodes that it keeps the job off, and since when.

Slurm's own list of them cannot tell these from the ones of the user's ``--exclude``, which are never given back. The
comment outlives requeues and can be changed together with that list. The record is the part in brackets; the rest
belongs to other people: ``tuning run 12 [opsd1 avoids n2@1763711000 n3@1763712000]``. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_RECORD = re.compile(r"\s*\[opsd1 avoids([^\[\]]*)\]")
_NODE = re.compile(r"([\w.-]+)@(\d+)")


def read(comment: str) -> dict[str, float]:
    """The nodes with the epoch second of their exclusion; what cannot be read is left out."""
    match = _RECORD.search(comment)
    words = match[1].split() if match else []
    return {found[1]: float(found[2]) for word in words if (found := _NODE.fullmatch(word))}


def write(comment: str, avoided: Mapping[str, float]) -> str:
    """``comment`` with ``avoided`` in the place of what it had; no nodes leave no record."""
    others = _RECORD.sub("", comment).strip()
    words = " ".join(f"{name}@{at:.0f}" for name, at in sorted(avoided.items()))
    return f"{others} [opsd1 avoids {words}]".strip() if words else others
