"""A user of the node who attacks its agent: runs functions of a test as another uid, in processes of its own.

A function is passed as its source, so that it needs nothing of the tests: it imports what it uses, takes what JSON can
hold, and prints. The client (``opsd.client``) can be imported where the user may read this checkout.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

NOBODY = 65534
CHECKOUT = Path(__file__).parents[2]


def find_python(uid: int) -> str:
    """An interpreter that the user ``uid`` may run: this one, or the system's. Raises LookupError."""
    for python in (os.path.realpath(sys.executable), "/usr/bin/python3"):
        with contextlib.suppress(OSError):
            if subprocess.run([python, "-c", ""], user=uid, group=uid, extra_groups=[], cwd="/").returncode == 0:
                return python
    raise LookupError(f"no Python that user {uid} may run")


class Attacker:
    """The user ``uid``, in no group but its own and without capabilities."""

    def __init__(self, uid: int = NOBODY) -> None:
        self.uid = uid
        self._python = find_python(uid)
        self._processes: list[tuple[str, subprocess.Popen[str]]] = []
        self._errors = tempfile.TemporaryFile("a+")  # noqa: SIM115

    def start(self, attack: Callable[..., object], *arguments: object) -> subprocess.Popen[str]:
        """Run ``attack`` until the test ends or stops it; returns once it has printed its first line.

        What it goes on to print has to be read: a full pipe stops the attack.
        """
        process = self._spawn(attack, *arguments)
        assert process.stdout is not None
        if not process.stdout.readline():
            raise AssertionError(f"the attack ended without a word: {self._said()}")
        return process

    @property
    def ended(self) -> list[str]:
        """The attacks that have ended by themselves, by name."""
        return [name for name, process in self._processes if process.poll() is not None]

    def run(self, attack: Callable[..., object], *arguments: object, timeout_s: float = 60.0) -> str:
        """Run ``attack`` to its end and return what it printed. Raises AssertionError if it failed."""
        process = self._spawn(attack, *arguments)
        out, _ = process.communicate(timeout=timeout_s)
        assert process.returncode == 0, self._said()
        return out

    def close(self) -> None:
        """End what still runs."""
        for _, process in self._processes:
            process.kill()
            process.communicate()
        self._processes.clear()
        self._errors.close()

    def _said(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    def _spawn(self, attack: Callable[..., object], *arguments: object) -> subprocess.Popen[str]:
        source = textwrap.dedent(inspect.getsource(attack))
        program = f"from __future__ import annotations\n{source}\nimport json, sys\n"
        program += f"{attack.__name__}(*json.loads(sys.argv[1]))\n"
        process = subprocess.Popen(
            [self._python, "-u", "-c", program, json.dumps(arguments)],
            user=self.uid,
            group=self.uid,
            extra_groups=[],
            cwd="/",
            env={"PATH": os.defpath, "PYTHONPATH": str(CHECKOUT)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._processes.append((attack.__name__, process))
        return process
