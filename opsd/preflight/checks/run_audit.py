"""The first batches of a post-training script that is about to start, audited in the script itself.

``opsd launch --audit only`` runs the script on this node until its first step, and ends it there.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opsd.preflight import drill
from opsd.preflight.base import Check, Context, CouldNotRunError, Finding, Outcome, Progress, Verdict, duration
from opsd.preflight.engine import count_gpus


def run(context: Context, progress: Progress) -> Outcome:
    """Start the script under the launcher and take over what its audit finds."""
    with tempfile.TemporaryDirectory(prefix="opsd-audit-", dir=context.settings.local_dir or None) as name:
        folder = Path(name)
        code, output = _launch(context, folder)
        events = drill.events(folder)
        shutil.copyfileobj(output.open(encoding="utf-8", errors="replace"), sys.stderr)  # the log of this check
        last = drill.last_line(output)
    audits = [event for event in events if event["event"] == "audited"]
    if not audits and code:
        raise CouldNotRunError(f"the script ended with {code} before its first step: {_error(events) or last}")
    if not audits:
        raise CouldNotRunError("the script ended without a step of a trainer of transformers or TRL")
    found = audits[-1]
    if not found["documents"] and not found["findings"]:
        raise CouldNotRunError("; ".join(found["notes"]) or "the first batches have no documents")
    findings = tuple(Finding(Verdict.FAIL, sentence.removesuffix(".")) for sentence in found["findings"])
    return Outcome((), findings, {"documents": str(found["documents"]), "notes": "; ".join(found["notes"])})


def _error(events: Sequence[Mapping[str, Any]]) -> str:
    """The exception that ended the script, "" if it is not known."""
    errors = [event["error"] for event in events if event["event"] == "rank_exited" and event["error"]]
    return f"{errors[0]['type']}: {errors[0]['message']}" if errors else ""


def _launch(context: Context, folder: Path) -> tuple[int, Path]:
    """The exit code of the script, and the file of what it has printed. Raises CouldNotRunError."""
    gpus = context.settings.gpus or count_gpus(context) or 1
    command = [
        sys.executable, "-P", "-m", "opsd", "launch", f"--nproc-per-node={gpus}",
        "--standalone", "--redirects=3", "--audit=only", "--max-restarts=0", f"--run-id=audit-{os.getpid()}",
        f"--run-dir={folder}", f"--events={folder / drill.EVENTS}", *shlex.split(context.script),
    ]  # fmt: skip
    output = folder / "output"
    environment = {**os.environ, "OPSD_SHM": str(folder / "shm")}
    with output.open("wb") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            return process.wait(context.seconds * 3), output
        except subprocess.TimeoutExpired:
            raise CouldNotRunError(f"the script made no step within {duration(context.seconds * 3)}") from None
        finally:
            process.kill()
            process.wait()


CHECK = Check(
    name="run_audit",
    title="First batches of the post-training script",
    run=run,
    seconds=dict.fromkeys(("quick", "standard", "burn-in"), 300),
    needs=frozenset({"script", "torch", "exclusive"}),
    advice="correct the data or the template; docs/post-training.md explains each finding",
)
