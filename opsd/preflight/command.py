"""Runs a preflight: collects settings, history and fleet, writes the report, its files and the history.

Errors while results are written are reported and never change the verdict.

Implements ``--act``: drain a node that failed, with its evidence, and return one that passed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from opsd import __version__
from opsd.config import Settings
from opsd.dependents import Dependents
from opsd.files import write_text
from opsd.preflight import burnin, series, view
from opsd.preflight.base import Bounds, Check, Context
from opsd.preflight.checks import CHECKS, gpu_inventory
from opsd.preflight.engine import CheckRun, SelectionError, find, run, select, unmet_need
from opsd.preflight.fleet import Fleet
from opsd.preflight.history import History, HistoryError, is_whole, render
from opsd.preflight.judge import Yardsticks
from opsd.preflight.network.plan import NETWORK
from opsd.preflight.report import Report
from opsd.preflight.training import demand_by
from opsd.settings.policy import PolicySettings
from opsd.settings.sections import PreflightSettings
from opsd.slurm.connect import choose
from opsd.slurm.deferred import SlurmDrainer
from opsd.slurm.drain import OWN_PREFIX
from opsd.slurm.ownership import PreflightResult, give_back, note_test
from opsd.slurm.port import Slurm, SlurmError

HISTORY: Final = "preflight.sqlite"
BURN_IN_H: Final = 24.0
_STOP: Final = (signal.SIGINT, signal.SIGTERM)
FORMATS: Final[Mapping[str, Callable[[Report], str]]] = {
    "json": Report.to_json,
    "junit": view.junit,
    "markdown": view.markdown,
    "textfile": view.openmetrics,
}


@dataclass(frozen=True, slots=True)
class Request:
    """What to check, and where reports go. A burn-in goes on for ``hours``."""

    context: Context
    only: Sequence[str]
    skip: Sequence[str]
    state_dir: Path
    targets: Mapping[str, Path]
    hours: float | None = None


def preflight(request: Request, checks: Sequence[Check], console: Console) -> Report:
    """Run the checks, show and write the results. Raises SelectionError or FleetError before any check starts."""
    settings = request.context.settings
    validate(settings, checks)
    skip = {*request.skip, *(set(settings.skip) - {*request.only})}
    selected = select(checks, request.context.profile, request.only, skip)
    fleet = Fleet.read(Path(settings.fleet)) if settings.fleet else None
    history = History(request.state_dir / HISTORY)
    known, python = request.context, settings.python or sys.executable
    ensure_torch(python, selected, known, settings.optional)
    known = replace(known, demand=demand_by(python, known))
    with Dependents() as mine, _logs(request.state_dir) as logs, view.watching(console) as watcher:
        mine.claim_descendants()
        check_run = CheckRun(
            selected,
            known,
            logs,
            frozenset(settings.optional),
            python,
            lambda check: yardsticks(check, request.context.node, settings, history, fleet, console),
        )
        if request.context.profile == burnin.PROFILE:
            report = _burn_in(request, check_run, watcher, console)
        else:
            report = asyncio.run(_until_interrupted(run(check_run, watcher)))
    view.show(report, console)
    keep(report, request.targets, history, console)
    return report


def _burn_in(request: Request, check_run: CheckRun, watcher: view.View, console: Console) -> Report:
    """Run rounds for the requested time. Raises SelectionError if nothing can be stored."""
    root, hours = request.state_dir / burnin.PROFILE, request.hours or BURN_IN_H
    try:
        burn = burnin.begin(root, request.context.node, check_run.checks, hours * 3600, time.time())
    except OSError as error:
        raise SelectionError(f"a burn-in is kept in {root}, which cannot be written: {error.strerror}") from error

    async def one_round() -> Report:
        report = await run(check_run, watcher)
        watcher.brief = True
        return report

    def tell(sentence: str) -> None:
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)

    async def all_rounds() -> Report:
        with series.recording(burn.series_file, request.context.nvml_library):
            return await burnin.go_on(burn, one_round, tell)

    report = asyncio.run(_until_interrupted(all_rounds()))
    keep(report, {} if report.interrupted else {"json": burn.report_file}, None, console)
    curves = [series.thinned(trend, 20) for trend in series.trends(series.read(burn.series_file))]
    if curves:
        console.print(render(curves))
    return report


_QUESTION: Final = """
from importlib.util import find_spec
from opsd import __version__
print(__version__, find_spec("torch") is not None)
"""
_PATIENCE_S: Final = 60.0
"""The first start from a cold network file system takes many seconds."""


def ensure_torch(python: str, checks: Iterable[Check], context: Context, optional: Collection[str] = ()) -> None:
    """Check that ``python`` can run those of ``checks`` that need torch and apply here; ``optional`` ones may lack it.

    Raises SelectionError with the remedy.
    """
    root = os.geteuid() == 0
    wanting = [c.name for c in checks if "torch" in c.needs and unmet_need(c, context, root=root) is None]
    if not wanting:
        return
    has_torch = _ask(python)
    demanded = ",".join(name for name in wanting if name not in optional)
    if demanded and not has_torch:
        raise SelectionError(
            f"torch is not installed in {python}: install it with `deploy/install --train`, name the Python of the "
            f"training in preflight.python, or leave out what needs it with --skip {demanded}"
        )


def _ask(python: str) -> bool:
    """Whether ``python`` has torch. Raises SelectionError if it cannot be started or lacks this opsd."""
    command = [python, "-P", "-c", _QUESTION]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except OSError as error:
        raise SelectionError(f"preflight.python: {python} cannot be started: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise SelectionError(f"preflight.python: {python} did not start within {_PATIENCE_S:.0f} s") from error
    version, _, torch = done.stdout.strip().partition(" ")
    if done.returncode or version != __version__:
        found = f"has opsd {version}" if version else "has no opsd that works"
        raise SelectionError(f"preflight.python: {python} {found}; install opsd {__version__} there, as it is here")
    return torch == "True"


def validate(settings: PreflightSettings, checks: Sequence[Check]) -> None:
    """Raise SelectionError if the settings name a check or measure that does not exist or cannot be bounded.

    Bounds may be those of checks of the network too, which never run here.
    """
    for name in settings.optional:
        find(checks, name)
    for name, limits in settings.limits.items():
        bounded = [measure.name for measure in find((*checks, *NETWORK), name).measures if measure.better]
        for measure in limits:
            if measure not in bounded:
                known = f"it has {', '.join(bounded)}" if bounded else "it has none"
                raise SelectionError(f"preflight.limits.{name}.{measure}: {name} has no such measure; {known}")


def yardsticks(
    check: Check, node: str, settings: PreflightSettings, history: History, fleet: Fleet | None, console: Console
) -> Yardsticks:
    """What to compare the check's values with; an unreadable history is reported and left out."""
    limits = {measure: Bounds(fail=value) for measure, value in settings.limits.get(check.name, {}).items()}
    medians = fleet.medians(check.name) if fleet else {}
    try:
        return Yardsticks(limits, history.past(node, check.name), history.facts(node, check.name), medians)
    except HistoryError as error:
        say(console, f"{error}; {check.name} is judged without it")
        return Yardsticks(limits, fleet=medians)


def keep(report: Report, targets: Mapping[str, Path], history: History | None, console: Console) -> None:
    """Write the report to ``targets``, by format, and to the history. Errors are reported."""
    for form, path in targets.items():
        try:
            write_text(path, FORMATS[form](report))
        except OSError as error:
            say(console, f"the report was not written to {path}: {error.strerror or error}; the verdict stands")
    if history is None or report.interrupted:
        return
    try:
        history.record(report)
    except HistoryError as error:
        say(console, f"{error}; the verdict stands")


def say(console: Console, sentence: str) -> None:
    """Print a problem that does not change the verdict."""
    console.print(f"opsd: {sentence}", style="yellow", highlight=False, markup=False, soft_wrap=True)


async def _until_interrupted(work: Coroutine[Any, Any, Report]) -> Report:
    """Run ``work``; SIGINT and SIGTERM cancel it, which ends every child and leaves a partial report.

    After the first signal both are ignored for the rest of the process: a second Ctrl-C must not interrupt the end of
    the children or the writing of the results.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(work)

    def interrupt(_number: int, _frame: object) -> None:
        for number in _STOP:
            signal.signal(number, signal.SIG_IGN)
        if not loop.is_closed():
            loop.call_soon_threadsafe(task.cancel)

    for number in _STOP:
        signal.signal(number, interrupt)
    return await task


@contextlib.contextmanager
def _logs(state_dir: Path) -> Iterator[Path]:
    """The folder for the output of checks: in the state folder, or a temporary one if that is not writable."""
    folder = state_dir / "preflight-logs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(folder)
        yield folder
    except OSError:
        with tempfile.TemporaryDirectory(prefix="opsd-preflight-") as temporary:
            yield Path(temporary)


DEFAULT: Final = PolicySettings()
MARK: Final = "preflight"
"""Follows opsd's prefix in the reasons of these drains; only such nodes are returned here."""
Drain = Callable[[str, str], str]
"""Drains a node for a reason, and says what was done. Raises SlurmError."""


def reason_for(report: Report, evidence: Path) -> str:
    """The reason of the drain on one line: the failed checks, and where the evidence is."""
    return f"{MARK} {report.failures}; see {evidence}"


def act(
    report: Report,
    evidence: Path,
    drain: Drain,
    slurm: Callable[[], Slurm],
    policy: PolicySettings = DEFAULT,
    *,
    whole: bool = False,
) -> str:
    """Drain or return the node of ``report``; returns what was done, "" for nothing. Raises SlurmError.

    An interrupted preflight does nothing. A node is returned only if an earlier preflight of the same profile drained
    it and it does not relapse too often. A drain by a person or an incident stays. One that is in service and has
    passed the ``whole`` of ``policy.return_profile`` counts as tested in its history, which then has its NVLink domain.
    """
    if report.interrupted:
        return ""
    if not report.passed:
        return drain(report.node, reason_for(report, evidence))
    try:
        found = slurm().nodes([report.node])
        if not found or not found[0].reason.startswith(f"{OWN_PREFIX} {MARK} {report.profile} "):
            proved = bool(found) and found[0].usable and whole and report.profile == policy.return_profile
            noted = proved and note_test(slurm(), report.node, report.started, _domain(report))
            return f"{report.node} counts as tested" if noted else ""
        policy = policy.model_copy(update={"return_profile": report.profile})
        passed = {report.node: PreflightResult(report.ended, passed=True)}
        back = give_back(slurm(), [report.node], passed, policy, now=report.ended)
        return f"gave {report.node} back to Slurm" if back else ""
    except SlurmError as error:
        raise SlurmError(f"Slurm: {error}") from error


def _domain(report: Report) -> str:
    """The NVLink domain that the node shares, "" if the driver told none."""
    facts = [result.facts for result in report.results if result.check == gpu_inventory.CHECK.name]
    return facts[0].get(gpu_inventory.DOMAIN, "") if facts else ""


def quarantine(
    report: Report,
    settings: Settings,
    written: Path | None,
    console: Console,
    ordering: Callable[[Drain], Drain] = lambda drain: drain,
) -> None:
    """Tell Slurm the verdict, within the limits of the policy, and print what was done.

    ``written`` is the report as JSON if that was requested; otherwise a copy is stored in the state folder as evidence.
    ``ordering`` makes a drain that orders the node's repair as well.
    """
    evidence = written
    if evidence is None or str(evidence) == "-":
        evidence = settings.agent.state_dir / f"preflight-{report.node}-{report.started:.0f}.json"
        keep(report, {"json": evidence}, None, console)
    slurm = cache(lambda: choose().slurm)
    policy = settings.policy
    drainer = ordering(SlurmDrainer(slurm, report.node, policy))
    try:
        whole = is_whole(report, CHECKS, settings.preflight)
        done = act(report, evidence.absolute(), drainer, slurm, policy, whole=whole)
    except (SlurmError, SelectionError) as error:
        say(console, f"{report.node} was left as it is: {error}")
    else:
        if done:
            console.print(done, highlight=False, markup=False, soft_wrap=True)
