"""What runbooks make of evidence: whose it is, how often it came, and what it costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.agent import lifecycle
from opsd.agent.window import MAX_ENDED, SLACK_S, Holders, Window
from opsd.collectors.base import Event, GpuFact, NoData, RankFact, Reading, RunFact, Sample, StepFact
from opsd.collectors.lib.kernel.xid import CATALOGUE, Xid, XidAction, xid_event
from opsd.collectors.lib.nvml.series import RECOVERY_ACTION
from opsd.runbooks import RUNBOOKS, collective_hang, gpu_lost, gpu_xid
from opsd.runbooks.base import Action, Cost, Culprit, Evidence, Finding, Incident, Severity, View
from opsd.runbooks.lib.gpus import xids_of
from opsd.runbooks.lib.losses import FLOPS, TOKENS, followed, lost, lost_by, since_first_growth
from opsd.runbooks.lib.runs import recovered
from opsd.runbooks.lib.xids import bursts, too_often
from opsd.runbooks.loss_plateau import RUNBOOK as PLATEAU
from opsd.runbooks.loss_spike import RUNBOOK as SPIKE
from opsd.scenarios.model import Scenario
from opsd.scenarios.player import play
from tests.fakes.clock import eventually
from tests.fakes.collectors import VALUE, Agent, FakeCollector, runbook
from tests.fakes.facts import rank, steps
from tests.fakes.incidents import finding, incident
from tests.fakes.noise import Tracks

# Which GPU an Xid belongs to, whichever source told of it.


LOST = GpuFact(3, "GPU-3", "00000000:4A:00.0", "H100", lost="GPU is lost")

UNKNOWN = GpuFact(4, "", "", "", lost="GPU is lost")


def seen(*data: dict[str, object]) -> Window:
    window = Window("n01")
    window.begin(100.0, 1000.0)
    events = tuple(Event("xid", 990.0 + index, f"Xid {index}", about) for index, about in enumerate(data))
    window.add("nvml", Reading(events=events, facts=(LOST, UNKNOWN)))
    return window


def test_an_xid_is_matched_by_uuid_or_address() -> None:
    """The driver's own events have the UUID, those of the kernel log only the PCI address."""
    view = seen(
        {"uuid": "GPU-3", "pci_bus_id": LOST.pci_bus_id},
        {"pci_bus_id": LOST.pci_bus_id},
        {"uuid": "GPU-5", "pci_bus_id": "00000000:5A:00.0"},
        {"uuid": "", "pci_bus_id": ""},
    )
    assert [event.message for event in xids_of(view, LOST, 60.0)] == ["Xid 0", "Xid 1"]
    assert xids_of(view, LOST, 5.0) == []


def test_a_gpu_that_was_never_seen_has_no_xids() -> None:
    """Without UUID and address nothing can be said about whose an Xid is."""
    assert xids_of(seen({"uuid": "", "pci_bus_id": ""}, {}), UNKNOWN, 60.0) == []


def test_the_kernel_log_is_evidence_of_a_lost_gpu() -> None:
    """What the driver wrote about it stands beside what it answers."""
    (finding,) = gpu_lost.RUNBOOK.detect(seen({"pci_bus_id": LOST.pci_bus_id}))
    assert "Xid 0 10 s ago" in [evidence.text for evidence in finding.evidence]


@pytest.mark.parametrize("live", [False, True])
def test_a_node_without_ranks_is_drained_for_what_would_swap_it_out(live: bool) -> None:
    """It leaves no run, and waits for nobody but jobs; one with ranks that cannot be swapped stays."""
    view = seen()
    if live:
        view.add("ranks", Reading(facts=(rank(0),)))
    actions = gpu_lost.RUNBOOK.remedy(incident("gpu_lost-1"), view)
    assert [action.verb for action in actions] == ([] if live else ["drain_node"]) + ["notify"]
    assert live or actions[0].args["kind"] == incident("gpu_lost-1").kind


def test_the_runs_on_gpus_are_swapped_first() -> None:
    """What anybody may invent waits; a node with a rank on no GPU, which nobody swaps, is drained at once."""
    invented, real = rank(0, run="a", gpu=None), rank(1, run="z")
    view = seen()
    runs = [RunFact(name, "", "n01", "running", 1, 1, True, 4, f"/shm/{name}/c", "/r", "/r") for name in ("a", "z")]
    view.add("ranks", Reading(facts=(invented, real, *runs)))
    swaps = [action for action in gpu_lost.RUNBOOK.remedy(incident("gpu_lost-1"), view) if action.verb != "notify"]
    assert [(swap.verb, swap.args["control"]) for swap in swaps] == [
        ("swap_node", "/shm/z/c"),
        ("swap_node", "/shm/a/c"),
    ]
    view.add("ranks", Reading(facts=(invented,)))
    assert gpu_lost.RUNBOOK.remedy(incident("gpu_lost-1"), view)[0].verb == "drain_node"


# How often an Xid came, and what that means.


GPU = GpuFact(0, "GPU-0", "00000000:1A:00.0", "H100")

NOW = 1_000_000.0

REMEDIES = (
    {"none", "ignore"},
    {"restart_app"},
    {"update_software", "workflow", "contact_support"},
    {"drain_p2p", "recover_imex_domain"},
    {"reset_gpu", "drain_and_reset"},
    {"restart_vm", "reboot_node"},
    {"check_mechanicals", "replace_board"},
    {"diagnostics"},
)

VERDICTS = ("reset_gpu", "reboot_node", "drain_p2p", "replace_board")


def xids(code, times):
    return [Event("xid", at, "", {"code": code, "pci_bus_id": "00000000:1A:00.0"}) for at in times]


def test_xids_within_a_minute_are_one_burst():
    """A fault that is told twenty times has happened once."""
    assert bursts(xids(13, [0, 1, 2, 50, 105]), 13) == 1
    assert bursts(xids(13, [0, 61, 300]), 13) == 3
    assert bursts(xids(13, [0]), 31) == 0


@given(st.lists(st.floats(0, 1e5), min_size=1, max_size=30))
def test_bursts_depend_on_the_times_only(times):
    """There is at least one burst, never more than events, and their order does not matter."""
    count = bursts(xids(13, times), 13)
    assert 1 <= count <= len(times)
    assert bursts(xids(13, reversed(times)), 13) == count


@pytest.mark.parametrize(
    ("code", "times", "expected"),
    [
        (31, [0, 3600], True),
        (31, [0, 30], False),
        (13, [0, 3600], False),
        (13, [0, 3600, 7200, 10800, 14400], True),
        (45, [0, 3600, 7200, 10800, 14400], False),
    ],
)
def test_page_faults_count_early_and_echoes_never(code, times, expected):
    """Two page faults or five other bursts in a day call for diagnostics; 45 tells of something else each time."""
    assert too_often(xids(code, times), code) is expected


def remedy(action: str) -> int:
    return next(number for number, actions in enumerate(REMEDIES) if action in actions)


def found(xids: list[tuple[float, Xid]], *others: Event, driver: bool = True) -> str:
    """What the runbook asks for, "none" without a finding; ages in seconds."""
    window = Window("n01")
    window.begin(100.0, NOW)
    events = [xid_event(xid, at=NOW - age, source="kmsg") for age, xid in sorted(xids, key=lambda one: -one[0])]
    window.add("kmsg", Reading(events=(*events, *others)))
    if driver:
        window.add("nvml", Reading(facts=(GPU,)))
    findings = list(gpu_xid.RUNBOOK.detect(window))
    return str(findings[0].data["action"]) if findings else "none"


def an_xid(code: int, verdict: str = "") -> Xid:
    return Xid(code, GPU.pci_bus_id, verdict=verdict)


@pytest.mark.parametrize("mild", [13, 31, 32, 43, 45, 94])
@pytest.mark.parametrize("fatal", [46, 48, 62, 64, 79, 95, 119, 140, 143, 154])
def test_a_mild_xid_takes_nothing_back(mild, fatal):
    """In both orders, and hours apart, the fatal one decides."""
    severe = an_xid(fatal, "reset_gpu" if fatal == 154 else "")
    for ages in ((2, 1), (1, 2), (20_000, 1)):
        assert found(list(zip(ages, (severe, an_xid(mild)), strict=True))) == str(severe.action), ages


DETAILS = (
    "pid=123, name=python, Ch 00000008",
    "SAW_MVB NON_FATAL: Link 3 (0x1 0x2 0x3)",
    "RLW_RXPIPE Fatal XC1 i0 Link 02 (0x00000008 0x00000000 0x00000000 0x00000000 0x00000000 0x00000000)",
    "NETIR_LINK_DOWN Fatal XC0 i0 Link 12 (0x00000004 0x00000000 0x1 0x2 0x0 0x0)",
    "NVLink: fatal error detected on link 6(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)",
    "",
)


@given(st.data(), st.booleans())
def test_more_evidence_is_never_a_lesser_verdict(data, driver):
    """Any mixture of the catalogue and of 154, in any order, in bursts and at once, with and without the driver."""
    codes = st.builds(
        lambda code, detail: Xid(code, GPU.pci_bus_id, detail=detail),
        st.sampled_from([*(code for code in CATALOGUE if code != 154), 999]),
        st.sampled_from(DETAILS),
    )
    verdicts = st.builds(an_xid, st.just(154), st.sampled_from(VERDICTS))
    ages = st.sampled_from((0, 1, 30, 59, 61, 299, 301, 599, 601, 1801, 7200, 80_000))
    xids = data.draw(st.lists(st.tuples(ages, st.one_of(codes, verdicts)), min_size=1, max_size=7))
    fewer = [xid for xid in xids if data.draw(st.booleans())]
    assert remedy(found(xids, driver=driver)) >= remedy(found(fewer, driver=driver))


@pytest.mark.parametrize(
    ("asked", "healed"), [(None, False), (0.0, True), (1.0, False)], ids=["says nothing", "nothing", "reset"]
)
def test_a_reset_that_nobody_has_done_is_not_over_after_a_day(asked, healed):
    """Time heals no GPU: only a driver that asks for nothing."""
    window = Window("n01")
    for now in (99.0, 100.0):
        window.begin(now, NOW + now - 100)
        samples = () if asked is None else (Sample(RECOVERY_ACTION, asked, ("0", GPU.uuid)),)
        window.add("nvml", Reading(samples=samples, facts=(GPU,)))
    data = {"pci": GPU.pci_bus_id, "uuid": GPU.uuid, "action": "reset_gpu", "at": NOW - 90_000}
    opened = incident("gpu_xid-1", kind="gpu_xid", data=data, opened_at=NOW - 90_000)
    assert gpu_xid.RUNBOOK.healed(opened, window) is healed


@pytest.mark.parametrize("proof", ["driver loaded", "verdict none"])
def test_only_health_ends_an_episode(proof):
    """After a reset a mild Xid is only that."""
    well = Event("gpu_driver_loaded", NOW - 100, "", {})
    xids = [(200.0, an_xid(95)), (1.0, an_xid(13))]
    if proof == "verdict none":
        xids.append((100.0, an_xid(154, "none")))
    assert found(xids, *([well] if proof == "driver loaded" else [])) == XidAction.RESTART_APP
    assert found(xids[:1], *([well] if proof == "driver loaded" else [])) != XidAction.RESTART_APP


# Losses that are frozen, and runs that begin again under the same id.


LABELS = {"run": "smol", "rank": "0"}


def trained(losses: list[float], *, norms: bool = True, numbers: list[int] | None = None) -> Tracks:
    """A rank that has done a step a second with these losses; with ``norms`` its gradient norm changes as well."""
    view, numbers = Tracks(1), numbers or list(range(len(losses)))
    loss, step = view.track("opsd_rank_loss", **LABELS), view.track("opsd_rank_step", **LABELS)
    done: list[StepFact] = []
    for number, value in zip(numbers, losses, strict=True):
        view.now += 1.0
        loss.add(view.now, value)
        step.add(view.now, float(number))
        norm = 1.0 + 1e-3 * view.now if norms else float("nan")
        done.append(replace(steps(1, until=view.now, forward=1.0)[0], step=number, loss=value, grad_norm=norm))
    view.ranks = [page(done)]
    return view


def page(done: list[StepFact]) -> RankFact:
    """What the rank's page shows of its steps: the last 64."""
    return rank(0, world_size=1, steps=tuple(done[-64:]), steps_reported=len(done))


def falling(count: int) -> list[float]:
    """A loss that changes with each step."""
    return [3.0 - 1e-3 * number for number in range(count)]


@pytest.mark.parametrize("value", [0.0, 2.25])
@pytest.mark.parametrize("norms", [True, False])
def test_a_frozen_loss_is_found_in_thirty_steps(value: float, norms: bool) -> None:
    """Not after 29 steps; whether the gradient norm is known or not."""
    assert list(PLATEAU.detect(trained(falling(100) + [value] * 29, norms=norms))) == []
    (finding,) = PLATEAU.detect(trained(falling(100) + [value] * 30, norms=norms))
    assert "frozen" in finding.summary and finding.severity == "critical"


def test_a_loss_that_is_zero_from_the_first_step_is_found() -> None:
    """There is nothing to compare it with, and nothing that it could be but wrong."""
    (finding,) = PLATEAU.detect(trained([0.0] * 30, norms=False))
    assert "exactly 0" in finding.summary


def test_a_loss_that_is_only_logged_now_and_then_is_not_frozen() -> None:
    """Some trainers repeat the last loss that they have logged until the next one."""
    losses = [3.0 - 1e-3 * (number // 50) for number in range(400)]
    assert list(PLATEAU.detect(trained(losses, norms=False))) == []


def test_a_loss_nobody_reports_is_not_frozen() -> None:
    """It is nan in each step."""
    assert list(PLATEAU.detect(trained([float("nan")] * 60))) == []


def test_a_run_that_begins_again_has_no_spike() -> None:
    """The id of a run is used again from step 0: a loss like at the first steps is no jump."""
    again = [8.0 - 0.01 * number for number in range(40)]
    view = trained(falling(300) + again, numbers=[*range(300), *range(40)])
    assert list(SPIKE.detect(view)) == []


def test_a_spike_after_a_restart_from_a_checkpoint_is_still_one() -> None:
    """Going back some steps is no new beginning."""
    view = trained(falling(300) + falling(60) + [9.0] * 5, numbers=[*range(300), *range(250, 310), *range(310, 315)])
    assert len(list(SPIKE.detect(view))) == 1


# What a runbook knows of a run from the launcher on this node.


def seen_run(state: str, *ranks: int) -> Window:
    fact = RunFact("smol", "4242", "n1", state, 2, 900, True, 16, "/control", "/folder", "/folder/logs")
    window = Window("n1", interval_s=1.0)
    window.begin(100.0, 1000.0)
    window.add("ranks", Reading(facts=(fact, *map(rank, ranks))))
    return window


@pytest.mark.parametrize(
    ("state", "over"), [("finished", True), ("restarting", False), ("waiting", False), ("spare", None)]
)
def test_a_spare_does_not_know_whether_the_run_goes_on(state: str, over: bool | None) -> None:
    """The node that was swapped out sees nothing of the run any more: its trouble is not kept open by that."""
    assert recovered(seen_run(state), "smol", 1) is over


@pytest.mark.parametrize(("user", "named"), [(7, "n9"), (8, None)])
def test_ras_names_the_culprit_of_its_own_users_run_only(user: int, named: str | None) -> None:
    """Any user can listen where RAS does: it tells nothing about the hang of another user's run."""
    silent = {"host": "n9", "pid": 1, "gpu": 0}
    assert culprit_by_ras(silent, rank(0, user=7), user=user).node == named


@pytest.mark.parametrize(("pid", "gpu", "named"), [(12, 1, 1), (12, 3, None), (15, 0, 2), (502, 2, None), (1003, 3, 3)])
def test_ras_names_ranks_by_their_numbers_in_the_container(pid: int, gpu: int, named: int | None) -> None:
    """Ranks of several containers may have the same number: the GPU tells them apart, or it stays open."""
    inside = (rank(0, pid=500, inside=12), rank(1, pid=501, inside=12), rank(2, pid=502, inside=15), rank(3))
    assert culprit_by_ras({"host": "n1", "pid": pid, "gpu": gpu}, *inside).rank == named


def culprit_by_ras(silent: Mapping[str, object], *ranks: RankFact, user: int | None = None) -> Culprit:
    """Whom the incident names after RAS, asked in the ranks of ``user``, has called this process dead."""
    window = Window("n1", interval_s=1.0)
    window.begin(100.0, 1000.0)
    said = {"kind": "dead", "text": "rank 3 is dead", "communicator": "a1", "ranks": [silent]}
    told = Event("nccl_ras", 999.0, "rank 3 is dead", said, user)
    window.add("ranks", Reading(facts=ranks, events=(told,)))
    hang = Finding("smol", Severity.CRITICAL, "", Culprit("unknown"), 0.3, (), data={"run": "smol"})
    return collective_hang.RUNBOOK.diagnose(hang, window).culprit


# What a slow run loses: one figure for each quantity, and what is measured beats what is modelled.


SECONDS = 400
"""How long the run has trained, a step a second."""


def trained_slowly(
    slow_s: int, loss: float, *, job: str = "4242", seconds: int = SECONDS, flops: float = 1.0
) -> Tracks:
    """A run that has lost ``loss`` of its tokens per second in the last ``slow_s``; a token costs ``flops`` then."""
    view = Tracks(1)
    tokens, costs, done = view.track(TOKENS, **LABELS), view.track(FLOPS, **LABELS), []
    for number in range(seconds):
        view.now += 1.0
        slow = number >= seconds - slow_s
        trained_tokens = round(100_000 * (1 - loss if slow else 1))
        tokens.add(view.now, float(trained_tokens))
        costs.add(view.now, flops if slow else 1.0)
        done.append(StepFact(number, view.now, 1.0, trained_tokens, 2.5, 1.0, {"forward": 1.0}))
    view.ranks = [rank(0, job=job, steps=tuple(done[-64:]), steps_reported=seconds)]
    return view


@pytest.mark.parametrize(
    ("view", "estimate", "lasting_s", "says"),
    [
        (trained_slowly(40, 0.12), 0.34, 40.0, "job 4242 loses 12% (4 GPUs, measured)"),
        (trained_slowly(40, 0.12, job=""), 0.34, 40.0, "run smol loses 12% (4 GPUs, measured)"),
        (trained_slowly(40, 0.0), 0.15, 40.0, "job 4242 loses less than 1% (4 GPUs, measured)"),
        (trained_slowly(3, 0.12), 0.34, 3.0, "job 4242 loses 34% (4 GPUs, estimated)"),
        (trained_slowly(40, 0.12, seconds=100), 0.34, 40.0, "job 4242 loses 34% (4 GPUs, estimated)"),
        (trained_slowly(400, 0.12), 0.34, 400.0, "job 4242 loses 34% (4 GPUs, estimated)"),
        (trained_slowly(40, 0.12, flops=1.2), 0.34, 40.0, "job 4242 loses 34% (4 GPUs, estimated)"),
        (trained_slowly(40, 0.12), 0.15, None, "job 4242 loses 12% (4 GPUs, measured)"),
        (trained_slowly(400, 0.12), 0.15, None, "job 4242 loses 15% (4 GPUs, estimated)"),
    ],
    ids=[
        "measured", "a run without a job", "it costs nothing", "too few steps since", "too short a past", "no past",
        "tokens cost more", "an unknown beginning", "perhaps it was never faster",
    ],
)  # fmt: skip
def test_what_is_measured_beats_the_estimate(view: Tracks, estimate: float, lasting_s: float | None, says: str) -> None:
    """And an estimate says that it is one."""
    cost = lost(view, view.ranks[0], estimate, lasting_s=lasting_s, counted_s=10.0)
    assert cost.text == says
    assert cost.gpu_seconds == pytest.approx(cost.throughput_ratio * 4 * 10.0)


def test_the_run_is_measured_by_what_was_usual_when_the_fault_began() -> None:
    """Later its past is as slow as its present, and the figure stays; as the run recovers it becomes less."""
    began = trained_slowly(40, 0.2)
    cost = lost(began, began.ranks[0], 0.34, lasting_s=40.0)
    for view, says in (
        (trained_slowly(400, 0.2), "job 4242 loses 20% (4 GPUs, measured)"),
        (trained_slowly(400, 0.06), "job 4242 loses 6% (4 GPUs, measured)"),
    ):
        cost = followed(cost, lost(view, view.ranks[0], 0.34, lasting_s=400.0))
        assert cost.text == says
    other = replace(lost(view, view.ranks[0], 0.34, lasting_s=400.0), whose="job 4243")
    assert followed(cost, other) == other


def test_an_incident_adds_up_what_is_measured() -> None:
    """The share that is shown is the share that is counted."""
    began, later = trained_slowly(40, 0.2), trained_slowly(400, 0.2)
    incident = lifecycle.opened(finding(cost=lost(began, began.ranks[0], 0.34, lasting_s=40.0)), 1000.0)
    told = lost(later, later.ranks[0], 0.34, lasting_s=400.0)
    after = lifecycle.merged(incident, finding(cost=told), 1002.0)
    assert after.cost.text == "job 4242 loses 20% (4 GPUs, measured)"
    assert after.cost.gpu_seconds == pytest.approx(0.2 * 4 * 2.0)


def test_what_nobody_measures() -> None:
    """Work without a run is estimated, and costs in words stay as they are."""
    assert lost_by("this GPU's work", 0.154, 1, 60.0).text == "this GPU's work loses 15% (1 GPU, estimated)"
    said = Cost(1.0, 8.0, "8 GPUs stood still for 1.0 s")
    assert followed(Cost(), said) == said


def test_a_fault_is_as_old_as_the_first_growth_of_its_counter() -> None:
    """In the window."""
    view = Tracks(1)
    spent = view.track("spent")
    for second in range(100):
        view.now += 1.0
        spent.add(view.now, float(max(0, second - 69)))
    (series,) = view.select("spent")
    assert since_first_growth(series, view.now) == 29.0


# What opsd does about heat: which power limit it sets, and when it leaves the GPU alone.


HOT = "opsd_gpu_throttle_seconds_total{reason=sw_thermal}"


def limits(*moments, duration=40, on=()):
    """The arguments of the power limits that the agent sets on GPU 1, in their order."""
    scenario = Scenario.model_validate({"title": "heat", "duration": duration, "at": list(moments), "on": list(on)})
    return [action.args for _, _, action in play(scenario, "act").actions if action.verb == "set_power_limit"]


def change(t, **series):
    """A change of series of GPU 1 at second ``t``."""
    return {"t": t, "gpu": 1, "set": series}


def test_the_limit_goes_down_by_fifteen_percent():
    """A GPU that draws what it may gets 85 % of that."""
    hot = change(10, **{HOT: {"rate": 1.0}, "DCGM_FI_DEV_POWER_USAGE": 690})
    assert limits(hot) == [{"gpu": 1, "watts": 595, "restore_watts": 700.0}]


def test_a_limit_above_what_the_gpu_draws_would_change_nothing():
    """Throttled to 460 W, it must be limited to less than that to become any cooler."""
    hot = change(10, **{HOT: {"rate": 1.0}, "DCGM_FI_DEV_POWER_USAGE": {"to": 460, "noise": 0}})
    assert [args["watts"] for args in limits(hot)] == [437]


def test_the_limit_never_falls_below_sixty_percent_of_the_default():
    """A GPU that is throttled to next to nothing is not helped by software."""
    hot = change(10, **{HOT: {"rate": 1.0}, "DCGM_FI_DEV_POWER_USAGE": 200})
    assert [args["watts"] for args in limits(hot)] == [420]


def test_every_attempt_remembers_the_limit_before_the_first():
    """What is to be restored after the service is what was in force before opsd came."""
    hot = change(10, **{HOT: {"rate": 1.0}})
    answer = {"action": "set_power_limit", "after": 1, "gpu": 1, "set": {"opsd_gpu_power_limit_watts": 595}}
    assert [args["restore_watts"] for args in limits(hot, duration=100, on=[answer])] == [700.0, 700.0]


def costs(*moments):
    """What the first incident of GPU 1 costs, in words, at its end."""
    scenario = Scenario.model_validate({"title": "heat", "duration": 60, "at": list(moments)})
    return next(i.cost.text for i in play(scenario, "observe").incidents.values() if i.kind == "gpu_throttle")


def test_a_throttle_without_effect_on_the_clock_costs_next_to_nothing():
    """The counter of the driver moves; 0 % would be no cost at all."""
    hot = change(10, **{HOT: {"rate": 1.0}})
    assert costs(hot) == "job 4242 loses less than 1% (4 GPUs, estimated)"


def test_a_gpu_that_has_become_idle_is_left_alone():
    """The job ended before the effect could be seen: that it is cool now proves nothing and calls for nothing."""
    hot = change(10, **{HOT: {"rate": 1.0}})
    idle = change(30, **{HOT: {"rate": 0.0}, "DCGM_FI_DEV_GPU_UTIL": 0, "DCGM_FI_DEV_POWER_USAGE": 70})
    assert len(limits(hot, idle, duration=200)) == 1


# Who worked on a node when something struck is known after the rank is gone.


T0 = 1_700_000_000.0

RANK = rank(2, pid=77)

GONE = replace(RANK, process=None)


def test_a_rank_that_is_gone_was_there_at_the_time_of_the_event():
    """Its page is removed, or its process is, before an incident is judged."""
    holders = Holders()
    holders.note([RANK], T0)
    holders.note([GONE], T0 + 60)
    assert [fact.job for fact in holders.at(T0 + 30)] == ["4242"]
    assert holders.at(T0 + 60 + SLACK_S + 1) == []
    assert holders.at(T0 - SLACK_S - 1) == []


def test_nobody_leaves_while_the_pages_cannot_be_read():
    """A blind collector is no evidence that ranks ended."""
    holders = Holders()
    holders.note([RANK], T0)
    assert [fact.rank for fact in holders.at(T0 + 300)] == [2]


def test_stays_move_with_the_wall_clock():
    """The events that are looked up are moved as well."""
    holders = Holders()
    holders.note([RANK], T0)
    holders.note([], T0 + 10)
    holders.shift(-3600.0)
    assert holders.at(T0 + 5) == []
    assert len(holders.at(T0 + 5 - 3600)) == 1


def test_those_that_left_are_bounded():
    """A launcher that restarts without end fills no memory."""
    holders = Holders()
    for pid in range(MAX_ENDED + 50):
        holders.note([replace(RANK, pid=pid)], T0)
    assert len(holders.at(T0)) == MAX_ENDED + 1


def test_the_window_tells_who_was_there():
    """Also when the ranks' collector has failed since."""
    window = Window("node", seconds=60)
    window.begin(0.0, T0)
    window.add("ranks", Reading(facts=(RANK,)))
    window.begin(1.0, T0 + 1)
    window.forget("ranks")
    assert [fact.pid for fact in window.ranks_then(T0 + 1)] == [77]
    assert [fact.pid for fact in window.witnessed.ranks_then(T0 + 1)] == [77]


EVENTS = {
    "rank_crash": ("rank_exited", {"culprit": True, "exit": "signal SIGKILL", "step": 7}),
    "rank_hang": ("hang_detected", {"stuck_s": 20.0, "phase": "forward", "reason": "rank 2: it sleeps"}),
    "straggler": ("straggler_found", {"ranks": [2], "cause": "slow GPU", "slowdown": 1.4}),
    "replica_divergence": (
        "replicas_differ",
        {"step": 40, "tensor": "head", "ranks": [0, 1, 2], "checksums": ["a", "a", "b"]},
    ),
    "silent_corruption": (
        "replay_differs",
        {"step": 40, "ranks": [2], "checksums": ["a", "b"], "repeats": 3, "differing": 1},
    ),
}


@pytest.mark.parametrize("kind", EVENTS)
def test_evidence_that_is_read_late_names_the_gpu_of_its_time(kind):
    """The launcher has started the rank again meanwhile, and it has no page yet."""
    name, data = EVENTS[kind]
    window = Window("node", seconds=600)
    window.begin(0.0, T0)
    window.add("ranks", Reading(facts=(replace(RANK, gpu=5),)))
    event = Event(name, T0 + 1.0, "", {"run": RANK.run, "generation": RANK.generation, "rank": 2, **data})
    window.begin(30.0, T0 + 30)
    window.add("ranks", Reading(events=(event,), facts=(rank(3),)))
    book = next(book for book in RUNBOOKS if book.kind == kind)
    assert [(found.culprit.gpu, found.culprit.rank) for found in book.detect(window)] == [(5, 2)]


def test_an_xid_names_the_rank_that_it_has_ended():
    """It is read when that rank is gone and its successor has no page yet, or another run has the GPU."""
    window = Window("node", seconds=600)
    gpu = GpuFact(5, "GPU-5", "00000000:5A:00.0", "H100")
    window.begin(0.0, T0)
    window.add("ranks", Reading(facts=(replace(RANK, gpu=5),)))
    xid = Event("xid", T0 + 1.0, "Xid 94", {"code": 94, "pci_bus_id": gpu.pci_bus_id, "action": "restart_app"})
    window.begin(8.0, T0 + 8)
    window.add("ranks", Reading(facts=(replace(RANK, gpu=5, run="next", job="1", rank=0),)))
    window.add("nvml", Reading(events=(xid,), facts=(gpu,)))
    book = next(book for book in RUNBOOKS if book.kind == "gpu_xid")
    assert [(found.culprit.gpu, found.culprit.rank, found.job) for found in book.detect(window)] == [(5, 2, "4242")]


# Hardware is changed, and a node drained, on the word of kernel and drivers only; others are heard.


FAULTY, FAILED = 1.0, 2.0


def detect(view: View) -> Iterator[Finding]:
    worst = max((series.last or 0.0 for series in view.select(VALUE.name)), default=0.0)
    if worst:
        severity = Severity.CRITICAL if worst == FAILED else Severity.WARNING
        yield Finding("x", severity, "s", Culprit("gpu"), 1.0, (Evidence("e", "s", view.wall),))


def remedy_on(incident: Incident, _view: View) -> Sequence[Action]:
    told = Action("notify", "node", reason="told")
    failed = incident.severity is Severity.CRITICAL
    return (Action("set_power_limit", "gpu", {"gpu": 0, "watts": 500}), told) if failed else (told,)


class Node:
    """An agent with a driver and an exporter that say what the test has them say."""

    def __init__(self, folder: Path, driver: float, exporter: float, open_after_s: float = 0.0) -> None:
        self.says = {"driver": driver, "exporter": exporter}
        self.limits: list[float] = []
        collectors = [FakeCollector(name, lambda name=name: self._reading(name)) for name in self.says]
        book = runbook(detect=detect, remedy=remedy_on, needs=(), open_after_s=open_after_s)
        self.agent = Agent(
            folder, collectors, [book], witnesses=["driver"],
            set_power_limit=lambda _gpu, watts: self.limits.append(watts),
        )  # fmt: skip

    def _reading(self, name: str) -> Reading | NoData:
        return Reading((Sample(VALUE, self.says[name], (name,)),))

    def refusals(self) -> list[str]:
        (incident,) = self.agent.incident_manager.current
        return [
            str(a["detail"]) for a in incident.actions if a["verb"] == "set_power_limit" and a["outcome"] == "refused"
        ]


@pytest.mark.parametrize("driver", [0.0, FAULTY])
def test_an_exporter_alone_is_heard_and_changes_nothing(tmp_path: Path, driver: float) -> None:
    """Nor does it make a smaller fault, which the driver knows of, a greater one. People are told."""
    node = Node(tmp_path, driver, FAILED)
    node.agent.tick(2)
    assert node.refusals() == ["neither kernel nor driver gives a reason for it now"]
    assert eventually(lambda: bool(node.agent.told))
    assert node.limits == []


def test_once_the_driver_says_so_it_is_done(tmp_path: Path) -> None:
    """What was refused a second ago is not refused for good."""
    node = Node(tmp_path, 0.0, FAILED)
    node.agent.tick(2)
    assert node.limits == []
    node.says["driver"] = FAILED
    node.agent.tick(2)
    assert eventually(lambda: node.limits == [500.0])


def test_a_driver_that_has_taken_it_back_stops_the_action(tmp_path: Path) -> None:
    """Its word counts in the second in which the action would begin, not that of the opening."""
    node = Node(tmp_path, FAILED, FAILED, open_after_s=2.0)
    node.agent.tick(2)
    node.says["driver"] = 0.0
    node.agent.tick(2)
    assert node.limits == []
    assert node.refusals()
