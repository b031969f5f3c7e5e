"""The end of the demo: the table of faults, the comparison of the losses, the verdict."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from opsd.demo.faults import Trial
from opsd.demo.view import culprit_name


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
