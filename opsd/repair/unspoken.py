"""What a vendor gets of a node's records: what the machine says, and no word of users' programs. Pure.

A command line, or what a program has printed, may hold a password without any mark by which it could be known. So no
such text is taken, instead of secrets being looked for in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from opsd.runbooks import RUNBOOKS

MACHINE: Final = frozenset({
    "NVML", "DCGM", "driver", "nvml", "dcgm", "kmsg", "kmsg, inferred", "kernel", "kernel log", "Xid catalogue", "host",
    "infiniband", "SMART log", "Slurm and the driver", "agent",
})  # fmt: skip
"""Sources of evidence that speak of hardware, in words of the kernel, of drivers and of opsd."""
TOLD_BY_USERS: Final = frozenset(
    runbook.kind for runbook in RUNBOOKS if runbook.told_by_runs or "ranks" in runbook.needs
)
_BARE: Final = (
    "id", "kind", "severity", "state", "opened_at", "last_seen_at", "resolved_at", "confidence", "attempts", "relapses",
    "cause",
)  # fmt: skip
_BEGINNING: Final = 60
"""Characters by which a text is known in another one, where it may be cut."""
_PROCESS: Final = re.compile(r"(?ms)^([ \t]+(?:Process )?Name[ \t]+: \S+).*?(?=\n[ \t]+Used GPU |\nGPU |\n?\Z)")
"""To the line that follows it in all releases: an argument may have lines of its own (``python -c``)."""
_AUDIT: Final = re.compile(r"(?m)^([^\n]*?\baudit(?:\(|: type=)\d+)[^\n]*")


def incident(document: Mapping[str, Any]) -> dict[str, Any]:
    """An incident of the journal. Of one that rests on what runs say only its kind, time and place remain."""
    told = {name: document.get(name) for name in _BARE}
    culprit = document.get("culprit") or {}
    told["culprit"] = {name: culprit.get(name) for name in ("component", "node", "gpu", "rank")}
    facts = document.get("evidence") or ()
    told["evidence"] = [fact for fact in facts if fact.get("source") in MACHINE]
    unsaid = [str(fact.get("text"))[:_BEGINNING] for fact in facts if fact.get("source") not in MACHINE]
    done = document.get("actions") or ()
    told["actions"] = [{name: action.get(name) for name in ("verb", "at", "outcome")} for action in done]
    if document.get("kind") in {runbook.kind for runbook in RUNBOOKS} - TOLD_BY_USERS:
        told |= {name: document.get(name) for name in ("key", "summary", "culprit")}
        if any(text and text in str(told["summary"]) for text in unsaid):
            del told["summary"]  # a runbook quotes there what it rests on
    return told


def processes(text: str) -> str:
    """What nvidia-smi says, with the program of each process and none of its arguments."""
    return _PROCESS.sub(r"\1", text)


def kernel(text: str) -> str:
    """The kernel's log without the bodies of audit records, which are command lines where no daemon takes them."""
    return _AUDIT.sub(r"\1: (left out)", text)
