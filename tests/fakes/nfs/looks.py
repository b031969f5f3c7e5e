"""``python looks.py NAME``: what is seen of claims through two mounts of one NFS export, /mnt/a and /mnt/b, as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from opsd.checkpoints import claims
from opsd.checkpoints.claims import FOLDER, Claim, ClaimError, Fence, Fenced, create, newest
from tests.fakes import claimant

A, B = Path("/mnt/a"), Path("/mnt/b")
COUNT = 40
THREADS = Path("/proc/fs/nfsd/threads")
AWAY_S = 5


def stage(name: str) -> tuple[Path, Path]:
    """A run folder of its own, through both mounts."""
    name = f"{name}-{time.time_ns()}"
    (A / name).mkdir()
    return A / name, B / name


def overtaken(folder: Path, number: int) -> bool:
    """Whether generation ``number`` is fenced."""
    try:
        Fence(folder, number).check()
    except Fenced:
        return True
    return False


def race() -> dict[str, object]:
    """Two processes on each mount, one of them without links."""
    a, b = stage("race")
    racers = [
        subprocess.Popen(
            [sys.executable, claimant.__file__, folder, name, str(COUNT), primitive],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for folder, name, primitive in ((a, "n1", "link"), (b, "n2", "link"), (a, "n3", "rename"), (b, "n4", "rename"))
    ]  # fmt: skip
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    won = [[int(line) for line in racer.communicate()[0].split()] for racer in racers]
    return {"won": won, "codes": [racer.returncode for racer in racers], "newest": claims.newest_number(b)}


def looks() -> dict[str, object]:
    """Looks through one mount right after a claim through the other; both have seen all that was there before."""
    a, b = stage("looks")
    primitive, before = claims.try_primitive(a), newest(b)
    missed = listed = 0
    create(a, Claim(1, "s", "n1"))
    first = overtaken(b, 0)
    for number in range(2, COUNT + 2):
        place = b / FOLDER / f"{number:06d}.json"
        list(place.parent.iterdir())
        place.exists()
        create(a, Claim(number, "s", "n1"))
        listed += place not in list(place.parent.iterdir())
        found = newest(b)
        missed += not overtaken(b, number - 1) or found is None or found.number != number
    return {"primitive": primitive, "before": before, "first": first, "missed": missed, "plain listing missed": listed}


def leases() -> dict[str, object]:
    """The lease through one mount a tenth of a second after it was renewed through the other."""
    a, b = stage("leases")
    create(a, Claim(1, "s", "n1"))
    old = 0
    for beat in range(1, 21):
        claims.renew(a, 1, beat)
        time.sleep(0.1)
        old += claims.lease(b) != (1, beat)
    return {"old": old}


def pause() -> dict[str, object]:
    """A claim and a look while the server is away."""
    a, b = stage("pause")
    create(a, Claim(1, "s", "n1"))
    newest(b)
    THREADS.write_text("0")
    threading.Timer(AWAY_S, THREADS.write_text, ["8"]).start()
    began = time.monotonic()
    try:
        made: object = create(a, Claim(2, "s", "n1"))
    except ClaimError as error:
        made = os.strerror(error.errno or 0)
    Fence(b, 2).check(patience_s=60)
    found = newest(b)
    return {"made": made, "newest": found and found.number, "seconds": round(time.monotonic() - began, 1)}


if __name__ == "__main__":
    kinds = (race, looks, leases) if "nocto" in sys.argv[1] else (race, looks, leases, pause)
    print("SEEN", json.dumps({"options": sys.argv[1]} | {kind.__name__: kind() for kind in kinds}), flush=True)
