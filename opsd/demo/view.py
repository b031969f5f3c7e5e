"""What the demo shows while it runs, and its report at the end.

The live view: what the run, the GPUs and the agent are doing, on one screen.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from opsd.demo.faults import Trial
from opsd.demo.scene import RunSnapshot
from opsd.rank_page import RankPage

_BARS = "▁▂▃▄▅▆▇█"
DETAIL_LENGTH = 16
_PHASE_STYLE = {"data": "cyan", "forward": "green", "backward": "green", "optimizer": "green", "checkpoint": "magenta"}
_STATE_STYLE = {"open": "red", "acting": "yellow", "verifying": "yellow", "resolved": "green", "escalated": "bold red"}


@dataclass
class View:
    """Holds the history shown on the screen: losses for the sparkline and the event log."""

    simulated_gpus: bool
    stage: str = ""
    waiting: str = ""
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=600))
    log: deque[str] = field(default_factory=lambda: deque(maxlen=9))
    _logged_events: int = 0
    _logged_states: dict[str, str] = field(default_factory=dict)
    _logged_actions: dict[str, int] = field(default_factory=dict)
    _last_step: int = -1

    def update(self, now: RunSnapshot, elapsed: float) -> list[str]:
        """Process a snapshot; returns the new log lines."""
        fresh = [*self._from_events(now), *self._from_incidents(now)]
        lines = [f"{elapsed:6.1f} s  {line}" for line in fresh]
        self.log.extend(lines)
        for record in now.pages[0].steps if now.pages else ():
            if record.step > self._last_step:
                self._last_step = record.step
                self.losses.append(record.loss)
        return lines

    def note(self, text: str, elapsed: float) -> str:
        """Add a line to the log."""
        line = f"{elapsed:6.1f} s  {text}"
        self.log.append(line)
        return line

    def render(self, now: RunSnapshot, elapsed: float) -> RenderableType:
        """The whole screen."""
        title = Text.assemble(
            (" opsd demo ", "reverse bold"), f"  {self.stage}  ", (f"{elapsed:.0f} s  {self.waiting}", "dim")
        )
        return Group(
            title,
            Panel(_ranks(now), title="ranks", title_align="left"),
            Panel(self._loss(), title="loss", title_align="left"),
            Panel(_gpus(now.gpus), title="GPUs" + (" (simulated)" if self.simulated_gpus else ""), title_align="left"),
            Panel(_incidents(now), title="incidents", title_align="left"),
            Panel(Text("\n".join(self.log), overflow="ellipsis", no_wrap=True), title="log", title_align="left"),
        )

    def _loss(self) -> Text:
        if not self.losses:
            return Text("no step yet", style="dim")
        return Text.assemble(
            (sparkline(list(self.losses), 60), "cyan"), f"  {self.losses[0]:.3f} → {self.losses[-1]:.3f}"
        )

    def _from_events(self, now: RunSnapshot) -> list[str]:
        fresh = now.events[self._logged_events :]
        self._logged_events = len(now.events)
        return [line for event in fresh if (line := describe_event(event))]

    def _from_incidents(self, now: RunSnapshot) -> list[str]:
        lines = []
        for incident in reversed(now.incidents or ()):
            key, state = incident["id"], incident["state"]
            done = [action for action in incident["actions"] if action["outcome"] != "running"]
            lines += [f"agent  {describe_action(action)}" for action in done[self._logged_actions.get(key, 0) :]]
            self._logged_actions[key] = len(done)
            if self._logged_states.get(key) != state:
                self._logged_states[key] = state
                lines.append(f"agent  {incident['kind']} {state}: {incident['summary']}")
        return lines


def sparkline(values: list[float], width: int) -> str:
    """``values`` as at most ``width`` bars; each bar is the mean of its share of the values."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    chunk = max(1, math.ceil(len(finite) / width))
    means = [sum(finite[i : i + chunk]) / len(finite[i : i + chunk]) for i in range(0, len(finite), chunk)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def describe_event(event: Mapping[str, Any]) -> str | None:
    """One line for a launcher event, or None for those that are not shown."""
    match event["event"]:
        case "generation_started":
            warm = event.get("standby", 0)
            return f"launch generation {event['generation']} started" + (f", {warm} warm interpreters" if warm else "")
        case "rank_exited" if event.get("culprit"):
            return f"launch rank {event['rank']} ended by {event['exit']} after step {event['step']}"
        case "hang_detected":
            return f"launch rank {event['rank']} hangs: {event['reason']}"
        case "resumed":
            if event.get("previous_step") is None:
                return f"launch first step {event['step']}"
            return (
                f"launch resumed at step {event['step']} after {event['recovered_s']:.1f} s, {event['lost_steps']} lost"
            )
        case "checkpoint_rejected":
            return f"rank   checkpoint of step {event['step']} refused: {event['why']}"
        case "checkpoint_loaded":
            return f"rank   checkpoint of step {event['step']} loaded from {event['tier']} in {event['load_s']:.2f} s"
        case "data_worker_restarted":
            return f"rank   new data worker from sample {event['sample']}"
        case "finished":
            return f"launch finished: {event['reason']}"
    return None


def describe_action(action: Mapping[str, Any]) -> str:
    """One line for an entry of an incident's actions."""
    detail = action.get("detail") or action.get("reason") or ""
    return f"{action['verb']}: {action['outcome']}" + (f", {detail}" if detail else "")


def _ranks(now: RunSnapshot) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("rank", "gen", "step", "phase", "for", "loss", "tokens/s", "step time", "data wait"):
        table.add_column(column, justify="left" if column == "phase" else "right", min_width=6)
    for page in now.pages:
        table.add_row(*_rank_row(page, now))
    return table


def _rank_row(page: RankPage, now: RunSnapshot) -> list[str | Text]:
    last = page.last_step
    age = max(0.0, now.wall - page.created_wall - (page.phase_since - page.created))
    cells: list[str | Text] = [
        str(page.rank),
        str(page.generation),
        str(last.step) if last else "-",
        Text(page.phase, style=_PHASE_STYLE.get(page.phase, "")),
        f"{age:.1f} s",
    ]
    if last is None:
        return [*cells, "-", "-", "-", "-"]
    return [
        *cells,
        f"{last.loss:.3f}",
        f"{last.tokens / last.duration_s:,.0f}",
        f"{last.duration_s * 1e3:.0f} ms",
        f"{last.phase('data') * 1e3:.1f} ms",
    ]


def _gpus(gpus: Mapping[int, Mapping[str, float]] | None) -> RenderableType:
    if gpus is None:
        return Text("the agent does not answer", style="red")
    if not gpus:
        return Text("none found", style="dim")
    table = Table(box=None, pad_edge=False)
    for column in ("", *(f"GPU {gpu}" for gpu in sorted(gpus))):
        table.add_column(column, justify="right")
    for name, unit in (("temperature", "°C"), ("clock_mhz", "MHz"), ("power_watts", "W"), ("limit_watts", "W limit")):
        row = (gpus[gpu].get(name) for gpu in sorted(gpus))
        table.add_row(unit, *("?" if value is None else f"{value:.0f}" for value in row))
    return table


def _incidents(now: RunSnapshot) -> RenderableType:
    if now.incidents is None:
        return Text("the agent does not answer", style="red")
    if not now.incidents:
        return Text("none", style="dim")
    table = Table(box=None, pad_edge=False, expand=True)
    for column, width in (("kind", 18), ("state", 9), ("culprit", 16)):
        table.add_column(column, no_wrap=True, overflow="ellipsis", width=width)
    table.add_column("what", no_wrap=True, overflow="ellipsis", ratio=1)
    for incident in now.incidents[:6]:
        table.add_row(
            incident["kind"],
            Text(incident["state"], style=_STATE_STYLE.get(incident["state"], "")),
            culprit_name(incident["culprit"]),
            incident["summary"],
        )
    return table


def culprit_name(culprit: Mapping[str, Any]) -> str:
    """A culprit in words: "rank 1", "GPU 1 (rank 1)", "data of rank 0", "storage: FILE"."""
    component, rank, gpu = culprit["component"], culprit.get("rank"), culprit.get("gpu")
    if component == "gpu" and gpu is not None:
        return f"GPU {gpu}" + (f" (rank {rank})" if rank is not None else "")
    if component == "rank" and rank is not None:
        return f"rank {rank}"
    if rank is not None:
        return f"{component} of rank {rank}"
    detail = str(culprit.get("detail") or "")
    if len(detail) > DETAIL_LENGTH:
        detail = detail[: DETAIL_LENGTH - 1] + "…"
    return f"{component}: {detail}" if detail else str(component)


# The end of the demo: the table of faults, the comparison of the losses, the verdict.


def losses(metrics: Path) -> dict[int, list[str]]:
    """Every reported loss of each step, as written; a repeated step has several."""
    found: dict[int, list[str]] = {}
    with open(metrics, encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                record = json.loads(line, parse_float=str)
                found.setdefault(int(record["step"]), []).append(str(record["loss"]))
    return found


def differing_steps(reference: Mapping[int, Sequence[str]], disturbed: Mapping[int, Sequence[str]]) -> list[int]:
    """Steps whose losses differ in any bit, including repeated steps and steps missing in one run."""
    return [
        step
        for step in sorted(reference.keys() | disturbed.keys())
        if len({*reference.get(step, ("missing",)), *disturbed.get(step, ("missing",))}) != 1
    ]


def as_json(
    trials: Sequence[Trial], *, equal: bool, steps: int, ledger: Mapping[str, Any], simulated: bool
) -> dict[str, Any]:
    """The demo's result for machines."""
    return {
        "faults": [
            {
                "kind": trial.fault.kind,
                "detected_s": _after(trial, trial.detected_at),
                "recovered_s": _after(trial, trial.recovered_at),
                "lost_steps": trial.lost_steps,
                "culprit": trial.incident["culprit"] if trial.incident else None,
                "culprit_expected": trial.expected,
                "runbook": trial.incident["kind"] if trial.incident else None,
                "symptoms": sorted(trial.symptoms),
            }
            for trial in trials
        ],
        "bitwise_equal": equal,
        "steps": steps,
        "ledger": ledger,
        "simulated_gpus": simulated,
    }


def faults_table(trials: Sequence[Trial]) -> Table:
    """One row per fault: what was done to the run and the outcome."""
    table = Table(
        title="Faults: seconds from injection, steps lost", title_justify="left", box=None, padding=(0, 1, 0, 0)
    )
    table.add_column("fault", min_width=19)
    for column in ("detected", "recovered", "lost"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("culprit named", no_wrap=True, overflow="ellipsis", max_width=14)
    table.add_column("runbook", no_wrap=True)
    for trial in trials:
        table.add_row(
            trial.fault.title,
            _seconds(_after(trial, trial.detected_at)),
            _seconds(_after(trial, trial.recovered_at)),
            str(trial.lost_steps),
            _culprit(trial),
            " + ".join((trial.fault.runbook, *trial.symptoms)),
        )
    return table


STARVED = 0.1
"""Share of the time in which tasks wait for a processor from which ranks take turns, so that one may well be slower."""


class Alarms(NamedTuple):
    """Incidents of the undisturbed run. ``false`` has the kinds of those that it should not have.

    ``starved`` has the stragglers that wanted for a processor, ``elsewhere`` what is about this machine and not about
    the demo, such as a full disk. Both are summaries.
    """

    false: list[str]
    starved: str
    elsewhere: str


def alarms(incidents: Sequence[Mapping[str, Any]], waited: float) -> Alarms:
    """``waited`` is the share of the time in which tasks of this machine waited for a processor."""
    elsewhere = [one for one in incidents if not _is_of_demo(one)]
    starved = [one for one in incidents if one["kind"] == "straggler" and waited >= STARVED]
    false = [one["kind"] for one in incidents if one not in elsewhere and one not in starved]
    return Alarms(false, *(", ".join(one["summary"] for one in some) for some in (starved, elsewhere)))


def _is_of_demo(incident: Mapping[str, Any]) -> bool:
    """True if it is about the run, or about a GPU."""
    culprit: Mapping[str, Any] = incident["culprit"]
    return bool(incident.get("run")) or any(culprit.get(key) is not None for key in ("gpu", "rank"))


def stories(trials: Sequence[Trial]) -> list[str]:
    """One line a fault, in plain words: what broke, who noticed, when it was repaired, what nobody had to do."""
    lines = []
    for number, trial in enumerate(trials, 1):
        broke = f"{number}. {trial.fault.broke[0].upper()}{trial.fault.broke[1:]}"
        noticed = f"{trial.noticed_by} noticed after {_seconds(_after(trial, trial.detected_at))}"
        repaired = f"all was well after {_seconds(_after(trial, trial.recovered_at))}"
        lines.append(
            f"{broke}: {noticed}, {repaired}. Without opsd: {trial.fault.by_hand}."
            if trial.passed
            else f"[red]{broke}: not detected, named and repaired as it should be[/]"
        )
    return lines


def verdict(
    trials: Sequence[Trial],
    missing: Sequence[str],
    differing: Sequence[int],
    undisturbed: Mapping[int, Sequence[str]],
    disturbed: Mapping[int, Sequence[str]],
    false_alarms: Sequence[str],
) -> list[str]:
    """The demo's results, one sentence each, in rich markup."""
    lines = [f"[red]never injected: {title}[/]" for title in missing]
    lines += [f"[red]not repaired: {trial.fault.title}[/]" for trial in trials if not trial.passed]
    if false_alarms:
        lines.append(f"[red]false alarms during the undisturbed run: {', '.join(false_alarms)}[/]")
    twice = sum(len(values) - 1 for values in disturbed.values())
    if differing:
        at = ", ".join(map(str, differing[:5]))
        lines.append(f"[red]losses differ from the undisturbed run at {len(differing)} steps, first at {at}[/]")
    else:
        last = undisturbed[max(undisturbed)][0]
        lines.append(
            f"losses: all {len(disturbed)} steps ({twice} of them done twice) equal those of the undisturbed run to "
            f"the last bit; last {last}"
        )
    return lines


def _culprit(trial: Trial) -> str:
    if trial.incident is None:
        return "[red]nobody[/red]"
    name = culprit_name(trial.incident["culprit"])
    return (
        name
        if trial.culprit_right
        else f"[red]{name}, expected {culprit_name({'component': '', **trial.expected})}[/red]"
    )


def _after(trial: Trial, at: float | None) -> float | None:
    return None if at is None else round(at - trial.injected_at, 3)


def _seconds(value: float | None) -> str:
    return "[red]never[/red]" if value is None else f"{value:.1f} s"
