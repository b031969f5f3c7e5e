"""What commands print on a terminal, as SVG."""

from __future__ import annotations

import codecs
import io
import itertools
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from fcntl import ioctl
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

from tests.pictures.browser import PictureError

COLUMNS, LINES = 110, 50
_FONTS: Final = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
_SPINNER: Final = re.compile("[\u2801-\u28ff]")
_OF_RANK: Final = re.compile(r"\[rank\d+\]:")
_NOT_COLOUR: Final = re.compile(r"\x1b\[[0-9;?]*[A-Zac-ln-z]|\x1b\][^\x07]*\x07|\x1b[()][A-Z0-9]")


def run(
    arguments: list[str], folder: Path, environment: Mapping[str, str], limit_s: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> str:  # fmt: skip
    """What ``opsd`` prints on a terminal. ``meanwhile`` is called about ten times a second. Raises PictureError."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    given = {**os.environ, **environment, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    process = subprocess.Popen(
        [sys.executable, "-m", "opsd", *arguments], cwd=folder, env=given, stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    decoder, text, end = codecs.getincrementaldecoder("utf-8")("replace"), "", time.monotonic() + limit_s
    try:
        while True:
            if time.monotonic() > end:
                raise PictureError(f"opsd {' '.join(arguments)} was not done within {limit_s:.0f} s:\n{text[-2000:]}")
            meanwhile()
            if not select.select([ours], [], [], 0.1)[0]:
                continue
            try:
                chunk = os.read(ours, 65536)
            except OSError:  # EIO: nobody has the other end any more
                break
            text += decoder.decode(chunk)
    finally:
        os.close(ours)
        if process.poll() is None:
            process.terminate()
        process.wait(30)
    return text


def as_shown(text: str) -> list[str]:
    """The lines that are left on the terminal: a carriage return begins a line again, and spinners are gone.

    Other moves of the cursor are lost.
    """
    lines = _NOT_COLOUR.sub("", text).replace("\r\n", "\n").split("\n")
    lines = [line for line in lines if not _SPINNER.search(line)]
    return [line.rpartition("\r")[2] or line.rstrip("\r").rpartition("\r")[2] for line in lines]


def draw(command: str, text: str, file: Path, folder: Path, last: int = 60) -> None:
    """Write the picture of a terminal with ``command`` and the ``last`` lines of what it printed in ``folder``.

    Paths in it are drawn relative to ``folder``, and tracebacks as the number of their lines.
    """
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.assemble(("$ ", "dim"), (command, "bold")))
    lines = as_shown(text.replace(f"{folder}/", "").rstrip())
    for line in [*_without_tracebacks(lines)][-last:]:
        console.print(Text.from_ansi(line), soft_wrap=False, overflow="fold")
    file.write_text(_FONTS.sub("", console.export_svg(title=command.partition(" -")[0])), encoding="utf-8")


def _without_tracebacks(lines: list[str]) -> Iterator[str]:
    for of_rank, group in itertools.groupby(lines, lambda line: found[0] if (found := _OF_RANK.match(line)) else ""):
        said = [*group]
        yield from [f"{of_rank} … {len(said)} lines of its traceback"] if of_rank and len(said) > 1 else said
