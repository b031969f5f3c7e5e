"""``python -m opsd.ledger.for_user UID FOLDER``: the ledger of a run, its curves and its plan as JSON.

The files are read with the rights of the run's user.
"""

from __future__ import annotations

import json
import math
import os
import pwd
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from opsd.collectors.lib.run_files import Rights, open_as
from opsd.files import open_regular
from opsd.ledger import beside
from opsd.ledger.beside import Ablation, DataRun
from opsd.ledger.ledger import (
    LedgerError,
    Opener,
    earlier_tokens,
    gpus_of,
    lost_nodes,
    make_ledger,
    read_places,
    read_plan,
    read_records,
    trained_tokens,
)

_MOST_BESIDE = 1000


def records_for_user(folder: Path, user: int) -> dict[str, Any]:
    """Ledger, curves, plan, tokens, GPUs and lost nodes of the run in ``folder`` if ``user`` can read its files.

    Raises LedgerError or PermissionError.
    """
    rights = Rights(user, groups_of(user))

    opener = partial(open_regular, opener=partial(open_as, rights))
    events, metrics, unread = read_records(folder, opener)
    return {
        **make_ledger(events, metrics, unread).as_dict(), "curves": curves(metrics), "plan": _plan(folder, opener),
        "tokens": trained_tokens(metrics), "earlier_tokens": earlier_tokens(metrics), "lost_nodes": lost_nodes(events),
        "gpus": gpus_of(events), "places": read_places(folder, opener), "ablations": _beside(Ablation, folder, opener),
        "data": _beside(DataRun, folder, opener),
    }  # fmt: skip


def _beside(kind: type[Ablation] | type[DataRun], folder: Path, opener: Opener) -> list[dict[str, Any]]:
    """The studies or data pipelines beside the run, none without a file that can be read."""
    try:
        return [asdict(each) for each in beside.read(kind, folder, opener)[-_MOST_BESIDE:]]
    except OSError:
        return []


def _plan(folder: Path, opener: Opener) -> str | None:
    """The text of the run's plan, None without one that can be read."""
    try:
        return read_plan(folder, opener)
    except OSError:
        return None


def groups_of(user: int) -> frozenset[int]:
    """The groups of a user; none if nobody knows the user."""
    try:
        known = pwd.getpwuid(user)
    except KeyError:
        return frozenset()
    return frozenset(os.getgrouplist(known.pw_name, known.pw_gid))


def main() -> int:
    """Print both, or on stderr why there is none."""
    user, folder = int(sys.argv[1]), Path(sys.argv[2])
    try:
        print(json.dumps(records_for_user(folder, user)))
    except (LedgerError, OSError) as error:
        print(f"opsd: {error}", file=sys.stderr)
        return 1
    return 0


POINTS = 240
NAMES = ("loss", "tokens_per_s", "step_s")

Curve = list[tuple[float, float]]
"""Epoch seconds and the mean of all steps around them."""


def curves(metrics: Iterable[Mapping[str, Any]], points: int = POINTS) -> dict[str, Curve]:
    """The curves by the names of ``NAMES``, without those of which nothing is known.

    ``metrics`` are lines of metrics.jsonl or steps.jsonl. Of steps that were done more than once each time counts. What
    is no finite number is left out.
    """
    lines = sorted(
        ((at, line) for line in metrics if (at := _number(line.get("t"))) is not None), key=lambda pair: pair[0]
    )
    found = {name: _thinned([(at, v) for at, line in lines if (v := _value(line, name)) is not None], points)
             for name in NAMES}  # fmt: skip
    return {name: curve for name, curve in found.items() if len(curve) > 1}


def _value(line: Mapping[str, Any], name: str) -> float | None:
    """Per step: a line of steps.jsonl has the seconds of several."""
    value = _number(line.get(name))
    count = _number(line.get("steps")) if name == "step_s" else None
    return value / count if value is not None and count else value


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e300 and math.isfinite(value) else None


def _thinned(points: Sequence[tuple[float, float]], most: int) -> Curve:
    """At most ``most`` points: the mean of each of that many equal parts of the time."""
    if len(points) <= most:
        return [*points]
    began, width = points[0][0], (points[-1][0] - points[0][0]) / most or 1.0
    parts: dict[int, list[tuple[float, float]]] = {}
    for at, value in points:
        parts.setdefault(min(most - 1, int((at - began) / width)), []).append((at, value))
    return [
        (math.fsum(at for at, _ in part) / len(part), math.fsum(value for _, value in part) / len(part))
        for _, part in sorted(parts.items())
    ]


if __name__ == "__main__":
    sys.exit(main())
