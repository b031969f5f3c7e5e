"""The burn-in: all checks of the profile repeatedly, for hours or days, resumed after an interruption.

Each burn-in has a folder named after its start, with its parameters (``plan.json``), one report per round, the time
series (``series.jsonl``) and, at the end, the report of all rounds. Without that report it is unfinished, and a new
burn-in with the same parameters resumes it; only the interrupted round is lost. The first failed round ends it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Final

from opsd import __version__
from opsd.files import write_text
from opsd.preflight import series
from opsd.preflight.base import Check, Finding, Measure, Measurement, Outcome, Verdict, duration, quantity
from opsd.preflight.judge import judge
from opsd.preflight.report import Report, ReportError, Result, Value

PROFILE: Final = "burn-in"
LONGEST_H: Final = 72.0
RESUMED_WITHIN_S: Final = 14 * 86_400.0
"""An older one is not resumed: the node has changed since."""
_MIN_ROUNDS: Final = 6

CHECK: Final = Check(
    name="burn_in",
    title="The burn-in as a whole",
    measures=(
        Measure("rounds", "", "rounds of all checks"),
        Measure("burned", "seconds", "time under load"),
        Measure("lowest_clock", "hertz", "lowest clock", required=False),
        Measure("highest_temperature", "celsius", "highest temperature", required=False),
        Measure("highest_memory_temperature", "celsius", "highest temperature of the memory", required=False),
    ),
)


@dataclass(frozen=True, slots=True)
class BurnIn:
    """A burn-in of ``seconds`` by ``checks`` in ``folder``; the rounds in ``done`` are complete."""

    folder: Path
    checks: Sequence[Check]
    seconds: float
    done: tuple[Report, ...] = ()

    @property
    def burned(self) -> float:
        """Seconds that its rounds have taken."""
        return sum(report.ended - report.started for report in self.done)

    @property
    def over(self) -> bool:
        """Whether it has run long enough or has failed."""
        return self.burned >= self.seconds or not all(report.passed for report in self.done)

    @property
    def progress(self) -> str:
        """How far it is, in words."""
        return f"{duration(round(self.burned))} of {duration(self.seconds)}"

    @property
    def report_file(self) -> Path:
        """The report of all rounds; once it exists, the burn-in is not resumed."""
        return self.folder / "report.json"

    @property
    def series_file(self) -> Path:
        """The file to which the time series is appended."""
        return self.folder / "series.jsonl"


def begin(root: Path, node: str, checks: Sequence[Check], seconds: float, now: float) -> BurnIn:
    """The newest unfinished burn-in of ``node`` by the same ``checks`` below ``root``, or a new one. Raises OSError."""
    plan = {"node": node, "checks": [check.name for check in checks], "version": __version__}
    for folder in sorted(root.glob("[0-9]*"), reverse=True):
        found = BurnIn(folder, checks, seconds, tuple(_rounds(folder)))
        fresh = now - max((report.ended for report in found.done), default=now) < RESUMED_WITHIN_S
        if fresh and _read(folder / "plan.json") == plan and not found.report_file.exists():
            return found
    folder = root / time.strftime("%Y%m%dT%H%M%S", time.localtime(now))
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "plan.json", json.dumps(plan, indent=1) + "\n")
    return BurnIn(folder, checks, seconds)


def _read(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def _rounds(folder: Path) -> Iterator[Report]:
    """The complete rounds; an unreadable one is treated as missing."""
    for path in sorted(folder.glob("round-*.json")):
        with suppress(OSError, ReportError):
            yield Report.from_json(path.read_bytes())


def _next_round(folder: Path) -> Path:
    """The file after the last one present, which may be unreadable."""
    numbers = [path.stem.removeprefix("round-") for path in folder.glob("round-*.json")]
    return folder / f"round-{max((int(number) for number in numbers if number.isdecimal()), default=0) + 1:04}.json"


async def go_on(burn: BurnIn, one_round: Callable[[], Awaitable[Report]], say: Callable[[str], None]) -> Report:
    """Run rounds until it is over or interrupted; returns the report of all rounds.

    If a round's report cannot be stored, ``say`` is told; the round is then lost for a later resumption.
    """
    if burn.done:
        say(f"goes on with the burn-in in {burn.folder}, of which {burn.progress} are done")
    interrupted: Report | None = None
    while not burn.over:
        report = await one_round()
        if report.interrupted:
            interrupted = report
            break
        burn = replace(burn, done=(*burn.done, report))
        try:
            write_text(_next_round(burn.folder), report.to_json())
        except OSError as error:
            say(f"round {len(burn.done)} was not kept in {burn.folder}: {error.strerror or error}")
        say(f"round {len(burn.done)} {'passed' if report.passed else 'FAILED'}, {burn.progress} done")
    return merged([*burn.done, *([interrupted] if interrupted else [])], burn)


def merged(rounds: Sequence[Report], burn: BurnIn) -> Report:
    """One report of all rounds: for each check the worst round, for each value the worst one, and what declined."""
    last = rounds[-1]
    whole = [report for report in rounds if not report.interrupted] or [last]
    results = [_worst([report.results[index] for report in whole]) for index in range(len(last.results))]
    summed = sum(report.ended - report.started for report in whole)
    seen = series.outcome(series.read(burn.series_file))
    counts = (Measurement("rounds", len(whole) if not whole[0].interrupted else 0), Measurement("burned", summed))
    found = Outcome(
        (*counts, *seen.measurements), (*seen.findings, *declines(whole, burn.checks)), {"files": str(burn.folder)}
    )
    overall = replace(judge(CHECK, found, rounds[0].started), seconds=summed)
    return replace(last, started=rounds[0].started, results=(*results, overall))


def _worst(results: Sequence[Result]) -> Result:
    number, worst = max(enumerate(results, start=1), key=lambda entry: entry[1].verdict.rank)
    if len(results) > 1:
        told = f" (round {number} of {len(results)})"
        findings = tuple(replace(finding, summary=finding.summary + told) for finding in worst.findings)
        worst = replace(worst, findings=findings, values=tuple(_worst_values(results)))
    return replace(worst, seconds=sum(result.seconds for result in results))


def _worst_values(results: Sequence[Result]) -> Iterator[Value]:
    series_of: dict[tuple[str, str], list[Value]] = {}
    for result in results:
        for value in result.values:
            series_of.setdefault((value.measure, value.subject), []).append(value)
    for values in series_of.values():
        if values[0].better == "higher":
            yield min(values, key=lambda value: value.value)
        else:
            yield max(values, key=lambda value: value.value) if values[0].better else values[-1]


def declines(rounds: Sequence[Report], checks: Sequence[Check]) -> Iterator[Finding]:
    """Speeds whose median over the last third of the rounds is below that over the first third by more than noise."""
    third = len(rounds) // 3
    if len(rounds) < _MIN_ROUNDS:
        return
    measures = {(check.name, measure.name): measure for check in checks for measure in check.measures}
    speeds: dict[tuple[str, str, str], list[float]] = {}
    for result in (result for report in rounds for result in report.results):
        for value in result.values:
            if value.better == "higher":
                speeds.setdefault((result.check, value.measure, value.subject), []).append(value.value)
    for (check, name, subject), values in speeds.items():
        measure, first, later = measures[check, name], median(values[:third]), median(values[-third:])
        if later < first * (1 - measure.noise):
            what = f"{subject}: {measure.help}" if subject else measure.help
            summary = f"{what} fell from {quantity(first, measure.unit)} to {quantity(later, measure.unit)}"
            yield Finding(Verdict.WARN, summary, "compare with clocks and temperature in the time series", subject)
