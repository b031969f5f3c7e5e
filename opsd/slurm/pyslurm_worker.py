"""The process in which pyslurm runs: JSON requests on standard input, answers on standard output, one per line.

pyslurm runs outside opsd's own processes for two reasons. Importing it where Slurm is not configured exits the process.
And its calls hold the GIL: with the controller down, ``Nodes.load()`` stops every thread for ten seconds (measured with
pyslurm 25.11.2). A separate process can be abandoned at a deadline.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from opsd.slurm.hostlist import expand


def operations(pyslurm: Any) -> Mapping[str, Callable[..., object]]:
    """The supported requests, by name, on top of the module ``pyslurm``."""

    def nodes(names: Sequence[str]) -> list[dict[str, object]]:
        loaded = pyslurm.Nodes.load().values()
        return [_node(node) for node in loaded if not names or node.name in names]

    def update_nodes(names: Sequence[str], state: str, reason: str) -> None:
        change = pyslurm.Node(state=state.upper())
        if reason:
            change.reason = reason
        pyslurm.Nodes({name: pyslurm.Node(name) for name in names}).modify(change)

    def jobs(ids: Sequence[int], node: str) -> list[dict[str, object]]:
        found = map(_job, pyslurm.Jobs.load().values())
        return [job for job in found if (not ids or job["id"] in ids) and (not node or node in _sequence(job["nodes"]))]

    def responds() -> bool:
        return any(controller.is_responding for controller in pyslurm.slurmctld.ping_all())

    return {
        "hello": lambda: str(pyslurm.__version__),
        "responds": responds,
        "nodes": nodes,
        "update_nodes": update_nodes,
        "jobs": jobs,
    }


def serve(known: Mapping[str, Callable[..., object]], requests: Iterable[str], write: Callable[[str], object]) -> None:
    """Answer each request ``[name, argument, …]`` with ``{"ok": value}`` or ``{"error": sentence}``."""
    for line in requests:
        name, *arguments = json.loads(line)
        try:
            answer: dict[str, object] = {"ok": known[name](*arguments)}
        except Exception as error:
            # pyslurm raises RPCError, but also ValueError and others; the asker gets the sentence in every case.
            answer = {"error": str(error) or type(error).__name__}
        write(json.dumps(answer, default=str) + "\n")


def _node(node: Any) -> dict[str, object]:
    base, *flags = node.state.lower().split("+")
    reason = node.reason or ""
    return {
        "name": node.name,
        "state": base,
        "flags": flags,
        "reason": reason,
        "reason_by": (node.reason_user or "") if reason else "",
        "reason_at": node.reason_time if reason else None,
    }


def _job(job: Any) -> dict[str, object]:
    return {
        "id": job.id,
        "state": job.state.lower(),
        "reason": "" if job.state_reason in (None, "None") else job.state_reason,
        "user": job.user_name or "",
        "partition": job.partition or "",
        "nodes": expand(job.allocated_nodes or ""),
        "batch_host": job.batch_host or "",
        "submitted_at": job.submit_time,
        "starts_at": job.start_time,
        "ends_at": job.end_time if job.time_limit else None,
        "restarts": job.requeue_count,
        "name": job.name or "",
    }


def _sequence(value: object) -> Sequence[object]:
    assert isinstance(value, Sequence)
    return value


def main() -> None:
    """Serve standard input until it ends."""
    import pyslurm  # exits the process where Slurm is not configured

    def write(line: str) -> None:
        sys.stdout.write(line)
        sys.stdout.flush()

    serve(operations(pyslurm), sys.stdin, write)


if __name__ == "__main__":
    main()
