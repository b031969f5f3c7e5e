"""``python claimant.py FOLDER LAUNCHER COUNT PRIMITIVE``: claims generation after generation, and prints which it got.

It begins once a line comes on its standard input. PRIMITIVE is "link", or "rename" to do as on a file system without
links. It needs the standard library and opsd's sources alone, so that it runs on any machine that has the folder.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

from opsd.checkpoints.claims import Claim, create, newest_number


def no_link(draft: Path, target: Path) -> None:
    """What a file system without links says to one."""
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def main() -> None:
    """Claim until the number COUNT is reached."""
    folder, launcher, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    link = os.link if sys.argv[4] == "link" else no_link
    sys.stdin.readline()
    number = 0
    while number < count:
        number = max(number, newest_number(folder)) + 1
        if create(folder, Claim(number, "start", launcher, plan={"leader": launcher}), link):
            print(number, flush=True)


if __name__ == "__main__":
    main()
