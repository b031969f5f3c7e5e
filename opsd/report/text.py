"""The report of a run as text: the closing block of ``opsd launch``, and ``opsd report --text``. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from opsd import exitcodes
from opsd.plan.forecast import DAY_S, told
from opsd.report.run import Price, Restart, RunReport, cost_line
from opsd.words import clock, count, duration, first_line, plural

MAX_RESTARTS = 8
"""Restarts that are listed in the closing block, the newest ones."""
LEAST_S = 0.005
"""Less time is not shown: it would be 0.00."""
_WIDTH = 10
_SHOWN_BUCKETS = 4


def closing_block(run: RunReport, price: Price, *, page: Path | None, resume: str) -> list[str]:
    """The lines with which a launcher ends: why it ended, what was done, what it cost, how to go on."""
    said_by_rank = run.exit_code == exitcodes.NOT_FOUND
    lines = [f"{run.run} {run.state}" if said_by_rank else _end(run), *_facts(run, price)]
    lines += _labelled("restarts", list(_restarts(run)))
    if page is not None:
        lines += _labelled("report", [str(page)])
    if resume and run.exit_code != exitcodes.OK:
        lines += _labelled("resume", [resume])
    return lines


def summary(run: RunReport) -> str:
    """How the run ended, what was done and what failures have cost, in one line without the run's name."""
    said = "" if run.exit_code == exitcodes.NOT_FOUND else _reason(run)
    last = "" if run.last_step is None else f" up to step {run.last_step}"
    facts = [f"{plural(run.ledger.steps, 'step')}{last}"] if run.steps else []
    facts += [f"{count(run.tokens)} tokens"] if run.tokens is not None else []
    facts += [_time(run).partition(" (")[0], plural(len(run.restarts), "restart")]
    return f"{run.state}{f' ({said})' if said else ''}: {', '.join(facts)}"


def text_report(run: RunReport, price: Price) -> list[str]:
    """The whole report as lines."""
    shape = f"{plural(run.world_size, 'rank')} on {_names(run.nodes)}"
    lines = [_end(run)]
    lines += _labelled("ran", [f"{clock(run.began)} to {clock(run.ended)}, {shape}"])
    lines += [*_facts(run, price), *_labelled("restarts", list(_restarts(run, most=len(run.restarts))))]
    if losses := [step for step in run.steps if step.loss == step.loss]:
        lines += _labelled("loss", [f"{losses[0].loss:.4f} at step {losses[0].step}, {losses[-1].loss:.4f} at the end"])
    if run.checkpoints:
        t, step = run.checkpoints[-1]
        lines += _labelled(
            "saved", [f"{plural(len(run.checkpoints), 'checkpoint')}, the last of step {step}, {clock(t)}"]
        )
    for line in run.evaluations[-1:]:
        scores = ", ".join(f"{name} {value:.4g}" for name, value in scores_of(line).items())
        said = scores or f"failed: {first_line(str(line.get('why') or 'see evaluations.log'))}"
        lines += _labelled("evaluated", [f"step {line['step']}: {said}"])
    lines += _labelled("experts", [run.experts.sentence] if run.experts else [])
    lines += _labelled("slow", list(run.slow[-MAX_RESTARTS:]))
    lines += _labelled("where the time went", [])
    for name, seconds in sorted(run.ledger.buckets.items(), key=lambda pair: -pair[1]):
        if seconds >= LEAST_S:
            lines.append(f"    {name.replace('_', ' '):<18}{duration(seconds):>14}{seconds / run.ledger.wall_s:>8.1%}")
    return lines + [f"  note: {note}" for note in run.ledger.notes]


def scores_of(line: object) -> dict[str, float]:
    """The numbers of a line of evaluations, flat: ``wiki.perplexity``."""
    found: dict[str, float] = {}

    def walk(name: str, value: object) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{name}.{key}" if name else str(key), inner)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = float(value)

    walk("", line["results"] if isinstance(line, dict) else {})
    return found


def restart_line(restart: Restart) -> str:
    """How the run went on after an interruption, and what that cost."""
    if restart.down_s is None:
        return "started again; no step was seen afterwards"
    if restart.step is None:
        return f"went on after {duration(restart.down_s)}; how many steps are done again is not known"
    again = f", {plural(restart.repeated, 'step')} done again" if restart.repeated else ", no step lost"
    return f"went on with step {restart.step} after {duration(restart.down_s)}{again}"


def _end(run: RunReport) -> str:
    """How the run ended, with the first sentence of the reason; the launcher has said the rest."""
    said = _reason(run)
    return f"{run.run} {run.state}{f': {said}' if said else ''}"


def _reason(run: RunReport) -> str:
    """Nothing for a run that has finished: its reason is that all ranks have."""
    if run.exit_code == exitcodes.OK:
        return ""
    return first_line(run.reason.removeprefix("stopped: ").partition(". ")[0], 160)


def _facts(run: RunReport, price: Price) -> Iterator[str]:
    if run.steps:
        again = f", {run.repeated:,} of them a second time" if run.repeated else ""
        last = "" if run.last_step is None else f"; the last is step {run.last_step}"
        yield from _labelled("steps", [f"{run.ledger.steps:,}{again}{last}"])
    if run.tokens is not None:
        yield from _labelled("tokens", [count(run.tokens)])
    yield from _labelled("time", [_time(run)])
    yield from _labelled("plan", list(_plan(run)))
    if cost := cost_line(run, price):
        yield from _labelled("cost", [cost])
    if run.ablations:
        yield from _labelled("ablations", [run.ablations_line])
    if run.data:
        yield from _labelled("data", [run.data_line])


def _plan(run: RunReport) -> Iterator[str]:
    if run.plan_problem:
        yield run.plan_problem
    elif found := run.forecast:
        yield from (f"{name}: {text}" for name, text in told(found))
    elif run.planned is not None and run.tokens is not None and run.tokens >= run.planned.tokens:
        yield f"{run.ledger.wall_s / DAY_S:.1f} days; {run.planned.days:.1f} were planned"


def _time(run: RunReport) -> str:
    wall = duration(run.ledger.wall_s)
    if not run.steps:
        return wall
    least_s = 0.001 * run.ledger.wall_s
    buckets = run.ledger.buckets.items()
    other = sorted(((s, name) for name, s in buckets if name != "productive" and s > least_s), reverse=True)
    shown = ", ".join(f"{name.replace('_', ' ')} {duration(seconds)}" for seconds, name in other[:_SHOWN_BUCKETS])
    return f"{wall}, ETTR {run.ledger.ettr:.1%}" + (f" ({shown})" if shown else "")


def _restarts(run: RunReport, most: int = MAX_RESTARTS) -> Iterator[str]:
    if not run.restarts:
        yield "none"
        return
    cost = sum(restart.cost_s for restart in run.restarts)
    yield f"{len(run.restarts)}, which cost {duration(cost)}"
    left = len(run.restarts) - most
    if left > 0:
        yield f"+{left} earlier"
    for restart in run.restarts[-most:]:
        yield f"{clock(restart.t)[11:]}  {first_line(restart.cause, 200)}"
        yield f"          {restart_line(restart)}"


def _names(nodes: Sequence[str]) -> str:
    shown = ", ".join(nodes[:8])
    return f"{shown} and {len(nodes) - 8} more" if len(nodes) > 8 else shown


def _labelled(label: str, lines: Sequence[str]) -> list[str]:
    """The first line beside its label, the others below it."""
    if not lines:
        return [f"  {label}"] if " " in label else []
    return [f"  {label:<{_WIDTH}}{lines[0]}", *(f"  {'':<{_WIDTH}}{line}" for line in lines[1:])]
