"""The process that runs one check: ``python -m opsd.preflight.worker MODULE:FUNCTION``, context as JSON on stdin.

It answers with JSON lines on its original stdout. Any number of them are ``{"progress": [share, subject]}``. The last
is ``{"outcome": …}`` or ``{"verdict": …, "reason": …}``. All else that check and libraries print goes to stderr.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from importlib import import_module
from typing import Any, NoReturn

from pydantic import TypeAdapter

from opsd.preflight.base import Context, NotMeasuredError, Outcome

_PR_SET_PDEATHSIG = 1


def main(reference: str) -> None:
    """Run the check function ``reference``, report its outcome and end the process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the engine's to handle
    signal.signal(signal.SIGTERM, _leave)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    module, _, name = reference.partition(":")
    context = TypeAdapter(Context).validate_json(sys.stdin.buffer.read())
    try:
        outcome = getattr(import_module(module), name)(context, lambda share, subject: tell(progress=[share, subject]))
    except NotMeasuredError as error:
        tell(verdict=error.verdict, reason=str(error))
    else:
        tell(outcome=TypeAdapter(Outcome).dump_python(outcome, mode="json"))
    # A thread stuck in a driver call must not keep the process alive.
    sys.stderr.flush()
    os._exit(0)


def _leave(_number: int, _frame: object) -> NoReturn:
    """Exit through Python, so that the check removes what it created: gigabytes of test files, processes of a drill."""
    raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main(sys.argv[1])
