"""The nodes that opsd excludes from a job, kept in the job's comment with the time of exclusion. Pure.

Slurm's own list does not distinguish them from the user's ``--exclude``, which must stay. The comment survives requeues
and can be changed together with that list. opsd owns the part in brackets only: ``tuning run 12 [opsd1 avoids
n2@1763711000 n3@1763712000]``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_RECORD = re.compile(r"\s*\[opsd1 avoids([^\[\]]*)\]")
_NODE = re.compile(r"([\w.-]+)@(\d+)")


def read(comment: str) -> dict[str, float]:
    """The nodes with the epoch second of their exclusion; unreadable parts are skipped."""
    match = _RECORD.search(comment)
    words = match[1].split() if match else []
    return {found[1]: float(found[2]) for word in words if (found := _NODE.fullmatch(word))}


def write(comment: str, avoided: Mapping[str, float]) -> str:
    """``comment`` with ``avoided`` in place of its previous record; without nodes there is no record."""
    others = _RECORD.sub("", comment).strip()
    words = " ".join(f"{name}@{at:.0f}" for name, at in sorted(avoided.items()))
    return f"{others} [opsd1 avoids {words}]".strip() if words else others
