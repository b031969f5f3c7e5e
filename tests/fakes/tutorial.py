"""Runs the shell sessions of a Markdown page and compares what they print with what the page shows.

A block ```` ```console ```` holds commands after ``$ ``, their further lines after ``> ``, and what they print. Printed
is compared line by line, with these freedoms:

- a line ``...`` stands for any number of lines, ``...`` within a line for any text;
- amounts of white space are equal, lines of boxes too;
- numbers with a decimal point or of three and more digits are equal, as are times of day: they differ each time.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from markdown_it import MarkdownIt

VARYING = re.compile(r"\d{4}-\d\d-\d\d|\d{8}-\d{6}(?:-\d+)?|\d+:\d\d(?::\d\d)?|\d[\d,]*\.\d+|\d[\d,]{2,}")
BOX = re.compile(r"[─━┏┳┓┃┡╇┩│├┼┤└┴┘╭╮╰╯]+")


@dataclass(frozen=True, slots=True)
class Step:
    """A command of a page, and the lines that the page shows below it."""

    command: str
    shown: tuple[str, ...]


def steps(page: Path) -> Iterator[Step]:
    """The commands of a page, in order. Raises AssertionError for a block of commands that would not be run."""
    for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
        if token.type != "fence":
            continue
        if token.info == "console":
            yield from _commands(token.content.splitlines())
        else:
            assert token.info in ("toml", "python", "diff", "text"), f"{page.name}: {token.info!r} is run by no test"


def _commands(lines: Sequence[str]) -> Iterator[Step]:
    command, shown = "", list[str]()
    for line in lines:
        if line.startswith("$ "):
            if command:
                yield Step(command, tuple(shown))
            command, shown = line[2:], []
        elif line.startswith("> ") or line == ">":
            command += "\n" + line[2:]
        else:
            assert command, f"output before any command: {line}"
            shown.append(line)
    yield Step(command, tuple(shown))


def fits(shown: Sequence[str], printed: str) -> bool:
    """Whether ``printed`` is what a page shows."""
    lines = [text for line in printed.splitlines() if (text := _plain(line))]
    wanted = [text for line in shown if (text := _plain(line))]
    pattern = "".join("(?:.*\n)*?" if line == "..." else _pattern(line) + "\n" for line in wanted)
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in lines)) is not None


def _plain(line: str) -> str:
    return " ".join(BOX.sub(" ", line).split())


def _pattern(line: str) -> str:
    pieces = re.split(r"(\.\.\.)", line)
    return "".join(".*" if piece == "..." else _numbers(piece) for piece in pieces)


def _numbers(text: str) -> str:
    """A number that differs from one time to the next fits any other of its kind."""
    found, at = "", 0
    for number in VARYING.finditer(text):
        found += re.escape(text[at : number.start()]) + r"[\d.,:-]+"
        at = number.end()
    return found + re.escape(text[at:])


class Shell:
    """One bash for a page, in ``folder``; ended with everything that it has started when the ``with`` block ends."""

    def __init__(self, folder: Path, environment: Mapping[str, str], within: Sequence[str] = ()) -> None:
        self._bash = subprocess.Popen(
            [*within, "bash", "--norc"], cwd=folder, env={**os.environ, **environment, "COLUMNS": "100"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        """Jobs that the page has left in the background are asked to end, then bash is; all of it after a failure."""
        if failed is not None:
            os.killpg(self._bash.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._bash.wait(60)
            with suppress(ProcessLookupError):
                os.killpg(self._bash.pid, signal.SIGKILL)
            self._bash.wait()
            return
        self.run("jobs -p | xargs -r kill 2>/dev/null; wait", 60)
        assert self._bash.stdin is not None
        self._bash.stdin.close()
        self._bash.wait(60)

    def run(self, command: str, timeout_s: float) -> tuple[str, int]:
        """What a command prints, and its exit status. Raises TimeoutError."""
        assert self._bash.stdin is not None and self._bash.stdout is not None
        self._bash.stdin.write(f"{{ {command}\n}} </dev/null\nprintf '\\001%d\\002' $?\n".encode())
        self._bash.stdin.flush()
        said = _until(self._bash.stdout, b"\002", time.monotonic() + timeout_s, command)
        printed, _, status = said.decode(errors="replace").rpartition("\001")
        return printed, int(status)


def _until(stream: IO[bytes], end: bytes, deadline: float, command: str) -> bytes:
    """What ``command`` prints before ``end``."""
    said = b""
    while not said.endswith(end):
        ready, _, _ = select.select([stream], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"has not ended: {command}; so far: {said.decode(errors='replace')}")
        piece = os.read(stream.fileno(), 1 << 16)
        if not piece:
            raise TimeoutError(f"the shell has ended at: {command}; it said: {said.decode(errors='replace')}")
        said += piece
    return said.removesuffix(end)


def play(page: Path, shell: Shell, timeout_s: float = 300) -> None:
    """Run a page. Raises AssertionError where a command fails or prints something else, unless the page shows ``[1]``.

    A last line ``[N]`` is the exit status that the page expects.
    """
    for step in steps(page):
        printed, status = shell.run(step.command, timeout_s)
        shown = list(step.shown)
        expected = int(shown.pop()[1:-1]) if shown and re.fullmatch(r"\[\d+\]", shown[-1]) else 0
        said = f"$ {step.command}\n{printed}"
        assert status == expected, f"exit status {status}\n{said}"
        assert fits(shown, printed), f"{page.name} shows something else:\n{said}\nin place of\n{chr(10).join(shown)}"
