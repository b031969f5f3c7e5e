"""``python -m opsd.report FOLDER [RESUME]``: make the page of a run that has ended, and print its closing block.

Started by the launcher at its end, as a process of its own: reading the files of a long run takes time and memory, and
a file server that hangs must not hold up the launcher.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from opsd.files import write_text
from opsd.report.cost import configured_price
from opsd.report.page import report_page
from opsd.report.run import PAGE, NoReport, read_run
from opsd.report.text import closing_block


def main(folder: Path, resume: str) -> int:
    """Print the block on stdout; 1 if there is nothing to report."""
    try:
        run = read_run(folder)
    except NoReport:
        return 1
    price = configured_price()
    file: Path | None = folder / PAGE
    assert file is not None
    try:
        write_text(file, report_page(run, price))
    except OSError as error:
        print(f"the report is not written to {file}: {error.strerror}", file=sys.stderr)
        file = None
    print("\n".join(closing_block(run, price, page=file, resume=resume)), flush=True)
    return 0


if __name__ == "__main__":
    os.nice(5)
    sys.exit(main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""))
