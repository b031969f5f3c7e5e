"""Which GPU an Xid belongs to, whichever source told of it."""

from __future__ import annotations

import pytest

from opsd.agent.window import Window
from opsd.collectors.base import Event, GpuFact, Reading, RunFact
from opsd.runbooks import gpu_lost
from opsd.runbooks.lib.gpus import xids_of
from tests.fakes.facts import rank
from tests.fakes.incidents import incident

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
