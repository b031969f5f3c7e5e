"""``opsd repair``: from drained to healed, or to be replaced."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import click

from opsd import exitcodes
from opsd.collectors.ranks import RanksSettings
from opsd.commands.evidence import check_here
from opsd.commands.options import config_options, exit_codes, option
from opsd.commands.output import fail
from opsd.commands.settings import load
from opsd.commands.undrain import proofs
from opsd.config import Settings
from opsd.notify.receiver import NotifyError, send_to_all
from opsd.preflight.engine import SelectionError
from opsd.preflight.history import HistoryError
from opsd.preflight.report import ReportError
from opsd.repair import evidence
from opsd.repair.attend import Dependencies, Repair, RepairError
from opsd.repair.case_file import CaseError, CaseFile
from opsd.repair.local import driver_of, sources_of, tests_of
from opsd.repair.machine import NodeMachine, RemedyError, run_command
from opsd.repair.pair import Pair
from opsd.repair.parts import RemoteDriver, RemoteTests
from opsd.repair.release import release
from opsd.repair.repair_plan import Case, Step, closed
from opsd.settings.policy import active_silence
from opsd.slurm import node_comment
from opsd.slurm.connect import choose
from opsd.slurm.deferred import DeferredUpdates
from opsd.slurm.port import Slurm, SlurmError, SlurmUnavailable
from opsd.spares import pool, readiness
from opsd.spares.pool import has_requirements

ENDS = {"returned": "repaired and back in service", "rma": "has to be replaced", "left": "not repaired by opsd"}


@click.command(
    epilog=exit_codes(
        {
            0: "the node was returned, nothing was to be done, or (without --act) something would be done",
            1: "the node was not returned",
            2: "the command line is wrong",
        }
    )
)
@click.argument("node", required=False)
@option("--act", "acting", is_flag=True, help="Do it. Without this, say what would be done.")
@option(
    "--ordered", is_flag=True, help="Do what the agent has ordered or a reboot interrupted, if policy.repair is act."
)
@option(
    "--helpers",
    type=click.Path(path_type=Path, file_okay=False),
    help="Have the driver and the tests seen to by the services that listen there, as opsd-repair.service does.",
)
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@config_options
def repair(
    node: str | None,
    acting: bool,
    ordered: bool,
    helpers: Path | None,
    as_json: bool,
    file: Path | None,
    overrides: tuple[str, ...],
) -> int:
    """Repair NODE, this node, which opsd has drained, test it under load, and return it to service.

    The remedies are, from the one that the fault calls for: end leftover processes, reset the GPUs, reload the driver,
    reboot through Slurm. After each the node is tested. One that is not cured is kept out with the reason opsd:rma and
    an archive of evidence. Nothing is done while a job is on the node, or to a node that others hold. After a reboot
    opsd-repair.service goes on.
    """
    settings = load(file, overrides)
    check_here(node, settings)
    if acting and ordered:
        raise click.UsageError("--act is a person's word, --ordered the policy's: give one of them")
    cases = CaseFile(settings.agent.state_dir)
    slurm = choose().slurm
    given = [*([f"--config={file}"] if file else []), *(f"--set={each}" for each in overrides)]
    say = partial(click.echo, err=as_json)
    dependencies = _dependencies(settings, slurm, given, helpers, say)
    if ordered:
        dependencies = replace(dependencies, paused=partial(_maintenance, settings), by_policy=True)
    work = Repair(settings.agent.node, cases, dependencies, settings.policy, settings.repair)
    try:
        if acting or ordered:
            return _do(work, cases, settings, ordered, as_json)
        return _show(work, cases.current_of(settings.agent.node), as_json)
    except (CaseError, RepairError) as error:
        fail(str(error))
    except SlurmError as error:
        fail(f"Slurm: {error}")


def _do(work: Repair, cases: CaseFile, settings: Settings, ordered: bool, as_json: bool) -> int:
    mode = settings.policy.repair
    if ordered and mode != "act" and cases.current() is None:
        cases.drop_order()
        click.echo(f"nothing is done: policy.repair is {mode}", err=as_json)
        return exitcodes.OK
    if os.geteuid() != 0:
        raise RepairError("a repair needs root")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # services that were stopped are started all the same
    with cases.alone():
        case = cases.current_of(settings.agent.node)
        if case is None:
            if ordered and not cases.ordered:
                click.echo("no repair was ordered", err=as_json)
                return exitcodes.OK
            if DeferredUpdates(settings.agent.state_dir).pending():
                raise SlurmUnavailable("the drain of this node waits until Slurm answers")
            try:
                if ordered and (refusal := cases.refusal) is not None:
                    work.adopt(refusal)
                case = work.proposed()
            except RepairError:
                cases.drop_order()
                raise
            case = replace(case, by_hand=not ordered)
            cases.keep(case)
        cases.drop_order()
        if ordered and mode != "act" and not case.by_hand:
            case = closed(case, "left", f"policy.repair is {mode} now", time.time())
            cases.keep(case)
        case = work.attend(case)
    tell(settings, case)
    if as_json:
        click.echo(json.dumps(asdict(case), indent=1))
    return exitcodes.OK if case.end == "returned" else exitcodes.FAILED


def tell(settings: Settings, case: Case) -> None:
    """Notify people of the repair's end, if they are notified of incidents."""
    where, muted = settings.notify.receiver, (*settings.policy.maintenance, *settings.policy.mute)
    if where is None or active_silence(muted, case.kind, time.time()):
        return
    text = f"{case.node}: {ENDS[case.end or 'left']}: {case.verdict}"
    fields = {
        "id": case.id, "node": case.node, "kind": case.kind, "reason": case.reason, "evidence": case.bundle,
        "severity": "info" if case.end == "returned" else "warning",
    }  # fmt: skip
    try:
        send_to_all(str(where), text, fields)
    except NotifyError as error:
        click.echo(f"nobody was told: {error}", err=True)


def _show(work: Repair, under_way: Case | None, as_json: bool) -> int:
    case = under_way or work.proposed()
    step = Step("wait", case.paused) if case.paused else work.next(case)
    if as_json:
        click.echo(
            json.dumps({"under_way": under_way is not None, "case": asdict(case), "next": asdict(step)}, indent=1)
        )
        return exitcodes.OK
    for attempt in case.attempts:
        became = {True: "done", False: "failed", None: "under way"}[attempt.ok]
        click.echo(
            f"{time.strftime('%H:%M:%S', time.localtime(attempt.at))}  {attempt.what} {became}: {attempt.detail}"
        )
    what = (
        str(step.remedy)
        if step.remedy
        else {"rma": "have it replaced", "left": "leave it to people"}.get(step.do, step.do)
    )
    click.echo(f"{case.node}: {what}; {step.why}" if under_way else f"would begin with {what}, for {step.why}")
    return exitcodes.OK


def _maintenance(settings: Settings, kind: str, now: float) -> str:
    span = active_silence(settings.policy.maintenance, kind, now)
    return f"maintenance{f': {span.reason}' if span.reason else ''}" if span else ""


def _dependencies(
    settings: Settings, slurm: Slurm, given: Sequence[str], helpers: Path | None, say: Callable[[str], None]
) -> Dependencies:
    node = settings.agent.node
    driver = RemoteDriver(helpers / "driver") if helpers else driver_of(settings)
    tests = RemoteTests(helpers / "test") if helpers else tests_of(settings, given)

    def bundle(case: Case) -> str:
        try:
            if isinstance(driver, RemoteDriver):
                return driver.evidence(_in_slurm(node))
            return str(evidence.make(sources_of(settings), time.time()))
        except (OSError, RemedyError) as error:
            say(f"the evidence for {case.id} could not be kept: {error}")
            return ""

    def as_spare(stop: Callable[[], str]) -> str:
        try:
            was_spare = bool(node_comment.read(slurm.comments([node]).get(node, "")).spare)
        except SlurmError:
            was_spare = False
        if not was_spare and not has_requirements(settings.spare):
            return ""
        failed = tests.as_spare(stop)
        try:
            known = pool.read(settings.agent.state_dir) or pool.SpareState()
            found = readiness.assess(settings, known, "", time.time())
            readiness.publish(settings, found, lambda: slurm)
        except (HistoryError, ReportError, SelectionError, SlurmError, OSError) as error:
            return f"whether it is a ready spare is not known: {error}"
        lacks = failed or found.why_not_ready(found.checked_at)
        return f"no ready spare: {lacks}" if lacks else "ready as a spare"

    dependencies = Dependencies(
        slurm=slurm,
        machine=NodeMachine(driver, settings.repair.services),
        release=lambda jobs: release(slurm, node, jobs, settings.section(RanksSettings).root),
        retest=tests,
        proof=lambda: proofs(settings, [node], []).get(node),
        bundle=bundle,
        as_spare=as_spare,
        say=say,
    )
    partition = settings.repair.pair_partition
    return replace(dependencies, pair=Pair(slurm, node, partition, tests.with_partner)) if partition else dependencies


def _in_slurm(node: str) -> str:
    try:
        return evidence.slurm_node(node, run_command)
    except RemedyError as error:
        return str(error)
