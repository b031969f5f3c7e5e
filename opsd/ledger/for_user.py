"""``python -m opsd.ledger.for_user UID FOLDER``: the ledger of a run, its curves and its plan as JSON.

The files are read with the rights of the run's user.
"""

from __future__ import annotations

import json
import os
import pwd
import sys
from functools import partial
from pathlib import Path
from typing import Any

from opsd.collectors.lib.rights import Rights, open_as
from opsd.files import open_regular
from opsd.ledger.curves import curves
from opsd.ledger.ledger import earlier_tokens, make_ledger, trained_tokens
from opsd.ledger.records import LedgerError, Opener, gpus_of, lost_nodes, read_places, read_plan, read_records


def records_for_user(folder: Path, user: int) -> dict[str, Any]:
    """Ledger, curves, plan, tokens, GPUs and lost nodes of the run in ``folder`` if ``user`` can read its files.

    Raises LedgerError or PermissionError.
    """
    rights = Rights(user, groups_of(user))

    opener = partial(open_regular, opener=partial(open_as, rights))
    events, metrics = read_records(folder, opener)
    return {
        **make_ledger(events, metrics).as_dict(), "curves": curves(metrics), "plan": _plan(folder, opener),
        "tokens": trained_tokens(metrics), "earlier_tokens": earlier_tokens(metrics), "lost_nodes": lost_nodes(events),
        "gpus": gpus_of(events), "places": read_places(folder, opener),
    }  # fmt: skip


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


if __name__ == "__main__":
    sys.exit(main())
