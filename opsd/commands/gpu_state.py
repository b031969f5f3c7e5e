"""The state of a GPU in a few words, from the agent's status and its current incidents. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

NEAR_LIMIT_C = 5.0
USUAL_LIMIT_C = 90.0
"""Assumed where the driver does not say at which temperature the GPU slows itself down."""
BUSY_PERCENT = 5.0
_SEVERITIES = {"critical": "bold red", "warning": "yellow", "info": "default"}


def gpu_state(
    gpu: Mapping[str, Any],
    incidents: Iterable[Mapping[str, Any]],
    ranks: Iterable[Mapping[str, Any]],
    jobs: Iterable[Mapping[str, Any]] = (),
) -> tuple[str, str]:
    """What is to be said about ``gpu``, the worst first, and its style. Texts must be safe for the terminal.

    ``jobs`` are Slurm's on the node; on a GPU without a rank they are what it is used for.
    """
    if gpu["lost"]:
        return f"lost: {gpu['lost']}", "bold red"
    found = [i for i in incidents if i["culprit"]["gpu"] == gpu["index"] and i["resolved_at"] is None]
    if found:
        worst = min(found, key=lambda incident: list(_SEVERITIES).index(incident["severity"]))
        more = f" (+{len(found) - 1} more)" if len(found) > 1 else ""
        return f"{worst['summary']}{more}", _SEVERITIES[worst["severity"]]
    if gpu.get("orphans"):
        return f"held by dead processes: {', '.join(map(str, gpu['orphans']))}", "yellow"
    if (style := heat_style(gpu)) != "default":
        return "at its heat limit" if style == "bold red" else "hot", style
    rank = next((rank for rank in ranks if rank["live"] and rank["gpu"] == gpu["index"]), None)
    if rank is not None:
        return f"rank {rank['rank']} of {rank['run']}", "green"
    if mine := [job for job in jobs if gpu["index"] in job["gpus"]]:
        idle = all(str(gpu["index"]) in job["idle_s"] for job in mine)
        whose = ", ".join(_named(job) for job in mine)
        return (f"{whose}, idle", "yellow") if idle else (whose, "green")
    used = gpu["utilization_percent"]
    if used is None:
        return "ok", "green"
    return ("busy, no rank of a run", "green") if used >= BUSY_PERCENT else ("idle", "dim")


def _named(job: Mapping[str, Any]) -> str:
    return f"job {job['job']}" + (f" of {job['user']}" if job["user"] else "")


def heat_style(gpu: Mapping[str, Any]) -> str:
    """The style of a GPU's temperature, by the degrees that are left until it slows itself down."""
    celsius, margin = gpu["temperature_celsius"], gpu.get("temperature_margin_celsius")
    left = USUAL_LIMIT_C - celsius if margin is None and celsius is not None else margin
    if left is None or left > NEAR_LIMIT_C:
        return "default"
    return "bold red" if left <= 0 else "yellow"
