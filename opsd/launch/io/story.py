"""The story of a run: each event that matters to a person as one readable line. Pure.

2026-11-22 08:15:04 n4 is lost with its ranks: silent for 2.1 s
2026-11-22 08:15:05 generation 3 runs on n1, n2, n5: n5 in the place of n4
2026-11-22 08:15:08 it goes on with step 121 after 3.6 s; 1 step is done again
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Event = Mapping[str, Any]
_LONGEST = 400


class Story:
    """Tells a run from its events, one after the other, those of ``ARCHITECTURE.md``'s table."""

    def __init__(self) -> None:
        self._nodes: tuple[str, ...] = ()

    def line(self, event: Event) -> str:
        """The line of ``event``, with its time, without an end of line; "" for one that is of no interest."""
        if event.get("event") not in _TOLD and event.get("event") != "generation_started":
            return ""
        try:
            kind = str(event["event"])
            told = self._generation(event) if kind == "generation_started" else _TOLD[kind](event)
        except (KeyError, TypeError, ValueError, AttributeError):
            told = f"{event.get('event')}"  # of another release: its time and kind are worth a line all the same
        if not told:
            return ""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(_number(event.get("t"))))
        return f"{stamp} {_one_line(told)}"

    def _generation(self, event: Event) -> str:
        nodes = tuple(map(str, event.get("nodes") or ()))
        before, self._nodes = self._nodes, nodes
        if not nodes:
            return ""
        spares = list(map(str, event.get("spares") or ()))
        told = f"generation {event['generation']} runs on {_names(nodes)}"
        came = [name for name in nodes if name not in before]
        went = [name for name in before if name not in nodes]
        if before and came and went:
            told += f": {_names(came)} in the place of {_names(went)}"
        elif before and went:
            told += f", without {_names(went)}"
        elif before and came:
            told += f", with {_names(came)} again or for the first time"
        return f"{told}; {_names(spares)} stand{'s' if len(spares) == 1 else ''} by" if spares else told


def _rank_exited(event: Event) -> str:
    if not event.get("culprit"):
        return ""
    told = f"rank {event['rank']} on {event['node']} ended by itself: {event['exit']}"
    if (step := event.get("step")) is not None:
        told += f" after step {step}"
    error = event.get("error")
    return f"{told}: {error.get('type')}: {error.get('message')}" if error else told


def _hang(event: Event) -> str:
    who = f"rank {event['rank']}" if event.get("rank") is not None else "the run, no rank more than others,"
    where = f" on {event['culprit_node']}" if event.get("culprit_node") else ""
    stacks = f"; stacks in {event['stacks']}" if event.get("stacks") else ""
    return f"{who}{where} hangs in {event['phase']} since {_number(event['stuck_s']):.0f} s{stacks}"


def _resumed(event: Event) -> str:
    lost = int(event.get("lost_steps") or 0)
    again = f"{lost} step{'s are' if lost != 1 else ' is'} done again" if lost else "no step is lost"
    return f"it goes on with step {event['step']} after {_number(event['recovered_s']):.1f} s; {again}"


def _loaded(event: Event) -> str:
    return "" if event.get("rank") else f"the state of step {event['step']} is loaded from {event['tier']}"


def _node_lost(event: Event) -> str:
    what = " with its ranks" if event.get("ranks") else ", which stood by"
    return f"{event['lost']} is lost{what}: silent for {_number(event['silent_s']):.1f} s"


def _requeued(event: Event) -> str:
    step = event.get("step")
    return f"{f'saved at step {step} and ' if step is not None else ''}stopped after {event['signal']}"


def _finished(event: Event) -> str:
    return f"the run ends with {event['exit_code']}: {event['reason']}"


_TOLD: Mapping[str, Callable[[Event], str]] = {
    "rank_exited": _rank_exited,
    "hang_detected": _hang,
    "resumed": _resumed,
    "restart_requested": lambda event: f"a restart is asked for: {event['reason']}",
    "requeued": _requeued,
    "finished": _finished,
    "node_lost": _node_lost,
    "ranks_gone": lambda event: f"the ranks of {event['gone']} ended while no launcher led the run",
    "launcher_joined": lambda event: f"{event['joined']} has joined",
    "spare_joined": lambda event: f"{event['joined']} stands by and takes place {event['place']}",
    "node_retired": lambda event: f"{event['retired']} is replaced: {event['reason']}",
    "swap_refused": lambda event: f"{event['swap']} cannot be replaced: {event['reason']}",
    "spare_refused": lambda event: f"{event['refused']} must not be used as a spare: {event['reason']}",
    "spare_wanted": lambda event: f"a spare is wanted in the place of {event['swap']}: {event['reason']}",
    "checkpoint_loaded": _loaded,
    "checkpoint_rejected": lambda event: f"the checkpoint of step {event['step']} is not used: {event['why']}",
    "checkpoint_failed": lambda event: f"the checkpoint of step {event['step']} was not made: {event['why']}",
    "update_skipped": lambda event: f"the update of step {event['step']} was left out: {event['why']}",
    "replicas_differ": lambda event: (
        f"ranks {_names(event['ranks'])} hold different bits of {event['tensor']} since step {event['step']}"
    ),
}


def _names(names: Sequence[object]) -> str:
    shown = ", ".join(map(str, names[:8]))
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0


def _one_line(text: str) -> str:
    plain = "".join(character if character.isprintable() else " " for character in text)
    return plain if len(plain) <= _LONGEST else f"{plain[: _LONGEST - 2]} …"
