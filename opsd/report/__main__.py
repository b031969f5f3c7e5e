"""``python -m opsd.report FOLDER [RESUME]``: make the page of a run that has ended, and print its closing block.

Started by the launcher at its end, as a process of its own: reading the files of a long run takes time and memory, and
a file server that hangs must not hold up the launcher.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from opsd.report.cost import Price
from opsd.report.run import NoReport, read_run
from opsd.report.text import closing_block


def main(folder: Path, resume: str) -> int:
    """Print the block on stdout; 1 if there is nothing to report."""
    try:
        run = read_run(folder)
    except NoReport:
        return 1
    lines = closing_block(run, configured_price(), page=None, resume=resume)
    print("\n".join(lines), flush=True)
    return 0


def configured_price() -> Price:
    """The price in the configuration of this node; none if that cannot be read."""
    return Price()


if __name__ == "__main__":
    os.nice(5)
    sys.exit(main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""))
