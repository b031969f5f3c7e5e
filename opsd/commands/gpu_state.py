"""The state of a GPU in a few words, from the agent's status and its current incidents. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

HOT_C, TOO_HOT_C = 83.0, 90.0
"""A data-centre GPU slows down at 87 to 92 °C, depending on the model."""
BUSY_PERCENT = 5.0
_SEVERITIES = {"critical": "bold red", "warning": "yellow", "info": "default"}


def gpu_state(
    gpu: Mapping[str, Any], incidents: Iterable[Mapping[str, Any]], ranks: Iterable[Mapping[str, Any]]
) -> tuple[str, str]:
    """What is to be said about ``gpu``, the worst first, and its style. Texts must be safe for the terminal."""
    if gpu["lost"]:
        return f"lost: {gpu['lost']}", "bold red"
    mine = [i for i in incidents if i["culprit"]["gpu"] == gpu["index"] and i["resolved_at"] is None]
    if mine:
        worst = min(mine, key=lambda incident: list(_SEVERITIES).index(incident["severity"]))
        more = f" (+{len(mine) - 1} more)" if len(mine) > 1 else ""
        return f"{worst['summary']}{more}", _SEVERITIES[worst["severity"]]
    if gpu.get("orphans"):
        return f"held by dead processes: {', '.join(map(str, gpu['orphans']))}", "yellow"
    celsius = gpu["temperature_celsius"]
    if celsius is not None and celsius >= HOT_C:
        return f"hot, {celsius:.0f} °C", heat_style(celsius)
    rank = next((rank for rank in ranks if rank["live"] and rank["gpu"] == gpu["index"]), None)
    if rank is not None:
        return f"rank {rank['rank']} of {rank['run']}", "green"
    used = gpu["utilization_percent"]
    if used is None:
        return "ok", "green"
    return ("busy, no rank of a run", "green") if used >= BUSY_PERCENT else ("idle", "dim")


def heat_style(celsius: float | None) -> str:
    """The style of a temperature."""
    if celsius is None or celsius < HOT_C:
        return "default"
    return "bold red" if celsius >= TOO_HOT_C else "yellow"
