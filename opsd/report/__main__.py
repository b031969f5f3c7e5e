"""``python -m opsd.report FOLDER [RESUME]``: make the page of a run that has ended, and print how it ended.

The output is a JSON object: the closing ``block``, a ``summary`` of one line, and the file of the ``page`` or null.

Started by the launcher at its end, as a process of its own: reading the files of a long run takes time and memory, and
a file server that hangs must not hold up the launcher.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from opsd.files import write_text
from opsd.report.page import report_page
from opsd.report.run import PAGE, NoReport, configured_price, read_run
from opsd.report.text import closing_block, summary


def main(folder: Path, resume: str) -> int:
    """0 if it is printed, 1 if there is nothing to report."""
    try:
        run = read_run(folder)
    except NoReport:
        return 1
    price = configured_price()
    file: Path | None = folder / PAGE
    assert file is not None
    try:
        write_text(file, report_page(run, price), in_place=False)
    except OSError as error:
        print(f"the report is not written to {file}: {error.strerror}", file=sys.stderr)
        file = None
    block = closing_block(run, price, page=file, resume=resume)
    told = {"block": "\n".join(block), "summary": summary(run), "page": str(file) if file is not None else None}
    print(json.dumps(told), flush=True)
    return 0


if __name__ == "__main__":
    os.nice(5)
    sys.exit(main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""))
